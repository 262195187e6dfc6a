from tests.cases.examples import ExampleCases


class TestGpuExamples(ExampleCases):
    device = "cuda"
