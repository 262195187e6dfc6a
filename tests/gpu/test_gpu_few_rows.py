import pytest

from tests.cases import few_rows
from tests.cases.faults import SLACK_S, dead, expect_timeouts, late
from tests.cases.tuner import prepared_for_more_rows


class TestGpuFewRows:
    timeout_s = 4  # the first call loads kernels

    @pytest.mark.parametrize("op", few_rows.FEW_ROWS_OPS)
    def test_every_row_count(self, ranks, op, record_property):
        record_property("cells", ranks.run(few_rows.every_row_count, op)[0])

    @pytest.mark.parametrize("op", ("gemm_rs", "gemm_ar"))
    def test_more_rows(self, ranks, op, record_property):
        record_property("cells", ranks.run(few_rows.more_rows, op)[0])

    def test_prepare_is_enough_for_more_rows(self, ranks):
        ranks.run(prepared_for_more_rows)

    def test_gathered_operand(self, ranks, record_property):
        record_property("cells", ranks.run(few_rows.gathered_operand)[0])

    def test_endurance(self, ranks, record_property):
        record_property("cells", ranks.run(few_rows.endurance, 20_000)[0])

    def test_replay(self, ranks, record_property):
        record_property("cells", ranks.run(few_rows.replayed, 60)[0])

    def test_weight_of_the_product_before(self, ranks, record_property):
        record_property("cells", ranks.run(few_rows.weight_of_the_product_before, 12)[0])

    @pytest.mark.parametrize("op", few_rows.FEW_ROWS_OPS)
    def test_a_peer_too_late_is_named(self, spawn, op):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(few_rows.faulty, op, late, self.timeout_s + 2.5, 1)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize("op", few_rows.FEW_ROWS_OPS)
    def test_a_dead_peer_is_named(self, spawn, op):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(few_rows.faulty, op, dead, 1, "killed in a call")
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)
