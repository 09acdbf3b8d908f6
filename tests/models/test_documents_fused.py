"""Masked documents on the fused path: what its kernels are given, and that it computes what the plain path does."""

from __future__ import annotations

import pytest
import torch

from models import sdpa
from models.conv import fused_conv_silu
from models.execution import Execution
from models.hybrid import build_model
from models.initialization import initialize
from models.pattern import describe_execution
from models.positions import Documents
from models.sdpa import attend, attend_fused
from models.ssd import fused_scan
from tests.models import fused_stand_ins
from tests.models.builders import local, relative_error, small_config
from tests.models.test_documents import LENGTHS, numbers_of

CONFIG = small_config(rope=True, mamba_chunk_size=16, mamba_state_dim=8, init_std=0.2)


def as_it_is(function):
    return function


def fused_on_a_cpu(recompute: str = "none") -> Execution:
    """The choices of a GPU, but for what only a GPU can compile."""
    from megatron_fp4.parallel.cross_entropy import head_cross_entropy

    def loss(*inputs, fused, **settings):
        assert fused
        return head_cross_entropy(*inputs, **settings)

    return Execution({"scan": fused_scan, "conv": fused_conv_silu, "loss": loss}, compile=as_it_is, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_the_model_gives_every_kernel_what_it_demands(mesh, monkeypatch, recompute):
    calls = fused_stand_ins.install(monkeypatch)
    text = torch.randint(0, CONFIG.vocab_size, (len(LENGTHS), 22), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], []
    for execution in (fused_on_a_cpu(recompute), Execution()):
        model = build_model(CONFIG, mesh, torch.bfloat16, execution)
        initialize(model, CONFIG, 0)
        loss = model(text[:, :-1], text[:, 1:], numbers_of(LENGTHS))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    for name, gradient in gradients[1].items():
        # Of A, most of the parts cancel, and BF16 rounds each.
        assert relative_error(gradients[0][name], gradient) < (0.15 if name.endswith("A_log") else 5e-2), name
    again = 1 if recompute == "none" else 2
    assert calls["scan"] == calls["conv"] == 2 * again  # of two Mamba-2 blocks
    assert calls["attention"] == (2 if recompute == "block" else 1)


def test_without_documents_they_get_none(mesh, monkeypatch):
    calls = fused_stand_ins.install(monkeypatch)
    model = build_model(CONFIG, mesh, torch.bfloat16, fused_on_a_cpu())
    initialize(model, CONFIG, 0)
    monkeypatch.setattr(sdpa, "_attend", lambda q, *_: q)  # cuDNN's
    model(torch.zeros(1, 16, dtype=torch.int64))
    assert calls == {}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (4, 2, 16), (6, 2, 20)])
def test_attention_within_documents(monkeypatch, heads, kv_heads, dim):
    """Also with a head dimension that has to be padded."""
    fused_stand_ins.install(monkeypatch)
    documents = Documents(numbers_of(LENGTHS))
    shapes = [(len(LENGTHS), 21, count, dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))
    tensors = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    y, expected = attend_fused(*tensors, documents), attend(*(t.float() for t in tensors), documents)
    assert y.shape == expected.shape and relative_error(y, expected) < 1e-2
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    ours, reference = (torch.autograd.grad(out, tensors, dy.to(out.dtype)) for out in (y, expected))
    for a, b in zip(ours, reference, strict=True):
        assert relative_error(a, b) < 2e-2


def test_wide_heads_get_the_mask(monkeypatch):
    calls = fused_stand_ins.install(monkeypatch)
    documents, dim = Documents(numbers_of([[3, 5]])), sdpa.FLASH_HEAD_LIMIT + 8
    q, k, v = (torch.randn(1, 8, 2, dim, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(attend_fused(q, k, v, documents), attend(q, k, v, documents))
    assert calls == {}


@pytest.mark.parametrize("deterministic", [False, True])
def test_pytorchs_own_kernel_takes_it_and_can_be_made_deterministic(deterministic):
    """On the meta device, which has shapes and autograd: arguments, result, and where the backward pass hangs."""
    documents = Documents(torch.zeros(2, 64, dtype=torch.int32, device="meta"), 5)
    assert documents.boundaries.shape == (6,) and documents.boundaries.dtype == torch.int32
    q, k, v = (
        torch.empty(2, 64, heads, 20, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (8, 2, 2)
    )
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    seen: list[bool] = []
    try:
        y = attend_fused(q, k, v, documents)
        assert y.shape == q.shape
        node = y.grad_fn
        while "FlashAttention" not in node.name():
            node = node.next_functions[0][0]
        node.register_prehook(lambda _: seen.append(torch.is_deterministic_algorithms_warn_only_enabled()))
        y.backward(torch.empty_like(y))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert k.grad is not None and k.grad.shape == k.shape
    assert seen == [not deterministic], "with warn_only, attention's backward pass warns and goes on as it was"


def test_the_rehearsal_runs_the_kernels_with_documents(mesh, monkeypatch):
    """Triton keeps its choices apart for kernels with and without them."""
    calls = fused_stand_ins.install(monkeypatch)
    mamba = build_model(CONFIG, mesh, torch.bfloat16, fused_on_a_cpu()).blocks[0].mixer
    mamba.rehearse(2, 32, torch.bfloat16, torch.device("cpu"))
    assert calls == {}
    mamba.rehearse(2, 32, torch.bfloat16, torch.device("cpu"), masked=True)
    assert calls == {"scan": 1}


def test_the_log_says_what_runs():
    assert "attention within documents: Flash of variable length" in describe_execution(fused_on_a_cpu(), "*-", True)
    assert "attention within documents: PyTorch's SDPA with a mask" in describe_execution(Execution(), "*", True)
    assert "within documents" not in describe_execution(Execution(), "*")
