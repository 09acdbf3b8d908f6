import pytest
import torch

from models.ssd import ssd_scan
from tests.models.builders import relative_error
from tests.models.recurrence import ssd_recurrence


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
@pytest.mark.parametrize("dt_max", [0.1, 5.0])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 45])
def test_equals_the_recurrence(length, dt_max, groups):
    tensors = inputs(length, groups=groups, dt_max=dt_max)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, 8), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("length", [5, 20])
def test_steps_of_size_zero_pass_the_state_on(length):
    x, dt, *others = inputs(length)
    skipped = torch.arange(length) % 3 == 1
    tensors = [x, dt.detach().masked_fill(skipped[:, None], 0).requires_grad_(), *others]
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, 8), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)
    assert (actual[2][:, skipped] != 0).all()


@pytest.mark.parametrize("chunk_size", [1, 4, 16, 1000])
def test_chunk_size_does_not_matter(chunk_size):
    tensors = inputs(33)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, chunk_size), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


def fp32_errors(tensors, chunk_size):
    """Relative errors of the FP32 scan and its gradients against the FP64 recurrence."""
    tensors = [t.detach().float().double().requires_grad_() for t in tensors]
    expected = value_and_gradients(ssd_recurrence, tensors)
    singles = [t.detach().float().requires_grad_() for t in tensors]
    actual = value_and_gradients(lambda *t: ssd_scan(*t, chunk_size), singles)
    assert all(a.dtype == torch.float32 for a in actual)
    names = ("y", "x", "dt", "a", "b", "c")
    return {name: relative_error(a, e) for name, a, e in zip(names, actual, expected, strict=True)}


# At dt 0.01 states live for many chunks; at 1.0 the decay within one chunk passes e^-1000.
@pytest.mark.parametrize(("dt_max", "tolerance"), [(0.01, 1e-6), (0.1, 4e-6), (1.0, 6e-5)])
def test_fp32_is_close_to_the_fp64_recurrence(dt_max, tolerance):
    for name, error in fp32_errors(inputs(300, dt_max=dt_max, batch=1), 128).items():
        assert error < tolerance, name


# Where dt |a| is large, what one token passes to the next is e^(dt a) of what it gives its own output: gradients of
# decays are exact only if that own part takes no part in them. What is left is the rounding of the running sum of dt a.
@pytest.mark.parametrize(
    ("lowest", "highest", "chunk_size", "tolerance"),
    [(0.5, 1, 64, 7e-6), (1, 5, 16, 5e-6), (1, 5, 64, 2e-5), (5, 10, 64, 5e-5), (10, 12, 16, 3e-6), (10, 12, 64, 3e-5)],
)
def test_gradients_of_fast_decays_keep_their_digits(lowest, highest, chunk_size, tolerance):
    x, dt, _, b, c = inputs(200, batch=1, head_dim=16, state=16)
    dt = lowest + (highest - lowest) * torch.rand(dt.shape, generator=torch.Generator().manual_seed(1))
    errors = fp32_errors([x, dt, torch.tensor([-1.0, -1.1, -1.3, -1.5]), b, c], chunk_size)
    assert errors["a"] < tolerance
    assert errors["dt"] < 2e-6
    assert max(errors[name] for name in "yxbc") < 1e-6


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
