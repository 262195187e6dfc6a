from tests.cases.vllm import VllmCases


class TestVllm(VllmCases):
    pass
