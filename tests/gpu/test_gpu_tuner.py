from tests.cases.tuner import TunerCases


class TestGpuTuner(TunerCases):
    pass
