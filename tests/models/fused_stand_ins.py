"""Stand-ins for the fused kernels that take documents, for machines without a GPU.

Each refuses what the real one refuses, or would quietly compute something else with, and then computes by the plain
path. The demands are those of causal-conv1d 1.6 (csrc/causal_conv1d.cpp), mamba-ssm 2.3 (ops/triton/ssd_*.py) and
PyTorch's FlashAttention-2 (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from models import sdpa
from models.conv import causal_conv_silu
from models.ssd import ScanInputs, plain_scan


def check_numbers(seq_idx: Tensor, batch: int, length: int) -> None:
    """What both kernels read as int32 through a pointer and two strides."""
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (batch, length)
    assert (seq_idx >= 0).all(), "negative means padding"
    # The scan compares the ends of chunks: a number that came back would join two documents.
    assert (seq_idx.diff(dim=1) >= 0).all()


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x: [batch, channels, sequence]."""
    batch, channels, length = x.shape
    assert x.dtype == torch.bfloat16 and weight.dtype == bias.dtype == torch.float32 and activation == "silu"
    assert 2 <= weight.shape[1] <= 4 and channels % 8 == 0
    assert x.stride(1) == 1 and x.stride(2) > 1, "seq_idx needs the channels innermost"
    assert x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0
    if seq_idx is not None:
        check_numbers(seq_idx, batch, length)
        # The forward kernel reads whole chunks of 64, beyond the last row too.
        readable = seq_idx.untyped_storage().nbytes() // 4 - seq_idx.storage_offset()
        assert readable >= (batch - 1) * length + -(-length // 64) * 64, "it would read memory of others"
    return causal_conv_silu(x.transpose(1, 2), weight, bias, seq_idx).to(x.dtype).transpose(1, 2)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """x: [batch, sequence, heads, head_dim]."""
    batch, length, heads, _ = x.shape
    assert {t.dtype for t in (x, dt, B, C)} == {torch.bfloat16} and {t.dtype for t in (A, D, dt_bias)} == {
        torch.float32
    }
    assert dt.shape == (batch, length, heads) and B.shape == C.shape and heads % B.shape[2] == 0
    assert chunk_size >= 16 and chunk_size & (chunk_size - 1) == 0 and dt_softplus
    if seq_idx is not None:
        check_numbers(seq_idx, batch, length)
    inputs = ScanInputs(x.float(), dt, A, B.float(), C.float(), D, dt_bias)
    return plain_scan(inputs, chunk_size, seq_idx).to(x.dtype)


def flash_of_variable_length(
    q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, boundaries: Tensor, longest: int, scale: float
) -> Tensor:
    """q: [tokens, heads, head_dim]."""
    assert {t.dtype for t in (q_thd, k_tgd, v_tgd)} == {torch.bfloat16}
    assert all(t.stride(-1) == 1 for t in (q_thd, k_tgd, v_tgd))
    assert q_thd.shape[2] % sdpa.FLASH_HEAD_MULTIPLE == 0 and q_thd.shape[2] <= sdpa.FLASH_HEAD_LIMIT
    assert q_thd.shape[1] % k_tgd.shape[1] == 0
    assert boundaries.dtype == torch.int32 and boundaries.is_contiguous() and boundaries.device == q_thd.device
    lengths = boundaries.diff()
    assert boundaries[0] == 0 and boundaries[-1] == len(q_thd)
    assert (lengths > 0).all() and lengths.max() <= longest, "an empty span would be computed for nothing"
    repeats = q_thd.shape[1] // k_tgd.shape[1]
    outputs = []
    for span in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        q, k, v = (t[slice(*span)].transpose(0, 1).float() for t in (q_thd, k_tgd, v_tgd))
        k, v = (t.repeat_interleave(repeats, 0) for t in (k, v))
        future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scale).masked_fill(future, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(q_thd.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Put the stand-ins in place of the kernels; counts the calls that were given documents, by kernel."""
    calls: dict[str, int] = {}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Tensor:
            if options.get("seq_idx", True) is not None:
                calls[name] = calls.get(name, 0) + 1
            return function(*arguments, **options)

        return call

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    combined: Any = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    combined.mamba_chunk_scan_combined = counted("scan", mamba_chunk_scan_combined)
    convolution: Any = ModuleType("causal_conv1d")
    convolution.causal_conv1d_fn = counted("conv", causal_conv1d_fn)
    monkeypatch.setitem(sys.modules, "causal_conv1d", convolution)
    monkeypatch.setattr(sdpa, "flash_of_variable_length", counted("attention", flash_of_variable_length))
    return calls
