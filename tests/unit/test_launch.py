"""The launcher of the examples: what it says of ranks that don't end."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = """
import sys, time
from flux_ops import launch

def waits_for_a_peer():
    time.sleep(60)

if not launch.under_launcher():
    sys.exit(launch.run_ranks(2, 60))
with launch.joined("cpu") as place:
    if place.rank == 1:
        sys.exit("rank 1 gives up")
    waits_for_a_peer()
"""


def test_a_silent_rank_shows_its_stacks_when_a_peer_has_failed(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, env=env)
    assert done.returncode == 1
    assert "rank 1 gives up" in done.stderr
    assert "waits_for_a_peer" in done.stderr.partition("rank 1 gives up")[2]


@pytest.mark.parametrize("command", ("bench", "tune"))
def test_a_number_of_ranks_that_can_not_be(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flux_ops", command, "--device", "cpu", "--world", "-1"],
        cwd=ROOT,
        env={**os.environ, "FLUX_TUNE_CACHE": str(tmp_path / "choices.json")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"flux_ops {command}: error: -1 ranks on cpu" in done.stderr
