from tests.cases.autocast import AutocastCases


class TestGpuAutocast(AutocastCases):
    pass
