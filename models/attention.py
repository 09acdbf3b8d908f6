"""Grouped-query causal attention (arXiv:2305.13245): the mixer, tensor parallel over KV heads, and its kernels.

Where documents are masked, a query sees the keys of its own document up to itself. Kernels:

    attend          the kernel that PyTorch chooses; documents by a mask of the whole [s, s] matrix: the reference
    attend_fused    cuDNN, the fastest from Hopper on, for whole rows. Within documents FlashAttention-2 of variable
                    length, which takes documents of all rows as rows of their own, so short documents cost less.
    attend_in_tiles the same gradients in every run, faster than FlashAttention's deterministic backward pass, for the
                    sizes that its Triton kernels (models/attention_triton.py) take. cuDNN's backward pass adds dq up in
                    memory in the order in which its parts finish. So in a deterministic run whole rows take cuDNN's
                    forward pass and the kernels' backward pass, and masked documents, which PyTorch's interface to
                    cuDNN does not know, both passes of the kernels, deterministic or not.

Shapes: t = b s tokens, b batch, s sequence, g KV heads of this rank, r query heads per KV head, h = g r query heads,
d head dimension, n documents.
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
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.mixer import Mixer, check_multiple, group_major_order, input_projection, output_projection
from models.positions import Documents, NewTokens, apply_rope, rope_tables

# What FlashAttention-2 takes: a head dimension that is a multiple of the first number (others are padded), and at most
# the second.
FLASH_HEAD_MULTIPLE, FLASH_HEAD_LIMIT = 8, 256
# cuDNN's backward pass is not among them.
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Kernels(NamedTuple):
    """Of each of the Triton kernels: queries and keys of one tile, warps and stages of a program. In `dkdv`, keys are a
    multiple of queries."""

    forward: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]


# What the Triton kernels take: one of these head dimensions, and as much memory for a program as Hopper's and
# Blackwell's data-center GPUs have. No timing decides between tiles, which decide the order of sums. Those for 128 are
# measured on an H200, the others follow FlexAttention's.
_SMALL = Kernels((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3))
KERNELS = {
    16: _SMALL,
    32: _SMALL,
    64: Kernels((128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
    128: Kernels((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
    256: Kernels((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
}
_SHARED_MEMORY_KIB = 227


def attend(
    q_bshd: Tensor,
    k_bsgd: Tensor,
    v_bsgd: Tensor,
    documents: Documents | None = None,
    order: tuple[SDPBackend, ...] = (),
) -> Tensor:
    """Causal attention [b, s, heads, d]; query heads share KV heads in order.

    order: PyTorch's kernels to try in turn; none: its choice. In a deterministic run on a GPU the deterministic ones.
    """
    deterministic = q_bshd.is_cuda and torch.are_deterministic_algorithms_enabled()
    order = _DETERMINISTIC if deterministic else order
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    grouped, mask = q.shape[1] > k.shape[1], None if documents is None else documents.mask
    if mask is not None and q.is_cuda and grouped:  # kernels that take a mask know no groups there
        k, v, grouped = *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)), False
    with sdpa_kernel(list(order), set_priority=True) if order else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    if deterministic:
        _make_deterministic(y)
    return y.transpose(1, 2)


def attend_fused(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` by cuDNN's kernel where it can; within documents by PyTorch's FlashAttention-2 (CUDA, BF16 or FP16)."""
    (batch, length, _, dim), extra = q_bshd.shape, -q_bshd.shape[-1] % FLASH_HEAD_MULTIPLE
    if documents is None or dim > FLASH_HEAD_LIMIT:
        return attend(q_bshd, k_bsgd, v_bsgd, documents, (SDPBackend.CUDNN_ATTENTION, *_DETERMINISTIC))
    q, k, v = ((F.pad(t, (0, extra)) if extra else t).flatten(0, 1) for t in (q_bshd, k_bsgd, v_bsgd))
    # What torch.nn.attention.varlen calls, whose own arguments change from version to version.
    flash, bounds = torch.ops.aten._flash_attention_forward, documents.boundaries
    y = flash(q, k, v, bounds, bounds, length, length, 0.0, True, False, scale=dim**-0.5)[0]
    _make_deterministic(y)
    return y[..., :dim].unflatten(0, (batch, length))


