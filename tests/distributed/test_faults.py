from tests.cases.faults import FaultCases


class TestFaults(FaultCases):
    fault_world = 4
