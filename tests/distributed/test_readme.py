"""The example of the README runs, with CPU processes in place of GPUs and a sixteenth of the sizes."""

import pathlib
import re

import torch

import flux_ops
from tests.harness.ranks import Ranks

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
IN_PLACE_OF = {
    'dist.init_process_group("nccl")': "",
    "torch.cuda.set_device(rank)": "",
    '"cuda"': '"cpu"',
    "8192": "512",
    "28672": "1792",
}


def run_example(ctx, code):
    try:
        names = {}
        exec(compile(code, str(README), "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)
    dispatch = flux_ops.last_dispatch()
    return tuple(names["h"].shape), tuple(names["y"].shape), dispatch.op, dispatch.strategy


def test_the_first_example_runs():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    for old, new in IN_PLACE_OF.items():
        assert old in code
        code = code.replace(old, new)
    with Ranks(2) as ranks:
        assert ranks.run(run_example, code) == [((512, 896), (256, 512), "gemm_rs", "fused")] * 2
