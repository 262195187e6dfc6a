from tests.cases.reuse import ReuseCases


class TestReuse(ReuseCases):
    rounds = 200
    chain = 60
    slow_s = 0.004
