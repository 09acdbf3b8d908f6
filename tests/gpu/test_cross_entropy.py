"""The loss with its softmax in Triton: as in PyTorch, and close to FP64."""

import pytest
import torch

from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.gpu.test_model_kernels import randn
from tests.models.builders import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("words", "chunk"), [(5000, 128), (8192, None)])
def test_loss(mesh: ParallelMesh, words: int, chunk: int | None) -> None:
    tokens, hidden = 320, 256
    x, weight = randn(tokens, hidden), randn(words, hidden, scale=0.1)
    targets = torch.randint(0, words, (tokens,), device="cuda")
    loss = head_cross_entropy(x, weight, targets, 0, mesh, fused=True, chunk_tokens=chunk)
    plain = head_cross_entropy(x, weight, targets, 0, mesh, chunk_tokens=chunk)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = torch.nn.functional.cross_entropy((x64 @ w64.t()), targets)
    (loss / 3).backward()
    (expected / 3).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert relative_error(loss.detach(), expected) < 1e-3
    assert relative_error(x.grad, x64.grad) < 1e-2 and relative_error(weight.grad, w64.grad) < 1e-2
