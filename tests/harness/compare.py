"""Comparisons that say where: rank, row, column and chunk of the first element that differs."""

import torch


def first_difference(got, want, *, rank, rows_per_chunk=None):
    """None if the tensors are equal bit for bit (NaN equals NaN), else a sentence about the first difference."""
    if got.shape != want.shape:
        return f"rank {rank}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"rank {rank}: dtype {got.dtype}, expected {want.dtype}"
    if torch.equal(got, want):
        return None
    differs = (got != want) & ~(got.isnan() & want.isnan())
    if not differs.any():
        return None
    flat = differs.reshape(-1, differs.shape[-1])
    row, col = flat.nonzero()[0].tolist()
    got, want = got.reshape(flat.shape), want.reshape(flat.shape)
    bad_rows = flat.any(1).nonzero().flatten()
    bad_cols = flat.any(0).nonzero().flatten()
    where = f"row {row}, column {col}"
    if rows_per_chunk:
        chunks = sorted({r // rows_per_chunk for r in bad_rows.tolist()})
        where += f" (chunk {row // rows_per_chunk}, its row {row % rows_per_chunk}; chunks that differ: {chunks})"
    return (
        f"rank {rank}: {int(flat.sum())} of {flat.numel()} elements differ, first at {where}: "
        f"got {got[row, col].item()}, expected {want[row, col].item()}; rows {bad_rows[0]}..{bad_rows[-1]} "
        f"({len(bad_rows)} of {flat.shape[0]}), columns {bad_cols[0]}..{bad_cols[-1]} "
        f"({len(bad_cols)} of {flat.shape[1]})"
    )


def assert_same(got, want, *, rank, what="result", rows_per_chunk=None):
    difference = first_difference(got, want, rank=rank, rows_per_chunk=rows_per_chunk)
    assert difference is None, f"{what}: {difference}"


class Findings:
    """Collects what went wrong over many cells of a grid and raises once, so that one run shows the pattern."""

    def __init__(self, limit=12):
        self.limit, self.cells, self.bad = limit, 0, []

    def add(self, what, problem):
        self.cells += 1
        if problem is not None:
            self.bad.append(f"{what}: {problem}")

    def finish(self):
        """The number of cells; AssertionError with the first few problems if there were any."""
        shown = "\n".join(self.bad[: self.limit])
        assert not self.bad, f"{len(self.bad)} of {self.cells} cells are wrong\n{shown}"
        return self.cells
