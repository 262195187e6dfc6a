from tests.cases.examples import ExampleCases


class TestExamples(ExampleCases):
    device = "cpu"
