from tests.cases.decomposed import DecomposedCases
from tests.cases.graphs import DecomposedGraphCases


class TestGpuDecomposed(DecomposedCases):
    timeout_s = 4  # the first call loads kernels


class TestGpuDecomposedGraph(DecomposedGraphCases):
    pass
