"""When examples/train_tp.py says that two trainings are the same."""

import pytest

from examples.train_tp import MODELS, STYLES, gradients_agree, largest_so_far, means, plot, stay_together


def test_largest_so_far():
    assert largest_so_far([1.0, 2.2, 4.0], [1.0, 2.0, 4.0]) == pytest.approx([0, 0.1, 0.1])


def test_every_model_has_a_style():
    assert set(STYLES) == set(MODELS)


def test_means():
    assert means([float(i // 3) for i in range(30)]) == list(range(10))
    assert means([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert len(means([1.0] * 25)) == 10


@pytest.mark.parametrize(
    "apart, noise, together",
    (
        ([0.0, 9e-5, 9e-5], [0.0, 0.0, 0.0], True),
        ([0.0, 2e-4, 2e-4], [0.0, 0.0, 0.0], False),
        ([1e-4, 1e-3, 2e-2], [1e-4, 1e-3, 1.5e-2], True),
        ([1e-4, 1e-3, 3e-2], [1e-4, 1e-3, 2e-2], False),  # beyond the tolerance, whatever the noise
        ([1e-4, 4.9e-3, 5e-3], [1e-4, 1e-3, 3e-3], True),
        ([1e-4, 5.1e-3, 5.1e-3], [1e-4, 1e-3, 3e-3], False),  # early, where the noise is still small
        ([1e-4, 1e-3, 5e-3], [1e-4, 1e-3, 2.4e-3], False),  # in all
    ),
)
def test_stay_together(apart, noise, together):
    assert stay_together(apart, noise, tolerance=2e-2) == together


@pytest.mark.parametrize(
    "flux, control, agree",
    (
        ([[0.0, 9e-5]], [[0.0, 0.0]], True),
        ([[0.0, 2e-4]], [[0.0, 0.0]], False),
        ([[1e-2], [2.9e-2]], [[1e-2], [1e-2]], True),
        ([[1e-2], [3.1e-2]], [[1e-2], [1e-2]], False),
        ([[1e-2, 3.9e-2]], [[1e-2, 1e-2]], True),  # of a parameter
        ([[1e-2, 4.1e-2]], [[1e-2, 1e-2]], False),
        ([[float("nan")]], [[1e-2]], False),
        ([[1e-2]], [[float("inf")]], False),
        ([[1e-2]], [[float("nan")]], False),
        ([[1e-2, 1e-2]], [[1e-2, float("inf")]], False),
        ([[6e-2]], [[6e-2]], False),  # what is compared is not the same
    ),
)
def test_gradients_agree(flux, control, agree):
    assert gradients_agree({"flux": flux, "control": control}, "cuda") == agree


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    document = {"losses": {name: [3.0, 2.0, 1.0] for name in MODELS}, "step_ms": dict.fromkeys(MODELS, 1.5)}
    plot(document, tmp_path / "loss.svg")
    picture = (tmp_path / "loss.svg").read_text()
    assert all(f"{name}: 1.5 ms a step" in picture for name in MODELS)
