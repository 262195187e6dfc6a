from tests.cases.vllm_layer import VllmCases


class TestVllmLayer(VllmCases):
    pass
