from tests.cases.allreduce import AllReduceCases


class TestAllReduce(AllReduceCases):
    pass
