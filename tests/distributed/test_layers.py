from tests.cases.layers import LayerCases


class TestLayers(LayerCases):
    pass
