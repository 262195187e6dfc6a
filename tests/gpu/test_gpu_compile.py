from tests.cases.compile import CompileCases


class TestGpuCompile(CompileCases):
    pass
