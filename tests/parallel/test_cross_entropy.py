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


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, hidden], weight [vocab, hidden], targets [tokens]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(WORDS, HIDDEN, generator=generator))
    return x, weight, torch.randint(WORDS, (TOKENS,), generator=generator)


def in_fp64(x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and dx and dW of scale * loss, by PyTorch in FP64."""
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x64 @ w64.t(), targets)
    (scale * loss).backward()
    assert x64.grad is not None and w64.grad is not None
    return loss.detach(), x64.grad, w64.grad


@pytest.mark.parametrize("scale", [1 / 3, TOKENS / 32])
def test_only_logits_their_gradient_and_dx_are_rounded_to_bf16(mesh, scale):
    x, weight, targets = random_inputs(torch.bfloat16)
    (scale * head_cross_entropy(x, weight, targets, 0, mesh)).backward()
    w = weight.detach().bfloat16()
    logits = (x.detach() @ w.t()).float()
    onehot = F.one_hot(targets, WORDS).float()
    dlogits = (logits.softmax(-1) - onehot).bfloat16().float()
    factor = torch.tensor(scale) / TOKENS
    assert weight.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, dlogits.t() @ x.detach().float() * factor, rtol=1e-5, atol=1e-8)
    # On a CPU dx is rounded to BF16 before it is scaled and once more after it. The second rounding changes nothing if
    # the factor is a power of two.
    expected = (dlogits.bfloat16() @ w).float() * factor
    assert torch.equal(x.grad, expected.bfloat16())


@pytest.mark.parametrize(("chunk", "masked"), [(None, True), (7, True), (7, False), (0, True), (0, False)])
def test_loss_and_gradients_are_those_of_fp64(mesh, chunk, masked):
    """masked: some targets do not count. chunk: 0: from logits that a quantized head has computed."""

    def head_loss(targets, counted):
        if chunk == 0:
            return head_cross_entropy(x @ weight.t(), None, targets, 0, mesh, num_targets=counted)
        return head_cross_entropy(x, weight, targets, 0, mesh, chunk_tokens=chunk, num_targets=counted)

    x, weight, targets = random_inputs()
    if masked:
        targets[::3] = -1
    counted = int((targets >= 0).sum()) if masked else None
    loss = head_loss(targets, counted)
    (loss / 3).backward()
    counts = targets >= 0
    expected, dx, dw = in_fp64(x[counts], weight, targets[counts], 1 / 3)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(x.grad[counts].double(), dx, rtol=1e-4, atol=1e-8)
    assert (x.grad[~counts] == 0).all()
    torch.testing.assert_close(weight.grad.double(), dw, rtol=1e-4, atol=1e-7)
    no_targets = torch.full_like(targets, -1)
    loss_of_none = head_loss(no_targets, 0)
    x.grad = weight.grad = None
    loss_of_none.backward()
    assert loss_of_none == 0 and (x.grad == 0).all() and (weight.grad == 0).all()


def loss_and_gradients_on_a_rank(rank: int, chunk: int | None, ignored: int = 0) -> tuple[float, Tensor, Tensor]:
    """ignored: the number of targets, from the first on, that do not count."""
    mesh = build_mesh(ParallelConfig(tensor=2, sequence=False), torch.device("cpu"))
    x, weight, targets = random_inputs()
    targets[:ignored] = -1
    parameter, rows = new_parameter((WORDS, HIDDEN), mesh, 0), WORDS // 2
    parameter.data._local_tensor.copy_(weight.detach()[rank * rows : (rank + 1) * rows])
    options = {"num_targets": TOKENS - ignored} if ignored else {}
    loss = head_cross_entropy(x, parameter, targets, rank * rows, mesh, chunk_tokens=chunk, **options)
    (loss / 3).backward()
    return loss.item(), x.grad, whole(parameter.grad)


@pytest.mark.parametrize(("chunk", "ignored"), [(None, 0), (16, 11)])
def test_a_sharded_vocabulary_gives_the_loss_and_gradients_of_fp64(chunk, ignored):
    first, second = launch(loss_and_gradients_on_a_rank, 2, chunk, ignored)
    (loss, dx_first, dw), (other_loss, dx_second, other_dw) = first, second
    x, weight, targets = random_inputs()
    expected, dx, expected_dw = in_fp64(x[ignored:], weight, targets[ignored:], 1 / 3)
    assert loss == other_loss and torch.equal(dw, other_dw)
    assert abs(loss - expected.item()) < 1e-5
    assert (dx_first[:ignored] == 0).all() and (dx_second[:ignored] == 0).all()
    torch.testing.assert_close((dx_first + dx_second)[ignored:].double(), dx, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(dw.double(), expected_dw, rtol=1e-4, atol=1e-7)
