"""A green context has a part of the GPU's SMs. Thread blocks that wait for each other must all be among those."""

import pytest
from torch.cuda.green_contexts import SUPPORTED, GreenContext

from tests.cases.base import OPS, Case, call, make
from tests.harness.compare import Findings, first_difference

SIZES = ((8, 8192, 1024), (64, 8192, 1024), (128, 8192, 264), (1024, 4096, 520))


def in_green_contexts(ctx, op, sizes):
    """The same calls in the whole GPU, in parts of it, which come and go, and in all of it again.

    The references are computed outside: cuBLAS's handle of a thread belongs to the context that came first.
    """
    findings = Findings()
    cases = [Case(op, rows, n, k, seed=seed, bias=True) for seed, (rows, n, k) in enumerate(SIZES)]
    operands = [make(ctx, case) for case in cases]
    wanted = [one.expected().to(one.case.dtype) for one in operands]

    def compare(where):
        results = [call(one) for one in operands]
        ctx.sync()
        return [(where, *found) for found in zip(cases, results, wanted, strict=True)]

    found = compare("before")
    for num_sms in sizes:
        green = GreenContext.create(num_sms=num_sms, device_id=ctx.device.index)
        green.set_context()
        try:
            found += compare(f"with {num_sms} SMs")
        finally:
            green.pop_context()
        del green
    found += compare("after")
    for where, case, y, want in found:
        findings.add(f"{where}: {case}", first_difference(y, want, rank=ctx.rank, rows_per_chunk=case.rows))
    return findings.finish()


class TestGpuGreenContexts:
    @pytest.mark.skipif(not SUPPORTED, reason="this torch has no green contexts")
    @pytest.mark.parametrize("op", OPS)
    def test_part_of_the_gpu(self, ranks, record_property, op):
        record_property("cells", ranks.run(in_green_contexts, op, (104, 48, 24))[0])
