from tests.cases.shapes import ShapeCases


class TestGpuShape(ShapeCases):
    pass
