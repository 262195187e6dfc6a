from tests.cases.megatron import MegatronCases
from tests.cases.megatron_models import MegatronModelCases


class TestMegatron(MegatronCases):
    pass


class TestMegatronModels(MegatronModelCases):
    pass
