from tests.cases.dispatch import DispatchCases


class TestGpuDispatch(DispatchCases):
    pass
