"""megatron-core's own models on a CPU: what it computes, saves and loads, for comparisons.

Its classes, layer specs and dist_checkpointing are used as they are installed. What they call in turn needs a GPU, and
is replaced before they are imported, by plain PyTorch: `transformer_engine` (with the parameter names and extra states
of TransformerEngine 2: layer_norm_weight, weight, _extra_state), `mamba_ssm` and `causal_conv1d`.

`PYTHONPATH=. python tests/exchange/megatron_core.py` writes megatron_golden.json: the keys and shapes that it saves.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import multiprocessing
import sys
import types
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exchange.megatron_model import model_class
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


class _DotProductAttention(nn.Module):
    """Causal, [sequence, batch, heads, head_dim]. (Its extra state Transformer Engine does not miss.)"""

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
    torch.cuda.synchronize = lambda *_: None


def build(config: ModelConfig, dtype: torch.dtype, *, local_spec: bool = False, padded_vocab: int = 0) -> nn.Module:
    """megatron-core's model of `config`, its tensor-parallel size that of the process group."""
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    kind = model_class(config)
    settings = TransformerConfig(
        num_layers=len(config.pattern) // (2 if kind == "gpt" else 1),
        hidden_size=config.hidden_dim,
        num_attention_heads=config.num_query_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_dim,
        mamba_num_heads=config.mamba_num_heads,
        mamba_head_dim=config.mamba_head_dim,
        mamba_num_groups=config.mamba_num_groups,
        mamba_state_dim=config.mamba_state_dim,
        use_mamba_mem_eff_path=False,  # its kernel does all at once; without it, Megatron's own code cuts the sections
        is_hybrid_model=kind == "mamba",
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        activation_func=squared_relu,
        gated_linear_unit=False,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
    )
    common: dict[str, Any] = {
        "vocab_size": padded_vocab or config.vocab_size,
        "max_sequence_length": 128,
        "position_embedding_type": "rope" if config.rope else "none",
        "rotary_base": int(config.rope_base),
        "share_embeddings_and_output_weights": False,
        "parallel_output": False,
    }
    if kind == "mamba":
        assert not local_spec
        model = MambaModel(settings, mamba_stack_spec, hybrid_override_pattern=config.pattern, **common)
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if local_spec:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(settings, spec, **common)
    return model.to(dtype).eval()


def draw_weights(model: nn.Module) -> None:
    """Weights of every size, the same on all ranks where they hold the same."""
    for name, parameter in model.named_parameters():
        shared = parameter.dim() == 1 and not name.endswith(
            ("A_log", ".D", "dt_bias", "conv1d.bias", "mixer.norm.weight")
        )
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + (0 if shared else dist.get_rank()))
        values = torch.randn(parameter.shape, generator=generator)
        scale, mean = (0.2, 1.0) if "norm" in name and "in_proj.weight" not in name else (0.05, 0.0)
        if name.endswith(("A_log", ".D", "dt_bias")):
            scale, mean = 0.5, 0.5
        elif "conv1d" in name:
            scale = 0.3
        with torch.no_grad():
            parameter.copy_(values * scale + mean)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """tokens [batch, sequence] -> FP32 [batch, sequence, vocabulary]."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, positions, mask).float()


def keys_of(config: ModelConfig, options: dict[str, Any], numbered: bool) -> dict[str, list[int] | None]:
    """Every key of the checkpoint that Megatron would save, with the shape of a tensor and None for an object."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    state = build(config, torch.float32, **options).sharded_state_dict(metadata=_metadata(numbered))
    apply_factories(state)
    flat = [leaf for value in state.values() for leaf in (value if isinstance(value, list) else [value])]
    return {
        each.unique_key if isinstance(each, ShardedObject) else each.key: (
            None if isinstance(each, ShardedObject) else list(each.global_shape)
        )
        for each in flat
    }


def load_and_run(
    folder: Path, config: ModelConfig, tokens: Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> Tensor:
    """What Megatron computes with a checkpoint: loaded as Megatron-LM does, with its default strictness."""
    from megatron.core import dist_checkpointing

    model = build(config, dtype, **options)
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    state = dist_checkpointing.load(wanted, str(folder), strict="assume_ok_unexpected")
    model.load_state_dict(state["model"])
    return logits_of(model, tokens)


def draw_and_save(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    arguments: dict[str, Any],
    options: dict[str, Any],
    numbered: bool,
) -> None:
    """Save a model with drawn weights and Adam's state as Megatron-LM does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    model = build(config, dtype, **options)
    draw_weights(model)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        moment = torch.ones(parameter.shape)
        optimizer.state[parameter] = {"exp_avg": moment, "exp_avg_sq": moment.clone()}
    sharded = model.sharded_state_dict(metadata=_metadata(numbered))
    adam = optimizer.state_dict()
    ids = get_param_id_to_sharded_param_map(sharded, (p for g in optimizer.param_groups for p in g["params"]))
    optim_state_to_sharding_state(adam, ids)
    state = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 30,
        "model": sharded,
        "optimizer": adam,
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=_metadata(numbered))


def _metadata(numbered: bool) -> dict[str, Any]:
    return {"singleton_local_shards": False, "non_homogeneous_layers": numbered}


def run_all(rank: int, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several of these functions, in a process of their own: importing Megatron takes seconds."""
    install_stand_ins()
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # its save starts processes
    return [function(*arguments) for function, arguments in calls]


_GOLDEN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "hybrid": ("hybrid", {}, False),
    "hybrid with RoPE": ("hybrid with RoPE", {}, False),
    "transformer": ("transformer", {}, False),
    "transformer, numbered": ("transformer", {}, True),
    "transformer, local spec": ("transformer", {"local_spec": True}, False),
}


def write_golden() -> None:
    from tests.exchange.megatron_cases import config_of
    from tests.training.harness import launch

    calls = [(keys_of, (config_of(case).model, options, numbered)) for case, options, numbered in _GOLDEN.values()]
    (found,) = launch(run_all, 1, calls, seconds=600.0)
    golden = {
        name: {"case": case, "options": options, "numbered": numbered, "keys": keys}
        for (name, (case, options, numbered)), keys in zip(_GOLDEN.items(), found, strict=True)
    }
    Path(__file__).with_name("megatron_golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    write_golden()
