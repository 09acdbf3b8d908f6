import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.parallel.parameters import new_parameter
from tests.training.harness import launch, whole

TOKENS, HIDDEN, WORDS = 40, 16, 96


def draws(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(WORDS, HIDDEN, generator=generator))
    return x, weight, torch.randint(WORDS, (TOKENS,), generator=generator)


def in_fp64(x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of scale * loss."""
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x64 @ w64.t(), targets)
    (scale * loss).backward()
    assert x64.grad is not None and w64.grad is not None
    return loss.detach(), x64.grad, w64.grad


@pytest.mark.parametrize("scale", [1 / 3, TOKENS / 32])
def test_bf16_is_rounded_in_the_logits_their_gradient_and_dx_and_nowhere_else(mesh, scale):
    x, weight, targets = draws(torch.bfloat16)
    (scale * head_cross_entropy(x, weight, targets, 0, mesh)).backward()
    w = weight.detach().bfloat16()
    logits = (x.detach() @ w.t()).float()
    onehot = F.one_hot(targets, WORDS).float()
    dlogits = (logits.softmax(-1) - onehot).bfloat16().float()
    factor = torch.tensor(scale) / TOKENS
    assert weight.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, dlogits.t() @ x.detach().float() * factor, rtol=1e-5, atol=1e-8)
    # On a CPU the product is rounded before the scale, which is exact for a power of two.
    expected = (dlogits.bfloat16() @ w).float() * factor
    assert torch.equal(x.grad, expected.bfloat16())


@pytest.mark.parametrize(("chunk", "masked"), [(None, True), (7, True), (7, False)])
def test_loss_and_gradients(mesh, chunk, masked):
    """Also where targets do not count."""
    x, weight, targets = draws()
    if masked:
        targets[::3] = -1
    counted = int((targets >= 0).sum()) if masked else None
    loss = head_cross_entropy(x, weight, targets, 0, mesh, chunk_tokens=chunk, num_targets=counted)
    (loss / 3).backward()
    kept = targets >= 0
    expected, dx, dw = in_fp64(x[kept], weight, targets[kept], 1 / 3)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(x.grad[kept].double(), dx, rtol=1e-4, atol=1e-8)
    assert (x.grad[~kept] == 0).all()
    torch.testing.assert_close(weight.grad.double(), dw, rtol=1e-4, atol=1e-7)
    none = head_cross_entropy(x, weight, torch.full_like(targets, -1), 0, mesh, chunk_tokens=chunk, num_targets=0)
    x.grad = weight.grad = None
    none.backward()
    assert none == 0 and (x.grad == 0).all() and (weight.grad == 0).all()


def sharded(rank: int, chunk: int | None, uncounted: int = 0) -> tuple[float, Tensor, Tensor]:
    """uncounted: how many targets at the beginning do not count."""
    mesh = build_mesh(ParallelConfig(tensor=2, sequence=False), torch.device("cpu"))
    x, weight, targets = draws()
    targets[:uncounted] = -1
    parameter, rows = new_parameter((WORDS, HIDDEN), mesh, 0), WORDS // 2
    parameter.data._local_tensor.copy_(weight.detach()[rank * rows : (rank + 1) * rows])
    options = {"num_targets": TOKENS - uncounted} if uncounted else {}
    loss = head_cross_entropy(x, parameter, targets, rank * rows, mesh, chunk_tokens=chunk, **options)
    (loss / 3).backward()
    return loss.item(), x.grad, whole(parameter.grad)


@pytest.mark.parametrize(("chunk", "uncounted"), [(None, 0), (16, 11)])
def test_a_sharded_vocabulary(chunk, uncounted):
    (loss, dx_first, dw), (other_loss, dx_second, other_dw) = launch(sharded, 2, chunk, uncounted)
    x, weight, targets = draws()
    expected, dx, expected_dw = in_fp64(x[uncounted:], weight, targets[uncounted:], 1 / 3)
    assert loss == other_loss and torch.equal(dw, other_dw)
    assert abs(loss - expected.item()) < 1e-5
    assert (dx_first[:uncounted] == 0).all() and (dx_second[:uncounted] == 0).all()
    torch.testing.assert_close((dx_first + dx_second)[uncounted:].double(), dx, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(dw.double(), expected_dw, rtol=1e-4, atol=1e-7)
