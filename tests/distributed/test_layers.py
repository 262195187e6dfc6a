from tests.cases.blocks import BlockCases
from tests.cases.layer_checkpoints import LayerCheckpointCases
from tests.cases.layer_limits import LayerLimitCases
from tests.cases.layer_memory import LayerMemoryCases
from tests.cases.layer_state import LayerStateCases
from tests.cases.layers import LayerCases


class TestLayers(LayerCases):
    pass


class TestBlocks(BlockCases):
    pass


class TestLayerState(LayerStateCases):
    pass


class TestLayerLimits(LayerLimitCases):
    pass


class TestLayerMemory(LayerMemoryCases):
    pass


class TestLayerCheckpoints(LayerCheckpointCases):
    pass
