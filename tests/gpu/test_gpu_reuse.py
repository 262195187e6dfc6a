from tests.cases.reuse import ReuseCases


class TestGpuReuse(ReuseCases):
    rounds = 1000
    chain = 500
    slow_s = 0.008
