import json
import subprocess
import sys

from examples.train_tp import TOLERANCE
from tests.cases.examples import ROOT, ExampleCases

WRONG = f"""
import sys
sys.path.insert(0, {ROOT!r})
import flux_ops
from examples import train_tp

right = flux_ops.nn.RowParallelLinear.forward

def wrong(self, x):
    x = x.view_as(x)
    x.register_hook(lambda grad: 1.001 * grad)
    return right(self, x)

flux_ops.nn.RowParallelLinear.forward = wrong
train_tp.main()
"""


class TestExamples(ExampleCases):
    device = "cpu"

    def test_training_notices_a_wrong_gradient(self, tmp_path):
        """One that is off by 0.1 % behind the row-parallel layers, which the losses of a few steps don't show."""
        script, out = tmp_path / "wrong.py", tmp_path / "train.json"
        script.write_text(WRONG)
        options = ["--device", "cpu", "--world", "2", "--steps", "6", "--length", "64", "--sequences", "2", "--out"]
        done = subprocess.run([sys.executable, script, *options, out], capture_output=True, text=True, timeout=110)
        document = json.loads(out.read_text())
        assert done.returncode != 0, done.stdout
        assert "gradients are apart" in done.stderr, done.stderr
        assert document["largest_difference"]["flux"] < TOLERANCE["cpu"], document["largest_difference"]
        assert document["last_loss"] < document["first_loss"]
