from tests.cases.shapes import ShapeCases


class TestShapes(ShapeCases):
    pass
