"""The scan against its recurrence in FP64, and Triton's conditions for the tiles of attention."""

import pytest
import torch

from models.attention import TILES
from models.ssd import ssd_scan
from tests.models.builders import relative_error, ssd_recurrence


def inputs(length, *, heads=4, groups=2, dt_max=0.1, dtype=torch.float64, batch=2, head_dim=5, state=3):
    generator = torch.Generator().manual_seed(length + 10 * groups)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    dt = torch.rand(batch, length, heads, generator=generator, dtype=dtype) * dt_max + 1e-3
    a = -(torch.rand(heads, generator=generator, dtype=dtype) * 15 + 1)
    x, b, c = draw(batch, length, heads, head_dim), *(draw(batch, length, groups, state) for _ in "bc")
    return [t.requires_grad_() for t in (x, dt, a, b, c)]


def value_and_gradients(function, tensors):
    y = function(*tensors)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    return y, *torch.autograd.grad((y * weights).sum(), tensors)


@pytest.mark.parametrize(("length", "dt_max", "groups"), [(1, 0.1, 2), (7, 5.0, 1), (8, 0.1, 4), (45, 5.0, 2)])
def test_the_scan_equals_the_recurrence(length, dt_max, groups):
    tensors = inputs(length, groups=groups, dt_max=dt_max)
    expected = value_and_gradients(ssd_recurrence, tensors)
    actual = value_and_gradients(lambda *t: ssd_scan(*t, 8), tensors)
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


# With dt 0.01 states last for many chunks; with 1.0 the decay within a chunk is below e^-1000.
@pytest.mark.parametrize(("dt_max", "tolerance"), [(0.01, 1e-6), (1.0, 6e-5)])
def test_fp32_is_close_to_the_fp64_recurrence(dt_max, tolerance):
    for name, error in fp32_errors(inputs(300, dt_max=dt_max, batch=1), 128).items():
        assert error < tolerance, name


# If dt |a| is large, a token adds e^(dt a) times as much to the next output as to its own. So gradients of decays are
# accurate only if they do not contain the token's own part. The remaining error is the rounding of the running sum of
# dt a.
@pytest.mark.parametrize(
    ("lowest", "highest", "chunk_size", "tolerance"), [(0.5, 1, 64, 7e-6), (1, 5, 16, 5e-6), (10, 12, 64, 3e-5)]
)
def test_gradients_of_fast_decays_are_accurate(lowest, highest, chunk_size, tolerance):
    x, dt, _, b, c = inputs(200, batch=1, head_dim=16, state=16)
    dt = lowest + (highest - lowest) * torch.rand(dt.shape, generator=torch.Generator().manual_seed(1))
    errors = fp32_errors([x, dt, torch.tensor([-1.0, -1.1, -1.3, -1.5]), b, c], chunk_size)
    assert errors["a"] < tolerance
    assert errors["dt"] < 2e-6
    assert max(errors[name] for name in "yxbc") < 1e-6


def test_extreme_decay_gives_finite_results():
    x, _, a, b, c = (t.detach().float().requires_grad_() for t in inputs(64))
    dt = torch.full((2, 64, 4), 1e4, requires_grad=True)
    results = value_and_gradients(lambda *t: ssd_scan(*t, 16), [x, dt, a, b, c])
    assert all(result.isfinite().all() for result in results)
    # The state decays to zero in one step, so each output depends only on its own token.
    own = (b * c).sum(-1).repeat_interleave(2, 2)[..., None] * x * dt[..., None]
    torch.testing.assert_close(results[0], own, rtol=1e-4, atol=1e-2)


def test_tiles_of_attention_meet_the_conditions_of_the_kernels():
    for dim, kernels in TILES.items():
        assert all(size & (size - 1) == 0 and size >= 16 for size in (dim, *(n for tile in kernels for n in tile[:2])))
        assert kernels.dkdv[1] % kernels.dkdv[0] == 0
        # The keys that every query of a tile sees end where the tile begins.
        assert all(queries % keys == 0 for queries, keys, *_ in (kernels.forward, kernels.dq))
