from tests.cases.parallel_styles import ParallelStyleCases


class TestGpuParallelStyles(ParallelStyleCases):
    pass
