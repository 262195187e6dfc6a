from tests.cases.vllm_layer import VllmCases


class TestGpuVllmLayer(VllmCases):
    pass
