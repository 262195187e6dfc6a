from tests.cases.numerics import NumericsCases


class TestGpuNumerics(NumericsCases):
    pass
