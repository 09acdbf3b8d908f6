import torch

from models.positions import apply_rope, rope_tables


def rotate(x, position, base=10000.0):
    cos, sin = rope_tables(64, x.shape[-1], base, "cpu")
    return apply_rope(x[None, None, None], cos[position : position + 1], sin[position : position + 1])[0, 0, 0]


def test_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    near = rotate(q, 7) @ rotate(k, 3)
    far = rotate(q, 57) @ rotate(k, 53)
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
    assert (near - rotate(q, 7) @ rotate(k, 5)).abs() > 0.1


def test_pairs_are_halves_and_turn_by_their_angle():
    x = torch.zeros(8)
    x[1] = 1.0
    angle = torch.tensor(5 * 100.0 ** (-2 / 8))
    expected = torch.zeros(8)
    expected[1], expected[5] = angle.cos(), angle.sin()
    torch.testing.assert_close(rotate(x, 5, base=100.0), expected)


def test_position_zero_is_the_identity_and_lengths_are_kept():
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate(x, 0), x)
    torch.testing.assert_close(rotate(x, 40).norm(), x.norm())


def test_keeps_the_dtype_and_has_a_gradient():
    cos, sin = rope_tables(3, 8, 10000.0, "cpu")
    assert apply_rope(torch.ones(1, 3, 2, 8, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cos.double(), sin.double()), [x])
