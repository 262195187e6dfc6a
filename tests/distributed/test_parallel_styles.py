from tests.cases.parallel_styles import ParallelStyleCases


class TestParallelStyles(ParallelStyleCases):
    pass
