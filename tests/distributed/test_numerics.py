from tests.cases.numerics import NumericsCases


class TestNumerics(NumericsCases):
    pass
