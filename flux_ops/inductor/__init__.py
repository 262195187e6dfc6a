"""Overlap in models compiled by torch.compile: a pass of Inductor that replaces a collective next to a product."""

from flux_ops.inductor.overlap import OverlapPass
from flux_ops.inductor.report import Left, Replaced, Report, last_report

__all__ = ["Left", "OverlapPass", "Replaced", "Report", "last_report"]
