from tests.cases.megatron import MegatronCases
from tests.cases.megatron_models import MegatronModelCases


class TestGpuMegatron(MegatronCases):
    pass


class TestGpuMegatronModels(MegatronModelCases):
    pass
