from tests.cases.autograd import AutogradCases


class TestAutograd(AutogradCases):
    pass
