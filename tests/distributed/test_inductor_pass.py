from tests.cases.inductor_pass import InductorPassCases


class TestInductorPass(InductorPassCases):
    pass
