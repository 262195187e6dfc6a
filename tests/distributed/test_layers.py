from tests.cases.blocks import BlockCases
from tests.cases.layers import LayerCases


class TestLayers(LayerCases):
    pass


class TestBlocks(BlockCases):
    pass
