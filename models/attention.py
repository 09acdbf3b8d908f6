"""Grouped-query causal attention (arXiv:2305.13245): the mixer, tensor parallel over KV heads, and its kernels.

If documents are masked, a query sees only keys of its own document, up to its own position. Kernels:

    attend          The kernel that PyTorch chooses; documents by a mask [s, s]. This is the reference.
    attend_fused    Without masked documents cuDNN, the fastest from Hopper on. With them FlashAttention-2 of variable
                    length: it treats each document as a row, so short documents cost less.
    attend_in_tiles Triton kernels (models/attention_triton.py) for some sizes, deterministic and faster than
                    FlashAttention's deterministic backward pass. cuDNN's backward pass sums dq in memory in the order
                    in which its parts finish, so a deterministic run uses cuDNN's forward and Triton's backward pass.
                    With masked documents, which PyTorch's interface to cuDNN does not support, both passes are
                    Triton's in all runs. Otherwise it is attend_fused.

Shapes: t = b s tokens, b batch, s sequence, g KV heads of this rank, r query heads per KV head, h = g r query heads,
d head dimension, l tokens in the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.parallel.layers import Layout, PackedLinear, RowParallelLinear, sections_of
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.mixer import Mixer, check_multiple, input_projection, output_projection
from models.positions import Documents, NewTokens, apply_rope, rope_tables
from models.published import HuggingFaceBlock, MegatronBlock, Section, Sections, group_major_order, split_rows

# FlashAttention-2 supports head dimensions that are multiples of the first number (others are padded) up to the second.
FLASH_HEAD_MULTIPLE, FLASH_HEAD_LIMIT = 8, 256
# Kernels with a deterministic backward pass; cuDNN has none.
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class KernelTiles(NamedTuple):
    """For each Triton kernel: queries and keys of a tile, warps and stages of a program. In `dkdv` keys are a multiple
    of queries, in the others queries of keys."""

    forward: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]


# The Triton kernels support these head dimensions, on GPUs with as much shared memory as Hopper's and Blackwell's
# data-center GPUs. Tiles are fixed, not autotuned, because they determine the order of sums. Those for 128 are measured
# on an H200; the others follow FlexAttention's.
_SMALL = KernelTiles((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3))
TILES = {
    16: _SMALL,
    32: _SMALL,
    64: KernelTiles((128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
    128: KernelTiles((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
    256: KernelTiles((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
}
_SHARED_MEMORY_KIB = 227


def attend(
    q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None, order: Sequence[SDPBackend] = ()
) -> Tensor:
    """Causal attention [b, s, h, d]; query heads share KV heads in order.

    order: PyTorch's kernels to try in turn; empty: PyTorch chooses. A deterministic run on a GPU has its own order.
    """
    deterministic = q_bshd.is_cuda and torch.are_deterministic_algorithms_enabled()
    order = _DETERMINISTIC if deterministic else order
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    grouped, mask = q.shape[1] > k.shape[1], None if documents is None else documents.mask
    if mask is not None and q.is_cuda and grouped:  # CUDA kernels with a mask do not support grouped heads
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        grouped = False
    with sdpa_kernel(list(order), set_priority=True) if order else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    if deterministic:
        _make_deterministic(y)
    return y.transpose(1, 2)


def attend_fused(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` by cuDNN if it supports the sizes; within documents by PyTorch's FlashAttention-2 (CUDA, BF16, FP16)."""
    (batch, length, _, dim), extra = q_bshd.shape, -q_bshd.shape[-1] % FLASH_HEAD_MULTIPLE
    if documents is None or dim > FLASH_HEAD_LIMIT:
        return attend(q_bshd, k_bsgd, v_bsgd, documents, (SDPBackend.CUDNN_ATTENTION, *_DETERMINISTIC))
    q, k, v = ((F.pad(t, (0, extra)) if extra else t).flatten(0, 1) for t in (q_bshd, k_bsgd, v_bsgd))
    # The operator that torch.nn.attention.varlen calls; the arguments of varlen change between versions.
    flash, bounds = torch.ops.aten._flash_attention_forward, documents.boundaries
    y = flash(q, k, v, bounds, bounds, length, length, 0.0, True, False, scale=dim**-0.5)[0]
    _make_deterministic(y)
    return y[..., :dim].unflatten(0, (batch, length))


def _make_deterministic(y: Tensor) -> None:
    """Make the backward pass of `y` deterministic: with `warn_only`, PyTorch only warns that it is not."""
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    node = y.grad_fn if warns else None
    for _ in range(3):  # the results of some kernels are sliced, so attention is not the last node
        if node is None:
            return
        if "ScaledDotProduct" in node.name() or "FlashAttention" in node.name():
            node.register_prehook(lambda _: torch.use_deterministic_algorithms(True, warn_only=False))
            node.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
            return
        node = node.next_functions[0][0] if node.next_functions else None


