"""The harness itself: a hang is cut short and explained, a death is noticed, nothing stays behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.compare import first_difference
from tests.harness.data import MAX_NONZEROS, Case, Operands
from tests.harness.ranks import Ranks, RanksFailed


def hang_in_python(ctx):
    while ctx.rank == 1:
        time.sleep(0.05)
    return ctx.rank


def exit_at_once(ctx):
    if ctx.rank == 1:
        os._exit(7)
    dist.barrier()


def fail_in_words(ctx):
    assert ctx.rank != 1, "planted failure"
    return ctx.rank


def rank_of(ctx):
    return ctx.rank


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestRanks:
    def test_a_hang_is_cut_short_and_shows_where(self):
        with Ranks(2) as ranks:
            pids = ranks.pids()
            with pytest.raises(RanksFailed, match=r"(?s)rank 1: hung.*hang_in_python"):
                ranks.run(hang_in_python, timeout=2)
            assert not any(is_running(pid) for pid in pids), "a rank outlived the watchdog"
            assert ranks.run(rank_of) == [0, 1], "the next call gets fresh ranks"
        assert not any(is_running(pid) for pid in ranks.pids())

    def test_a_death_is_noticed(self):
        with Ranks(2) as ranks, pytest.raises(RanksFailed, match=r"rank 1: died.*\nexit code 7"):
            ranks.run(exit_at_once, grace=5)

    def test_an_error_has_its_traceback_and_keeps_the_ranks(self):
        with Ranks(2) as ranks:
            with pytest.raises(RanksFailed, match=r"(?s)fail_in_words.*planted failure.*fine: rank 0"):
                ranks.run(fail_in_words)
            assert ranks.run(rank_of) == [0, 1]
            assert ranks.starts == 1


class TestData:
    @pytest.mark.parametrize("op", ("ag_gemm", "gemm_rs", "gemm_ar"))
    @pytest.mark.parametrize("k", (7, 64, 300, 1000))
    def test_exact_data_is_exact(self, op, k):
        case = Case(op, 24, 40, k, seed=k, bias=True)
        per_rank = [Operands(case, rank, 3, "cpu") for rank in range(3)]
        for one in per_rank:
            wide = one.expected(torch.float64)
            assert wide.abs().max() <= 256
            assert torch.equal(wide.to(case.dtype).double(), wide)
            assert torch.equal(one.expected(torch.float32).double(), wide)
        whole = per_rank[0].weight if op == "ag_gemm" else torch.cat([one.weight for one in per_rank], dim=1)
        assert (whole != 0).sum(1).max() <= MAX_NONZEROS
        assert set(per_rank[0].x.unique().tolist()) == {-1, 0, 1}
        assert not torch.equal(per_rank[0].x, per_rank[1].x)

    def test_the_last_column_is_used(self):
        weight = Operands(Case("ag_gemm", 8, 512, 1000), 0, 2, "cpu").weight
        assert (weight != 0).any(0).all()

    def test_a_difference_names_row_column_and_chunk(self):
        want = torch.zeros(12, 5)
        got = want.clone()
        got[7, 3] = 2
        text = first_difference(got, want, rank=1, rows_per_chunk=4)
        for part in ("rank 1", "1 of 60", "row 7, column 3", "chunk 1, its row 3", "got 2.0, expected 0.0"):
            assert part in text
        nan = torch.full((2, 2), float("nan"))
        assert first_difference(nan, nan.clone(), rank=0) is None
