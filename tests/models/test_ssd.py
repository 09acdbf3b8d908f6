import pytest
import torch

from models.ssd import ssd_recurrence, ssd_scan
from tests.models.builders import relative_error


def inputs(length, *, heads=4, groups=2, dt_max=0.1, dtype=torch.float64, batch=2, head_dim=5, state=3):
    generator = torch.Generator().manual_seed(length + 10 * groups)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    dt = torch.rand(batch, length, heads, generator=generator, dtype=dtype) * dt_max + 1e-3
    a = -(torch.rand(heads, generator=generator, dtype=dtype) * 15 + 1)
    tensors = [
        draw(batch, length, heads, head_dim),
        dt,
        a,
        draw(batch, length, groups, state),
        draw(batch, length, groups, state),
    ]
    return [t.requires_grad_() for t in tensors]


def value_and_gradients(function, tensors):
    y = function(*tensors)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    return y, *torch.autograd.grad((y * weights).sum(), tensors)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 45])
def test_equals_the_recurrence(length, groups):
    tensors = inputs(length, groups=groups)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, 8), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk_size", [1, 4, 16, 1000])
def test_chunk_size_does_not_matter(chunk_size):
    tensors = inputs(33)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, chunk_size), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


# At dt 0.01 states live for many chunks; at 1.0 the decay within one chunk passes e^-1000. The gradient of `a` is a sum
# of terms that cancel the more the faster states decay; FP32 autograd of the unrolled formula loses the same digits.
@pytest.mark.parametrize(
    ("dt_max", "tolerance", "a_tolerance"), [(0.01, 2e-6, 5e-6), (0.1, 5e-6, 5e-5), (1.0, 3e-5, 5e-4)]
)
def test_fp32_is_close_to_the_fp64_recurrence(dt_max, tolerance, a_tolerance):
    tensors = inputs(300, dt_max=dt_max, batch=1)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, 128), [t.detach().float().requires_grad_() for t in tensors])
    for name, a, e in zip(("y", "x", "dt", "a", "b", "c"), actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert relative_error(a, e) < (a_tolerance if name == "a" else tolerance), name


def test_extreme_decay_gives_no_infinities():
    x, _, a, b, c = (t.detach().float().requires_grad_() for t in inputs(64))
    dt = torch.full((2, 64, 4), 1e4, requires_grad=True)
    results = value_and_gradients(lambda *t: ssd_scan(*t, 16), [x, dt, a, b, c])
    assert all(result.isfinite().all() for result in results)
    # Nothing survives a step: each output is that of its own token.
    own = (b * c).sum(-1).repeat_interleave(2, 2)[..., None] * x * dt[..., None]
    torch.testing.assert_close(results[0], own, rtol=1e-4, atol=1e-2)


def test_gradcheck():
    tensors = inputs(6, heads=2, groups=1, batch=1, head_dim=2, state=2)
    assert torch.autograd.gradcheck(lambda *t: ssd_scan(*t, 4), tensors)


def test_takes_strided_inputs():
    x, dt, a, b, c = inputs(12)
    packed = torch.cat([x.flatten(2), b.flatten(2), c.flatten(2)], -1).detach()
    x_view, b_view, c_view = packed.split([20, 6, 6], -1)
    actual = ssd_scan(x_view.unflatten(2, (4, 5)), dt, a, b_view.unflatten(2, (2, 3)), c_view.unflatten(2, (2, 3)), 8)
    torch.testing.assert_close(actual, ssd_scan(x, dt, a, b, c, 8))
