from tests.cases.errors import ErrorCases


class TestErrors(ErrorCases):
    pass
