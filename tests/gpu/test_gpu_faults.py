from tests.cases.faults import FaultCases


class TestGpuFaults(FaultCases):
    fault_world = 2
    timeout_s = 4  # the first call loads kernels
