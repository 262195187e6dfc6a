from tests.cases.topology import TopologyCases


class TestTopology(TopologyCases):
    pass
