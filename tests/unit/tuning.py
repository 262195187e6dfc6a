"""Entries and files for the tests of the tuner's cache."""

import dataclasses
import json

from flux_ops.tuner.cache import Build, Entry, Product

BUILD = Build("1.0", {"cpu": "t64 t128", "cuda": "c128 p64"})
PRODUCT = Product("ag_gemm", 8192, 4096, 1024, "bfloat16", "nk", 2, "GPU, 132 SMs")


def entry(choice="fused:c128/m1/p1", us=100.0, **changes):
    product = dataclasses.replace(PRODUCT, **changes)
    return Entry(product, choice, us, 150.0, 90.0, "fused:p64/m1/p1", 110.0, 15, "2026-01-01T00:00:00+00:00")


def content(*entries, build=BUILD, **changes):
    """A file's text; `changes` replace fields of its header."""
    return json.dumps({**build.header(), "entries": [e.to_json() for e in entries], **changes})
