from tests.cases.overlapped_training import OverlappedTrainingCases


class TestGpuOverlappedTraining(OverlappedTrainingCases):
    pass
