from tests.cases.compile import CompileCases


class TestCompile(CompileCases):
    pass
