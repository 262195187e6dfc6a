from tests.cases.vllm_pass import VllmPassCases


class TestVllmPass(VllmPassCases):
    pass