def _make_deterministic(y: Tensor) -> None:
    """Under `warn_only`, attention's backward passes warn and stay as they were; make that of `y` deterministic."""
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    node = y.grad_fn if warns else None
    for _ in range(3):  # some kernels' results are sliced
        if node is None:
            return
        if "ScaledDotProduct" in node.name() or "FlashAttention" in node.name():
            node.register_prehook(lambda _: torch.use_deterministic_algorithms(True, warn_only=False))
            node.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
            return
        node = node.next_functions[0][0] if node.next_functions else None


def attend_to_cache(q_bshd: Tensor, k_blgd: Tensor, v_blgd: Tensor, positions_bs: Tensor) -> Tensor:
    """Attention [b, s, heads, d] of a text's new tokens to all of its tokens: each to those up to its own position.

    k, v: of l tokens from the text's beginning, whatever comes after its end. positions_bs: int64, of the queries.
    """
    length, groups = q_bshd.shape[1], k_blgd.shape[2]
    # The query heads of a KV head as if they were queries: keys and values, which are long, need not be repeated.
    q_bgrsd = q_bshd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    seen_bsl = torch.arange(k_blgd.shape[1], device=positions_bs.device) <= positions_bs[..., None]
    mask = seen_bsl[:, None, None].expand(-1, 1, q_bgrsd.shape[2], -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(
        q_bgrsd.flatten(2, 3), k_blgd.transpose(1, 2), v_blgd.transpose(1, 2), attn_mask=mask
    )
    return y.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def tiles_refusal(model: ModelConfig, tensor_parallel: int) -> str | None:
    """Why the Triton kernels do not take a model here, or None. Without a GPU only the model counts."""
    if model.head_dim not in KERNELS:
        return f"needs model.head_dim to be one of {', '.join(map(str, KERNELS))}, and it is {model.head_dim}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        if gpu.shared_memory_per_block_optin < _SHARED_MEMORY_KIB * 1024:
            return f"needs {_SHARED_MEMORY_KIB} KiB of shared memory, and a {gpu.name} has less"
    return None


def attend_in_tiles(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` in BF16 on CUDA; deterministic within documents, and where that is asked for."""
    if documents is None and not torch.are_deterministic_algorithms_enabled():
        return attend_fused(q_bshd, k_bsgd, v_bsgd)
    bounds = (None, None) if documents is None else (documents.begins, documents.ends)
    return _TiledAttention.apply(q_bshd, k_bsgd, v_bsgd, *bounds)  # type: ignore[return-value]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None, ends: Tensor | None) -> Tensor:
        from models import attention_triton

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if begins is None and _cudnn_takes(q, k, v):
            # What scaled_dot_product_attention calls, which keeps the second result for itself.
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            y, sums, *_ = cudnn(*(t.transpose(1, 2) for t in (q, k, v)), None, True, is_causal=True)
            y, sums = y.transpose(1, 2).contiguous(), sums.reshape(sums.shape[:3])
        else:
            y, sums = attention_triton.forward(q, k, v, KERNELS[q.shape[-1]].forward, begins)
        ctx.save_for_backward(q, k, v, y, sums, begins, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from models import attention_triton

        q, k, v, y, sums, begins, ends = ctx.saved_tensors
        _, of_dq, of_keys = KERNELS[q.shape[-1]]
        dy = grad_outputs[0].contiguous()
        gradients = attention_triton.backward(dy, q, k, v, y, sums, of_dq, of_keys, begins, ends)
        return *gradients, None, None


def _cudnn_takes(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> bool:
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] > k.shape[1])
    # (Under deterministic algorithms too, as long as they only warn; its forward pass adds nothing up in memory.)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


class KeysAndValues:
    """Attention's part of an inference cache: both [batch, max_length + 1, KV heads / tp, head_dim]; padding goes to
    the last place, which is not read. Keys have RoPE's rotation in them."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    def add(self, k_bsgd: Tensor, v_bsgd: Tensor, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Keep those of new tokens; returns those of all, [batch, new.end, KV heads / tp, head_dim] each."""
        place = new.positions.where(new.valid, self.keys.shape[1] - 1)
        row = torch.arange(len(place), device=place.device)[:, None]
        self.keys[row, place], self.values[row, place] = k_bsgd, v_bsgd
        return self.keys[:, : new.end], self.values[:, : new.end]


class Attention(Mixer):
    """Query head i attends through KV head i // (query heads / KV heads).

    `qkv_proj` packs `[q heads of the group | k | v]` for each KV head (`qkv_order`).
    """

    name = "attention"
    fused = (FusedKernel("attention", "attention in tiles", "triton", attend_in_tiles, tiles_refusal, optional=True),)

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.heads_per_group, self.head_dim = config.num_query_heads // config.num_kv_heads, config.head_dim
        self.num_local_groups = config.num_kv_heads // mesh.tp_size
        self.rope_base = config.rope_base if config.rope else None
        self._split = execution.recomputed(execution.pure(split_heads))
        self._attend = execution.kernel("attention", attend_fused if execution.compiled else attend)
        qkv, out = self.linears(config)
        self.qkv_proj = ColumnParallelLinear(qkv.in_features, qkv.out_features, mesh, num_groups=qkv.groups)
        self.out_proj = RowParallelLinear(out.in_features, out.out_features, mesh)

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        qkv_td = self.qkv_proj(x_td)
        tables: tuple[Tensor, ...] = ()
        if self.rope_base is not None and documents is not None:
            tables = documents.rope_tables(self.head_dim, self.rope_base)
        elif self.rope_base is not None:
            tables = rope_tables(sequence_length, self.head_dim, self.rope_base, qkv_td.device)
        q, k, v = self._split(qkv_td, sequence_length, self.heads_per_group, self.head_dim, *tables)
        return self.out_proj(self._attend(q, k, v, documents).flatten(2).flatten(0, 1))

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> KeysAndValues:
        return KeysAndValues((batch, max_length + 1, self.num_local_groups, self.head_dim), device, dtype)

    def decode(self, x_td: Tensor, cache: KeysAndValues, new: NewTokens) -> Tensor:
        tables = () if self.rope_base is None else new.rope_tables(self.head_dim, self.rope_base)
        q, k, v = split_heads(self.qkv_proj(x_td), new.length, self.heads_per_group, self.head_dim, *tables)
        y = attend_to_cache(q, *cache.add(k, v, new), new.positions)
        return self.out_proj(y.flatten(2).flatten(0, 1))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        check_multiple(config, "num_query_heads", "num_kv_heads")
        if config.rope and config.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={config.head_dim} is odd, and model.rope rotates pairs; use "
                f"{config.head_dim + 1}, or model.rope=false"
            )

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        return {f"model.{name}": (getattr(config, name),) * 2 for name in ("num_query_heads", "num_kv_heads")}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        key, title = "model.num_query_heads x model.head_dim", "the attention's output projection"
        return (
            input_projection("qkv_proj", config, q_dim + 2 * kv_dim, config.num_kv_heads),
            output_projection("out_proj", config, q_dim, key, title),
        )

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """The causal half of two products with [S, S] matrices of scores, also where documents are masked."""
        return 2 * sequence_length * config.num_query_heads * config.head_dim

    @classmethod
    def describe_kernels(cls, execution: Execution, masked: bool) -> list[str]:
        tiled = "attention" in execution.kernels
        if masked:
            kernel = "Flash of variable length" if execution.compiled else "PyTorch's SDPA with a mask"
            return [f"attention within documents: {'Triton' if tiled else kernel}"]
        kernel = "SDPA by cuDNN, or else Flash" if execution.compiled else "PyTorch's SDPA"
        if torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available():
            kernel = "cuDNN forward, Triton backward (deterministic)" if tiled else "SDPA by Flash (deterministic)"
        return [f"attention: {kernel}"]


def split_heads(
    qkv_td: Tensor, sequence_length: int, heads_per_group: int, head_dim: int, *cos_and_sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b, s, r g, d], k and v [b, s, g, d], contiguous, out of packed projections; with tables, q and k rotated."""
    qkv = qkv_td.unflatten(0, (-1, sequence_length)).unflatten(-1, (-1, (heads_per_group + 2) * head_dim))
    q, k, v = qkv.split([heads_per_group * head_dim, head_dim, head_dim], -1)
    q = q.unflatten(-1, (heads_per_group, head_dim)).flatten(2, 3)
    if cos_and_sin:
        q, k = apply_rope(q, *cos_and_sin), apply_rope(k, *cos_and_sin)
    return q, k.contiguous(), v.contiguous()


def qkv_order(config: ModelConfig) -> Tensor:
    """Of `qkv_proj`, see `group_major_order`: published `[q | k | v]`, groups are KV heads."""
    kv_rows = config.num_kv_heads * config.head_dim
    return group_major_order((config.num_query_heads * config.head_dim, kv_rows, kv_rows), config.num_kv_heads)
