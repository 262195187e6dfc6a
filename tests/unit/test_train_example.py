"""When examples/train_tp.py says that two trainings are the same."""

import pytest

from examples.train_tp import MODELS, STYLES, gradients_agree, largest_difference, means


def test_largest_difference():
    assert largest_difference([1.0, 2.2, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)
    assert largest_difference([1.0, 1.8, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)


def test_every_model_has_a_style():
    assert set(STYLES) == set(MODELS)


def test_means():
    assert means([float(i // 3) for i in range(30)]) == list(range(10))
    assert means([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert len(means([1.0] * 25)) == 10


@pytest.mark.parametrize(
    "flux, control, agree",
    (
        ([[0.0, 9e-5]], [[0.0, 0.0]], True),
        ([[0.0, 2e-4]], [[0.0, 0.0]], False),
        ([[1e-2], [1.9e-2]], [[1e-2], [1e-2]], True),
        ([[1e-2], [2.1e-2]], [[1e-2], [1e-2]], False),
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
