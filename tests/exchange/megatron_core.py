"""megatron-core's own models on a CPU: what it computes, saves and loads, for comparisons.

Its classes, layer specs and dist_checkpointing are used as they are installed. What they call in turn needs a GPU, and
is replaced before they are imported, by plain PyTorch: `transformer_engine` (with the parameter names and extra states
of TransformerEngine 2: layer_norm_weight, weight, _extra_state), `mamba_ssm` and `causal_conv1d`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp4.config.schema import ModelConfig

_DECODING = "megatron.core.inference.contexts.attention_context.triton"


class _Extra(nn.Module):
    """TransformerEngine's modules save an extra state; it is empty without delayed scaling."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


class _RMSNorm(_Extra):
    def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Linear(_Extra):
    def __init__(
        self, in_features: int, out_features: int, *, params_dtype: torch.dtype, parallel_mode: str, **given: Any
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, given["bias"]
        assert not self.use_bias
        self.parallel_mode, self.group, self.size = parallel_mode, given["tp_group"], given["tp_size"]
        rows, columns = out_features, in_features
        if parallel_mode == "column":
            rows //= self.size
        else:
            columns //= self.size
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        y = x @ self.weight.t()
        if self.parallel_mode == "row" and self.size > 1:
            dist.all_reduce(y, group=self.group)
        return y


class _LayerNormLinear(_Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **given: Any) -> None:
        super().__init__(in_features, out_features, **given)
        assert normalization == "RMSNorm"
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=given["params_dtype"]))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps))


class _DotProductAttention(_Extra):
    """Causal, [sequence, batch, heads, head_dim]."""

    def __init__(self, **given: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, attn_mask_type: str, **_: Any) -> Tensor:
        assert attn_mask_type == "causal"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def _conv(x: Tensor, weight: Tensor, bias: Tensor, activation: str, seq_idx: None, initial_states: None) -> Tensor:
    """causal-conv1d's, [batch, channels, time]."""
    assert activation == "silu"
    return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(bias)))


def _chunk_scan_combined(
    x: Tensor, dt: Tensor, a_h: Tensor, b: Tensor, c: Tensor, chunk_size: int, *, D: Tensor, dt_bias: Tensor, **_: Any
) -> Tensor:
    """mamba-ssm's recurrence, token by token: x [b, s, h, p], dt [b, s, h], B and C [b, s, g, n] -> [b, s, h, p]."""
    heads, groups = x.shape[2], b.shape[2]
    b, c = (t.float().repeat_interleave(heads // groups, 2) for t in (b, c))
    x32, dt = x.float(), F.softplus(dt.float() + dt_bias)
    h = torch.zeros(x.shape[0], heads, x.shape[3], b.shape[3])
    rows = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        h = h * torch.exp(step * a_h[:, None, None]) + step * x32[:, t, :, :, None] * b[:, t, :, None, :]
        rows.append((h * c[:, t, :, None, :]).sum(-1) + D.float()[:, None] * x32[:, t])
    return torch.stack(rows, 1).to(x.dtype)


class _RMSNormGated(nn.Module):
    """mamba-ssm's: the gate first, then the norm of each group."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size, self.weight = eps, group_size, nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        gated = (y.float() * F.silu(z.float())).unflatten(-1, (-1, self.group_size))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(y.dtype)


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    return module


def install_stand_ins() -> None:
    """Before anything of megatron-core is imported in this process."""
    assert not any(name == "megatron" or name.startswith("megatron.core") for name in sys.modules)
    for name in ("transformer_engine", "mamba_ssm", "causal_conv1d"):
        assert name not in sys.modules
    linears = {"Linear": _Linear, "LayerNormLinear": _LayerNormLinear, "GroupedLinear": type("GroupedLinear", (), {})}
    norms = {"RMSNorm": _RMSNorm, "LayerNorm": None, "DotProductAttention": _DotProductAttention}
    unused = {"CudaRNGStatesTracker": type("CudaRNGStatesTracker", (), {}), "activation_recompute_forward": None}
    tracker = _module("transformer_engine.pytorch.distributed", **unused)
    pytorch = _module("transformer_engine.pytorch", **linears, **norms, distributed=tracker)
    _module("transformer_engine.pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (), {}))
    _module("transformer_engine.pytorch.cpp_extensions", cast_to_fp8=None)
    _module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=None, fp8_autocast=None)
    recipe = _module("transformer_engine.common.recipe", DelayedScaling=type("DelayedScaling", (), {}))
    common = _module("transformer_engine.common", recipe=recipe)
    _module("transformer_engine", __version__="1.12.0", pytorch=pytorch, common=common)
    _module("mamba_ssm", __version__="2.2.6")
    _module("mamba_ssm.ops")
    _module("mamba_ssm.ops.triton")
    _module("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_RMSNormGated)
    scans = {"mamba_chunk_scan_combined": _chunk_scan_combined, "mamba_split_conv1d_scan_combined": None}
    _module("mamba_ssm.ops.triton.ssd_combined", **scans)
    _module("causal_conv1d", __version__="1.5.3", causal_conv1d_fn=_conv, causal_conv1d_update=None)
    _module("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=None)
    # Triton, which decoding needs.
    decoding = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    _module(f"{_DECODING}.tensor_ops", **dict.fromkeys(decoding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about apex, and that there is no GPU
        from megatron.core.ssm import mamba_mixer
    mamba_mixer.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=nullcontext)
    torch.cuda.current_device = lambda: torch.device("cpu")
