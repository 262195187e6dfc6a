from tests.cases.megatron import MegatronCases
from tests.cases.megatron_models import MegatronModelCases
from tests.cases.megatron_training import MegatronTrainingCases


class TestGpuMegatron(MegatronCases):
    pass


class TestGpuMegatronModels(MegatronModelCases):
    pass


class TestGpuMegatronTraining(MegatronTrainingCases):
    pass
