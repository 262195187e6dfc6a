"""What a run of the pass has done to a graph, and what it has left, and why."""

import dataclasses
import logging

log = logging.getLogger("flux_ops.inductor")


@dataclasses.dataclass(frozen=True)
class Replaced:
    collective: str  # its node in the graph, as "all_gather_into_tensor_1"
    product: str  # the node of the matrix product, as "addmm_2"
    op: str  # "ag_gemm", "gemm_rs" or "gemm_ar"
    note: str = ""  # what else had to be done

    def __str__(self):
        return f"{self.collective} and {self.product} are now {self.op}" + (f"; {self.note}" if self.note else "")


@dataclasses.dataclass(frozen=True)
class Left:
    collective: str
    reason: str

    def __str__(self):
        return f"{self.collective} is left: {self.reason}"


@dataclasses.dataclass
class Report:
    """Of one graph: a training step has two, the forward's and the backward's."""

    replaced: list[Replaced] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)

    def __str__(self):
        lines = [f"{len(self.replaced)} collectives overlapped, {len(self.left)} left", *self.replaced, *self.left]
        return "\n  ".join(map(str, lines))

    def publish(self) -> None:
        global _last
        _last = self
        log.info("%s", self)


_last: Report | None = None


def last_report() -> Report | None:
    """The report of the graph that was compiled last in this process, or None.

    A graph that comes out of Inductor's cache was not compiled, so it has no report.
    """
    return _last
