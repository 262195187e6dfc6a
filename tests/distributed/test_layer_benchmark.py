"""benchmarks/layer.py on CPU processes."""

import json

from benchmarks.layer import CANDIDATES, MODES
from tests.cases.examples import run_script


def test_every_candidate_that_can_run_is_right_and_timed(tmp_path):
    options = ["--world", "2", "--layers", "llama3.1-8b", "--rounds", "2", "--budget", "600"]
    lines = run_script("benchmarks/layer.py", tmp_path, "cpu", *options)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert [row["mode"] for row in document["rows"]] == list(MODES)
    for row in document["rows"]:
        assert row["times"].keys() == set(CANDIDATES) - {"async-tp"}, row["notes"]
        assert "GPUs" in row["notes"]["async-tp"]
        assert all(0 < t["min"] <= t["median"] <= t["max"] for t in row["times"].values())
        assert all(error <= 3e-5 for error in row["errors"].values())
    assert lines[-1].startswith("  [1] ")
