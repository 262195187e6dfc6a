"""When examples/train_tp.py says that two losses stay together."""

import pytest

from examples.train_tp import MODELS, STYLES, largest_so_far, means, stay_together


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
        ([1e-4, 1e-2, 1e-2], [1e-4, 1e-3, 2e-2], False),  # early, where the noise is still small
    ),
)
def test_stay_together(apart, noise, together):
    assert stay_together(apart, noise, tolerance=2e-2) == together
