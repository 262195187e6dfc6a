from tests.cases.dispatch import DispatchCases


class TestDispatch(DispatchCases):
    pass
