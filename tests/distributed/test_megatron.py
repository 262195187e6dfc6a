from tests.cases.megatron import MegatronCases
from tests.cases.megatron_models import MegatronModelCases
from tests.cases.megatron_training import MegatronTrainingCases


class TestMegatron(MegatronCases):
    pass


class TestMegatronModels(MegatronModelCases):
    pass


class TestMegatronTraining(MegatronTrainingCases):
    pass
