from tests.cases.blocks import BlockCases
from tests.cases.layer_checkpoints import LayerCheckpointCases
from tests.cases.layer_graphs import LayerGraphCases
from tests.cases.layer_limits import LayerLimitCases
from tests.cases.layer_memory import LayerMemoryCases
from tests.cases.layer_state import LayerStateCases
from tests.cases.layers import LayerCases


class TestGpuLayers(LayerCases):
    pass


class TestGpuBlocks(BlockCases):
    pass


class TestGpuLayerState(LayerStateCases):
    pass


class TestGpuLayerLimits(LayerLimitCases):
    pass


class TestGpuLayerGraphs(LayerGraphCases):
    pass


class TestGpuLayerMemory(LayerMemoryCases):
    pass


class TestGpuLayerCheckpoints(LayerCheckpointCases):
    pass
