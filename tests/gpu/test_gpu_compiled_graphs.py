from tests.cases.compiled_graphs import CompiledGraphCases


class TestGpuCompiledGraphs(CompiledGraphCases):
    pass
