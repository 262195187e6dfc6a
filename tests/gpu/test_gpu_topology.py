"""How the ranks were launched decides what they see of each other's GPUs."""

import os
import re
import subprocess

import pytest

from tests.cases.base import OPS
from tests.cases.topology import TopologyCases, masked, one_gpu_for_all


def visible_gpus():
    """What CUDA_VISIBLE_DEVICES may name, one entry per GPU that this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(i) for i in range(16)]


def uuids():
    try:
        text = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", text)


class TestGpuTopology(TopologyCases):
    def test_each_rank_sees_one_gpu(self, spawn):
        ranks = spawn(2, [{"CUDA_VISIBLE_DEVICES": one} for one in visible_gpus()[:2]])
        for op in OPS:
            ranks.run(masked, op)

    @pytest.mark.cpu_is_enough
    def test_each_rank_sees_one_gpu_by_uuid(self, spawn):
        if "CUDA_VISIBLE_DEVICES" in os.environ or len(uuids()) < 2:
            pytest.skip("no list of the UUIDs of the visible GPUs")
        ranks = spawn(2, [{"CUDA_VISIBLE_DEVICES": one} for one in uuids()[:2]])
        for op in OPS:
            ranks.run(masked, op)

    def test_nobody_called_set_device(self, spawn):
        for message in spawn(2, set_device=False).run(one_gpu_for_all):
            assert "ranks 0 and 1" in message
            assert "GPU 0" in message
