"""The stand-ins for the fused kernels and the loss allocate as much as these do, counted by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.planning.dry_run import Ledger
from models import planned as stand_ins
from models.positions import Documents
from models.ssd import ScanInputs
from tests.training.harness import alone

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 256, 8, 2, 64
ELEMENTS = BATCH * LENGTH * HEADS * DIM
SMALL = 8 * 512  # rounding of the sizes of small tensors


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def growth(ledger: Ledger, before: int) -> tuple[int, int]:
    """Bytes alive now and at the peak, above `before`. Restarts the peak."""
    grown = ledger.live_bytes - before, ledger.peak_bytes - before
    ledger.restart_peak()
    return grown


@pytest.mark.parametrize("deterministic, tiled, masked", [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
def test_memory_of_attention(deterministic: bool, tiled: bool, masked: bool) -> None:
    with FakeTensorMode(), Ledger(lambda: 0) as ledger:
        q, k, v = (bf16(BATCH, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        documents = Documents(torch.zeros(BATCH, LENGTH, dtype=torch.int32)) if masked else None
        attend = stand_ins.attention(deterministic, tiled)
        before = ledger.live_bytes
        y = attend(q, k, v, documents)
        rows, bounds = 4 * BATCH * HEADS * LENGTH, 2 * 4 * BATCH * LENGTH if masked else 0
        assert growth(ledger, before) == (2 * ELEMENTS + rows + bounds,) * 2
        before = ledger.live_bytes
        attend(q, k, v, documents)  # as another block does
        assert ledger.live_bytes == before, "the bounds of documents are kept only once"
        dy = torch.empty_like(y)
        ledger.restart_peak()
        before = ledger.live_bytes
        y.backward(dy)
        parts = 9 if deterministic else 1  # 16 heads (of 2 sequences) on 132 multiprocessors
        gradients = 2 * ELEMENTS + 2 * (2 * ELEMENTS * KV_HEADS // HEADS)
        own = 0 if tiled else 4 * ELEMENTS * parts + 2 * 2 * ELEMENTS
        assert growth(ledger, before)[1] == gradients + rows + own


def test_memory_of_the_scan() -> None:
    groups, state, chunk = 2, 32, 64
    with FakeTensorMode(), Ledger(lambda: 0) as ledger:
        x, dt = bf16(BATCH, LENGTH, HEADS, DIM), bf16(BATCH, LENGTH, HEADS)
        b, c = (bf16(BATCH, LENGTH, groups, state) for _ in range(2))
        a, d, bias = (torch.empty(HEADS, requires_grad=True) for _ in range(3))
        before = ledger.live_bytes
        y = stand_ins.scan(ScanInputs(x, dt, a, b, c, d, bias), chunk)
        steps, chunks = BATCH * LENGTH * HEADS, BATCH * LENGTH // chunk
        states, products = chunks * HEADS * DIM * state, chunks * groups * chunk**2
        kept = 2 * ELEMENTS + 4 * steps
        most = 8 * steps + max(6 * states, 2 * states + 4 * products + 2 * ELEMENTS)
        assert growth(ledger, before) == (kept, most)
        dy = torch.empty_like(y)
        before = ledger.live_bytes
        y.backward(dy)
        most = 8 * steps + 4 * products + 3 * 4 * states
        assert growth(ledger, before)[1] == pytest.approx(most, abs=SMALL)


@pytest.mark.parametrize("fused", [False, True])
def test_memory_of_the_loss(fused: bool) -> None:
    vocab, hidden, tokens = 4096, 64, 512
    with alone() as mesh, FakeTensorMode(), Ledger(lambda: 0) as ledger:
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = nn.Parameter(torch.empty(vocab, hidden, dtype=torch.bfloat16))
        targets = torch.empty(tokens, dtype=torch.int64)
        before = ledger.live_bytes
        loss = stand_ins.loss(x, weight, targets, 0, mesh, fused=fused, chunk_tokens=tokens)
        # dx and dW are kept in FP32, as on CUDA. At the peak there are the logits, without the kernel also in FP32.
        gradients = 4 * tokens * hidden + 4 * vocab * hidden
        assert ledger.live_bytes - before == pytest.approx(gradients, abs=64 * 1024)
        logits = tokens * vocab * (2 if fused else 6)
        most = max(gradients + 2 * tokens * vocab, 4 * tokens * hidden + logits)
        assert ledger.peak_bytes - before == pytest.approx(most, abs=64 * 1024)
        loss.backward()
        assert x.grad is not None and weight.grad is not None and weight.grad.dtype == torch.float32
