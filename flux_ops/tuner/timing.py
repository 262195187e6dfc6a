"""Interleaved timing: A B C, A B C, ... so that a card that heats up slows all candidates alike.

A sample is a few back-to-back calls of one candidate between two events, and begins with a barrier on the stream, so
the ranks start within microseconds of each other. The time of a sample is the largest over the ranks; a candidate's
time is the median of its samples.
"""

import dataclasses
import statistics
import time

import torch
import torch.distributed as dist

SAMPLE_MS = 6.0
MIN_CALLS, MAX_CALLS = 2, 32


@dataclasses.dataclass
class Timing:
    """Microseconds of one call."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    samples: int
    calls: int  # per sample

    @classmethod
    def of(cls, samples, calls):
        ordered = sorted(samples)
        quarters = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
        return cls(statistics.median(ordered), quarters[0], quarters[2], ordered[0], ordered[-1], len(ordered), calls)

    @property
    def spread(self):
        """Half of the interquartile range, relative to the median."""
        return (self.q3 - self.q1) / 2 / self.median


class Clock:
    """Times batches of work on this rank's stream (or on its CPU)."""

    def __init__(self, place):
        self.place = place
        self._token = torch.zeros(1, device=place.device)
        if place.is_cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self, work):
        """Microseconds that work() takes on this rank, begun together with the others."""
        if not self.place.is_cuda:
            dist.barrier(group=self.place.group)
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e6
        torch.cuda.synchronize()
        dist.all_reduce(self._token, group=self.place.group)
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3


def calls_per_sample(place, clock, call):
    """How many calls make a sample of about SAMPLE_MS; the ranks agree on it."""
    call(0)
    place.sync()
    estimate = clock.sample(lambda: [call(i) for i in range(2)]) / 2
    slowest = max(place.everyone(estimate))
    return int(min(max(SAMPLE_MS * 1e3 / slowest, MIN_CALLS), MAX_CALLS))


def repeated(call, count):
    def work():
        for i in range(count):
            call(i)

    return work


def captured(call, count):
    """A CUDA graph of `count` calls: (replay, the result of the last call, which is call(0), the graph)."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    result = None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in reversed(range(count)):
            result = call(i)
    return graph.replay, result, graph


def interleave(place, clock, works, rounds, warmup=2):
    """works: name -> (work, calls). Returns name -> Timing, the same on each rank."""
    names = list(works)
    samples = {name: [] for name in names}
    for turn in range(warmup + rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            work, _ = works[name]
            elapsed = clock.sample(work)
            if turn >= warmup:
                samples[name].append(elapsed)
    everyone = place.everyone(samples)
    timings = {}
    for name in names:
        calls = works[name][1]
        slowest = [max(one) / calls for one in zip(*(s[name] for s in everyone), strict=True)]
        timings[name] = Timing.of(slowest, calls)
    return timings
