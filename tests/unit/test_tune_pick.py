"""Which of the measured candidates the tuner takes."""

import pytest

from flux_ops.tuner.search import pick


@pytest.mark.parametrize(
    "times,picked",
    (
        ({"gemm": 1.0, "sequential": 2.0, "fused:model": 1.435, "fused:a": 1.4}, "fused:a"),
        ({"gemm": 1.0, "sequential": 2.0, "fused:model": 1.425, "fused:a": 1.4}, "fused:model"),
        ({"gemm": 1.0, "sequential": 2.0, "fused:a": 1.4}, "fused:a"),  # the model's choice can't run
        ({"gemm": 1.0, "sequential": 1.4, "fused:model": 1.405}, "sequential"),
        ({"gemm": 1.0, "sequential": 1.4, "fused:model": 1.4}, "sequential"),
    ),
)
def test_a_choice_has_to_beat_the_models_by_more_than_noise(times, picked):
    assert pick(times, "fused:model") == picked


def test_the_model_may_pick_the_sequence():
    assert pick({"gemm": 1.0, "sequential": 1.005, "fused:a": 1.0}, "sequential") == "sequential"
