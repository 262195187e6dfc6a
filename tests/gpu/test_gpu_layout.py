from tests.cases.layout import LayoutCases


class TestGpuLayout(LayoutCases):
    pass