def attend_to_cache(q_bshd: Tensor, k_blgd: Tensor, v_blgd: Tensor, positions_bs: Tensor) -> Tensor:
    """Attention [b, s, h, d] of a text's new tokens to its tokens up to their own positions.

    k_blgd, v_blgd: from the text's first token on; those after its end are masked. positions_bs: int64, of q.
    """
    length, groups = q_bshd.shape[1], k_blgd.shape[2]
    # The query heads of a KV head become queries, so that the long keys and values need not be repeated.
    q_bgrsd = q_bshd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    visible_bsl = torch.arange(k_blgd.shape[1], device=positions_bs.device) <= positions_bs[..., None]
    mask = visible_bsl[:, None, None].expand(-1, 1, q_bgrsd.shape[2], -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(
        q_bgrsd.flatten(2, 3), k_blgd.transpose(1, 2), v_blgd.transpose(1, 2), attn_mask=mask
    )
    return y.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def tiles_refusal(model: ModelConfig, tensor_parallel: int) -> str | None:
    """Why the Triton kernels do not support a model on this GPU, or None. Without a GPU, only the model is checked."""
    if model.head_dim not in TILES:
        return f"needs model.head_dim to be one of {', '.join(map(str, TILES))}, but it is {model.head_dim}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        if gpu.shared_memory_per_block_optin < _SHARED_MEMORY_KIB * 1024:
            return f"needs {_SHARED_MEMORY_KIB} KiB of shared memory, but a {gpu.name} has less"
    return None


def attend_in_tiles(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` in BF16 on CUDA. Deterministic with masked documents, and in a deterministic run."""
    if documents is None and not torch.are_deterministic_algorithms_enabled():
        return attend_fused(q_bshd, k_bsgd, v_bsgd)
    bounds = (None, None) if documents is None else (documents.begins, documents.ends)
    return _TiledAttention.apply(q_bshd, k_bsgd, v_bsgd, *bounds)  # type: ignore[return-value]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None, ends: Tensor | None) -> Tensor:
        from models import attention_triton

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if begins is None and _cudnn_supports(q, k, v):
            # The operator that scaled_dot_product_attention calls, which does not return the second result.
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            y, log_sums, *_ = cudnn(*(t.transpose(1, 2) for t in (q, k, v)), None, True, is_causal=True)
            y, log_sums = y.transpose(1, 2).contiguous(), log_sums.reshape(log_sums.shape[:3])
        else:
            y, log_sums = attention_triton.forward(q, k, v, TILES[q.shape[-1]].forward, begins)
        ctx.save_for_backward(q, k, v, y, log_sums, begins, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from models import attention_triton

        q, k, v, y, log_sums, begins, ends = ctx.saved_tensors
        _, dq_tiles, dkdv_tiles = TILES[q.shape[-1]]
        dy = grad_outputs[0].contiguous()
        gradients = attention_triton.backward(dy, q, k, v, y, log_sums, dq_tiles, dkdv_tiles, begins, ends)
        return *gradients, None, None


def _cudnn_supports(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> bool:
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] > k.shape[1])
    # Also true with deterministic algorithms if these only warn. Its forward pass is deterministic.
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


class KeysAndValues:
    """Attention's inference cache. Keys and values are [batch, max_length + 1, KV heads / tp, head_dim]; keys are after
    RoPE. Padding is written to the last position, which is never read."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    def add(self, k_bsgd: Tensor, v_bsgd: Tensor, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens. Returns those of all tokens, [batch, new.end, KV heads / tp, head_dim]."""
        position = new.positions.where(new.valid, self.keys.shape[1] - 1)
        row = torch.arange(len(position), device=position.device)[:, None]
        self.keys[row, position], self.values[row, position] = k_bsgd, v_bsgd
        return self.keys[:, : new.end], self.values[:, : new.end]


def qkv_order(config: ModelConfig) -> Tensor:
    """`group_major_order` of `qkv_proj`: published checkpoints have `[q | k | v]`; groups are KV heads."""
    return group_major_order([*_qkv_rows(config).values()], config.num_kv_heads)


def _qkv_rows(config: ModelConfig) -> dict[str, int]:
    kv_rows = config.num_kv_heads * config.head_dim
    return {"q": config.num_query_heads * config.head_dim, "k": kv_rows, "v": kv_rows}


def _hugging_face(config: ModelConfig) -> Sections:
    hidden, sizes = config.hidden_dim, _qkv_rows(config)
    names = [f"{part}_proj.weight" for part in sizes]
    return {
        "qkv_proj.weight": split_rows(names, [*sizes.values()], qkv_order(config), hidden),
        "out_proj.weight": [Section("o_proj.weight", (hidden, sizes["q"]))],
    }


def _megatron(config: ModelConfig) -> Sections:
    """Rows of linear_qkv are, for each KV head, its query heads, its key, its value, which is our order."""
    hidden, sizes = config.hidden_dim, _qkv_rows(config)
    return {
        "qkv_proj.weight": [Section("linear_qkv.weight", (sum(sizes.values()), hidden))],
        "out_proj.weight": [Section("linear_proj.weight", (hidden, sizes["q"]))],
    }


class Attention(Mixer):
    """Query head i uses KV head i // (query heads / KV heads).

    `qkv_proj` packs `[q heads of the group | k | v]` for each KV head (`qkv_order`).
    """

    name = "attention"
    fused = (FusedKernel("attention", "attention in tiles", "triton", attend_in_tiles, tiles_refusal, optional=True),)
    hugging_face = HuggingFaceBlock(
        types=("full_attention", "attention"),
        sections=_hugging_face,
        settings={
            "num_query_heads": ("num_attention_heads", 32),
            "num_kv_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
        },
        fixed={"attention_bias": False, "sliding_window": None},
    )
    megatron = MegatronBlock(
        module="self_attention",
        linears=("linear_qkv", "linear_proj"),
        sections=_megatron,
        told=("num_query_heads", "num_kv_heads", "head_dim", "rope"),
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.head_dim, self.num_local_groups = config.head_dim, config.num_kv_heads // mesh.tensor.size
        self.rope_base = config.rope_base if config.rope else None
        self._split = execution.recomputed(execution.pure(split_heads))
        self._attend = execution.kernel("attention", attend_fused if execution.compiled else attend)
        qkv, out = self.linears(config)
        self.qkv_proj = PackedLinear(qkv.in_features, qkv.sections, mesh, qkv.groups)
        self.out_proj = RowParallelLinear(out.in_features, out.out_features, mesh)

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        parts_td = self.qkv_proj(x_td)
        tables: tuple[Tensor | None, Tensor | None] = None, None
        if self.rope_base is not None and documents is not None:
            tables = documents.rope_tables(self.head_dim, self.rope_base)
        elif self.rope_base is not None:
            tables = rope_tables(sequence_length, self.head_dim, self.rope_base, x_td.device)
        sizes = self.num_local_groups, sequence_length, self.head_dim
        q, k, v = self._split(self.qkv_proj.layout, *sizes, *tables, *parts_td)
        return self.out_proj(self._attend(q, k, v, documents).flatten(2).flatten(0, 1))

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> KeysAndValues:
        return KeysAndValues((batch, max_length + 1, self.num_local_groups, self.head_dim), device, dtype)

    def decode(self, x_td: Tensor, cache: KeysAndValues, new: NewTokens) -> Tensor:
        tables = (None, None) if self.rope_base is None else new.rope_tables(self.head_dim, self.rope_base)
        sizes = self.num_local_groups, new.length, self.head_dim
        q, k, v = split_heads(self.qkv_proj.layout, *sizes, *tables, *self.qkv_proj(x_td))
        y = attend_to_cache(q, *cache.add(k, v, new), new.positions)
        return self.out_proj(y.flatten(2).flatten(0, 1))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        check_multiple(config, "num_query_heads", "num_kv_heads")
        if config.rope and config.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={config.head_dim} is odd, but model.rope rotates pairs; use "
                f"{config.head_dim + 1}, or model.rope=false"
            )

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        return {f"model.{name}": (getattr(config, name),) * 2 for name in ("num_query_heads", "num_kv_heads")}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        rows, key = _qkv_rows(config), "model.num_query_heads x model.head_dim"
        return (
            input_projection("qkv_proj", config, rows, config.num_kv_heads),
            output_projection("out_proj", config, rows["q"], key, "the attention's output projection"),
        )

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """The causal half of two products with score matrices [s, s], also with masked documents."""
        return 2 * sequence_length * config.num_query_heads * config.head_dim

    @classmethod
    def describe_kernels(cls, execution: Execution, masked: bool) -> list[str]:
        tiled = "attention" in execution.kernels
        if masked:
            kernel = "FlashAttention of variable length" if execution.compiled else "PyTorch's SDPA with a mask"
            return [f"attention within documents: {'Triton' if tiled else kernel}"]
        if torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available():
            kernel = "cuDNN forward, Triton backward" if tiled else "SDPA by FlashAttention"
            return [f"attention: {kernel} (deterministic)"]
        kernel = "SDPA by cuDNN, else by FlashAttention" if execution.compiled else "PyTorch's SDPA"
        return [f"attention: {kernel}"]


def split_heads(
    layout: Layout, groups: int, length: int, head_dim: int, cos: Tensor | None, sin: Tensor | None, *parts_td: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b, s, h, d], k and v [b, s, g, d], contiguous, from the result of `qkv_proj`; rotated if there are tables."""
    parts_bsf = [part.unflatten(0, (-1, length)) for part in parts_td]
    q, k, v = sections_of(parts_bsf, layout, groups, *"qkv")
    q = q.unflatten(-1, (-1, head_dim)).flatten(2, 3)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, k.contiguous(), v.contiguous()
