from tests.cases.autograd import AutogradCases


class TestGpuAutograd(AutogradCases):
    pass
