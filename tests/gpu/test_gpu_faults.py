from tests.cases.faults import FaultCases


class TestGpuFaults(FaultCases):
    fault_world = 2
