"""Measures which strategy and configuration run a product fastest, and keeps what was found for `auto` to use."""

from flux_ops.tuner.cache import CacheError
from flux_ops.tuner.search import TunerStopped, tune

__all__ = ["CacheError", "TunerStopped", "tune"]
