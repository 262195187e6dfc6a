"""Measures one layer after another: each candidate checked against the plain sequence, then timed, interleaved."""

import dataclasses

import torch
import torch.distributed as dist

import flux_ops
from flux_ops import launch
from flux_ops.bench import candidates, report
from flux_ops.bench.candidates import AUTO, FUSED
from flux_ops.tuner import timing
from flux_ops.tuner.measure import GEMM, SEQUENTIAL, Operands, as_graph, attempt, comparable, why_wrong

STEP_LIMIT_S = 75  # for one shape and op: beyond it, a rank hangs


class Contest:
    """What is measured on one product. The benchmark and the studies differ in this alone."""

    def columns(self, op, product):
        """Columns of the study's table, by title: the candidates of which the fastest is shown. Empty: no study."""
        return {}

    def names(self, op, product):
        """The candidates, for a product of (M, N, K)."""
        found = [name for column in self.columns(op, product).values() for name in column]
        return list(dict.fromkeys([GEMM, SEQUENTIAL, *found]))

    def make(self, name, op, operands, group=None):
        return candidates.make(name, op, operands, group)

    def expected(self, name, op, operands, want, mode):
        """What the candidate has to give where the sequence gives `want`; None: nothing to compare with."""
        return want if comparable(name, op) else None


class Run:
    """One shape and op after another; every decision is taken by all ranks alike."""

    def __init__(self, place, args, contest):
        self.place, self.args, self.contest = place, args, contest
        self.dtype = getattr(torch, args.dtype)
        self.clock = timing.Clock(place)
        self.graph_group = dist.new_group() if "graph" in args.modes else None

    def prepare(self, shapes_and_ops):
        """Make the workspace as large as any shape needs, so that none grows it under a captured graph."""
        launch.watch(STEP_LIMIT_S)
        products = {}
        for _, shape, ops in shapes_and_ops:
            for op in ops:
                products.setdefault(op, []).append(shape.product(op, self.place.world))
        for op, sizes in products.items():
            largest = dict(zip(("max_m", "n", "k"), map(max, zip(*sizes, strict=True)), strict=True))
            for group in [None, self.graph_group] if self.graph_group else [None]:
                flux_ops.prepare(op=op, **largest, dtype=self.dtype, group=group, device=self.place.device)

    def measure(self, list_name, shape, op):
        """A row for each mode."""
        launch.watch(STEP_LIMIT_S)
        product = shape.product(op, self.place.world)
        operands = Operands(self.place, op, *product, self.dtype)
        calls, notes, ran, want = self._checked(op, product, operands)
        counts = {name: timing.calls_per_sample(self.place, self.clock, call) for name, call in calls.items()}
        for mode in self.args.modes.split(","):
            mode_notes = dict(notes)
            works, keep = self._works(mode, op, operands, calls, counts, mode_notes, want)
            timings = timing.interleave(self.place, self.clock, works, self.args.rounds)
            times = {name: {**dataclasses.asdict(t), "spread": t.spread} for name, t in timings.items()}
            row = {"list": list_name, "name": shape.name, "op": op, "mode": mode}
            row |= {"M": shape.m, "H": shape.h, "I": shape.i, "times": times, "ran": ran, "notes": mode_notes}
            row["efficiency"] = {name: report.efficiency(times, name) for name in report.ours_of(times)}
            if columns := self.contest.columns(op, product):
                row |= {"columns": columns, "shard_bytes": operands.x[0].nbytes}
            self.place.say(_progress(row))
            yield row
            del works, keep

    def _checked(self, op, product, operands):
        """The candidates that run and agree with the sequence: name -> call; notes on the others; what ran."""
        place, calls, notes, ran = self.place, {}, {}, {}
        want, reason = attempt(place, lambda: candidates.make(SEQUENTIAL, op, operands)(0))
        if reason:
            raise RuntimeError(f"the sequential reference of {op} fails: {reason}")
        for name in self.contest.names(op, product):
            call, reason = attempt(place, lambda name=name: self.contest.make(name, op, operands))
            if reason is None:
                got, reason = attempt(place, lambda call=call: call(0))
            if reason is None and candidates.is_ours(name):
                dispatch = flux_ops.last_dispatch()
                ran[name] = f"{dispatch.strategy} {dispatch.config}".strip()
            expected = self.contest.expected(name, op, operands, want, "eager")
            if reason is None and expected is not None:
                reason = why_wrong(place, got, expected)
            if reason is None and name == AUTO and ran[AUTO] == ran.get(FUSED):
                reason = "auto ran the same as fused"
            if reason:
                notes[name] = reason
            else:
                calls[name] = call
        return calls, notes, ran, want

    def _works(self, mode, op, operands, calls, counts, notes, want):
        """What a sample of each candidate executes, in eager mode or as a graph."""
        works, keep = {}, []
        for name, call in calls.items():
            count = counts[name]
            if mode == "eager":
                works[name] = (timing.repeated(call, count), count)
                continue
            if name in candidates.EAGER_ONLY:
                notes[name] = candidates.EAGER_ONLY[name]
                continue
            call = self.contest.make(name, op, operands, self.graph_group)
            expected = self.contest.expected(name, op, operands, want, mode)
            made, reason = as_graph(self.place, call, count, expected)
            if reason:
                notes[name] = reason
            else:
                replay, graph = made
                keep.append(graph)
                works[name] = (replay, count)
        return works, keep


def _progress(row):
    times = ", ".join(f"{name} {t['median'] / 1e3:.3f}" for name, t in row["times"].items())
    return f"{row['op']} {row['name']} {row['mode']}: {times} ms"
