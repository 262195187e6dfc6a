from tests.cases.graphs import GraphCases


class TestGpuGraph(GraphCases):
    pass
