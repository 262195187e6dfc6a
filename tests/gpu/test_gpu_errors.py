from tests.cases.errors import ErrorCases


class TestGpuError(ErrorCases):
    pass
