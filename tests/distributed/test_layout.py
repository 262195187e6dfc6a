from tests.cases.layout import LayoutCases


class TestLayout(LayoutCases):
    pass
