from tests.cases.autocast import AutocastCases


class TestAutocast(AutocastCases):
    pass
