from tests.cases.allreduce import AllReduceCases


class TestGpuAllReduce(AllReduceCases):
    timeout_s = 4  # the first call loads kernels
    endurance_calls = 100_000
