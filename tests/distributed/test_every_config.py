"""Every configuration that the tuner may choose on the CPU keeps the rules, not only the default one.

`pytest --force-config ...` runs the whole of the marked tests so; this is a choice of them, small.
"""

import pytest

from flux_ops import extension
from tests.cases import base, numerics, reuse, shapes

pytestmark = pytest.mark.skipif(extension.module is None, reason=f"no compiled part: {extension.why_not_loaded}")
CONFIGS = [*base.every_config("cpu"), "fused:t64x64/p8/same-order"] if extension.module else []


def keeps_the_rules(ctx, config):
    ops = base.force(ctx, config)
    cells = 0
    try:
        if "gemm_rs" in ops:
            cells += numerics.reduces_in_fp32(ctx) + numerics.adds_in_rank_order(ctx)
        if "ag_gemm" in ops:
            cells += shapes.gathered(ctx)
        for op in ops:
            numerics.repeats_bitwise(ctx, op)
            numerics.specials(ctx, op, 130)
            cells += shapes.rank_codes(ctx, op) + shapes.large_residues(ctx, op)
            cells += reuse.constant_lag(ctx, op, ctx.world - 1, 6, 0.002)
        return ops, cells
    finally:
        base.force(ctx, "")


@pytest.mark.worlds(2, 3)
class TestEveryConfig:
    @pytest.mark.parametrize("config", CONFIGS)
    def test_keeps_the_rules(self, ranks, config, record_property):
        ops, cells = ranks.run(keeps_the_rules, config)[0]
        assert {"ag_gemm", "gemm_rs"} <= set(ops) or ops == ["gemm_ar"] or config.startswith("decomposed")
        record_property("cells", cells)

    def test_there_are_several(self):
        for strategy, at_least in (("fused", 4), ("decomposed", 13)):
            assert sum(name.startswith(strategy) for name in CONFIGS) >= at_least, CONFIGS

    def test_what_is_forced_has_to_run(self, ranks):
        """A name that no op has is an error, and cases see it if the ops run something else."""
        with pytest.raises(AssertionError, match="no op has the configuration 'fused:none/p1'"):
            ranks.run(base.force, "fused:none/p1")
        problems = ranks.run(ignored_force, "fused:t64x64/p8")
        assert all("asked for fused t64x64/p8" in problem for problem in problems), problems


def ignored_force(ctx, config):
    """What check() says where run() forgets the configuration that is forced."""
    base.force(ctx, config)
    honest, base.run = (
        base.run,
        lambda op, *tensors, strategy="fused", **options: honest(op, *tensors, strategy="sequential", **options),
    )
    try:
        return base.check(ctx, base.Case("gemm_rs", 16, 64, 64))
    finally:
        base.run = honest
        base.force(ctx, "")
