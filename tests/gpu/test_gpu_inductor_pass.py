from tests.cases.inductor_pass import InductorPassCases


class TestGpuInductorPass(InductorPassCases):
    pass
