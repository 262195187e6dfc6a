from tests.cases.tuner import TunerCases


class TestTuner(TunerCases):
    pass
