from tests.cases.decomposed import DecomposedCases


class TestDecomposed(DecomposedCases):
    pass
