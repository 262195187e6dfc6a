import torch

from examples.model import TINY, rotate, rotation


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    x, y = torch.randn(2, 1, 1, 1, TINY.head_dim, dtype=torch.float64).expand(2, 1, 1, 9, TINY.head_dim)
    cos, sin = rotation(TINY, torch.arange(9))
    products = rotate(x, cos, sin)[0, 0] @ rotate(y, cos, sin)[0, 0].T
    for distance in range(-8, 9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert products[0].std() > 1e-2
