from tests.cases.overlapped_training import OverlappedTrainingCases


class TestOverlappedTraining(OverlappedTrainingCases):
    pass
