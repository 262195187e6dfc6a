from tests.cases.reuse import ReuseCases, short_k


class TestGpuReuse(ReuseCases):
    rounds = 1000
    chain = 500
    slow_s = 0.008


def test_kernels_with_short_k(ranks, record_property):
    record_property("cells", ranks.run(short_k, 8)[0])
