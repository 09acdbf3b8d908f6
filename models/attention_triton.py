"""Causal attention in Triton: a forward pass, and a backward pass that always sums in the same order.

In the usual backward pass a program has a tile of keys and adds its part of dq to memory, in the order in which the
programs run. Here each part of a gradient has one program: one kernel computes dq of a tile of queries, another dk and
dv of a tile of keys (for all query heads that share them). No program adds to memory, so two runs have the same bits.
The price is that scores are computed twice: 7 matrix products instead of 5. The arithmetic is that of FlashAttention-2
(arXiv:2307.08691): products of BF16 with FP32 sums; of each row of scores only the log of its sum is saved.

Documents follow one another in a row. So the keys of a query are a range, from the beginning of its document to itself,
and so are the queries of a key, from itself to the end of its document. The range of a tile has three parts; the middle
part needs no mask, with or without documents.

Shapes: b batch, s sequence, h query heads, g KV heads, d head dimension. All tensors are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Tiles = tuple[int, int, int, int]
"""Queries and keys of a tile, warps and stages of a program (`TILES` in models/attention.py)."""


def forward(
    q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, tiles: Tiles, begins_bs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention y [b, s, h, d] in the dtype of q, and log sum_k exp(score_qk) of every query, FP32 [b, h, s].

    begins_bs: int32, the first token of each token's document; None: a row is one document.
    """
    batch, length, heads, _ = q_bshd.shape
    y, log_sums = torch.empty_like(q_bshd), q_bshd.new_empty(batch, heads, length, dtype=torch.float32)
    with _on(q_bshd):
        _attention_forward_kernel[(triton.cdiv(length, tiles[0]), batch * heads)](
            q_bshd, k_bsgd, v_bsgd, y, log_sums, begins_bs, length, **_settings(q_bshd, k_bsgd, begins_bs, tiles)
        )
    return y, log_sums


def backward(
    dy_bshd: Tensor,
    q_bshd: Tensor,
    k_bsgd: Tensor,
    v_bsgd: Tensor,
    y_bshd: Tensor,
    log_sums_bhs: Tensor,
    dq_tiles: Tiles,
    dkdv_tiles: Tiles,
    begins_bs: Tensor | None = None,
    ends_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. y and log_sums: from `forward` or from another kernel for the same attention.

    begins_bs, ends_bs: int32, the first token of each token's document, and the token after its last one.
    """
    batch, length, heads, _ = q_bshd.shape
    dq, dk, dv = torch.empty_like(q_bshd), torch.empty_like(k_bsgd), torch.empty_like(v_bsgd)
    # sum_d y dy of every query (D in FlashAttention-2); the first kernel computes it, the second reads it.
    delta = torch.empty_like(log_sums_bhs)
    with _on(q_bshd):
        _attention_dq_kernel[(triton.cdiv(length, dq_tiles[0]), batch * heads)](
            q_bshd, k_bsgd, v_bsgd, y_bshd, dy_bshd, log_sums_bhs, delta, dq, begins_bs, length,
            **_settings(q_bshd, k_bsgd, begins_bs, dq_tiles),
        )  # fmt: skip
        _attention_dkdv_kernel[(triton.cdiv(length, dkdv_tiles[1]), batch * k_bsgd.shape[2])](
            q_bshd, k_bsgd, v_bsgd, dy_bshd, log_sums_bhs, delta, dk, dv, begins_bs, ends_bs, length,
            **_settings(q_bshd, k_bsgd, begins_bs, dkdv_tiles),
        )  # fmt: skip
    return dq, dk, dv


def _settings(q_bshd: Tensor, k_bsgd: Tensor, begins_bs: Tensor | None, tiles: Tiles) -> dict[str, Any]:
    heads, dim = q_bshd.shape[2:]
    queries, keys, warps, stages = tiles
    return {
        "scale": dim**-0.5,
        "HEADS": heads,
        "GROUPS": k_bsgd.shape[2],
        "DIM": dim,
        "M": queries,
        "N": keys,
        "DOCUMENTS": begins_bs is not None,
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": True,
    }


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)  # -1: no change, for Triton's interpreter


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(start, index, length, STRIDE: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """[rows, DIM] from `start`; with MASKED, zeros for rows from `length` on."""
    pointers = start + index.to(tl.int64)[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    if MASKED:
        return tl.load(pointers, mask=(index < length)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _visible(m, n, begin, DOCUMENTS: tl.constexpr):
    """Whether query m sees key n; the query's document begins at `begin`. All three broadcast."""
    visible = n <= m
    if DOCUMENTS:
        visible = visible & (n >= begin)
    return visible


@triton.jit
def _tile_of_queries(
    begins_ptr, length, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The queries of this program's tile, and where their documents begin; where the first row of q, of k and v, and of
    the statistics begins; and the bounds of the three parts of the keys: in the first part some queries do not see keys
    of earlier documents, in the second all see all keys, in the third they see keys up to themselves."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the last queries see the most keys, so they begin first
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    m = first + tl.arange(0, M)
    begin = m
    diagonal = first // N * N
    start = 0
    all_seen = 0
    if DOCUMENTS:
        begins_ptr += row * length
        begin = tl.load(begins_ptr + tl.minimum(m, length - 1))
        start = tl.load(begins_ptr + first) // N * N
        last = tl.load(begins_ptr + tl.minimum(first + M, length) - 1)
        all_seen = tl.minimum(tl.cdiv(last, N) * N, diagonal)
    q_start = (row * length * HEADS + head) * DIM
    k_start = (row * length * GROUPS + head // (HEADS // GROUPS)) * DIM
    bounds = (start, all_seen, diagonal, tl.minimum(first + M, length))
    return m, begin, q_start, k_start, (row * HEADS + head) * length, bounds


@triton.jit
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, log_sums_ptr, begins_ptr, length, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    tile = _tile_of_queries(begins_ptr, length, HEADS, GROUPS, DIM, M, N, DOCUMENTS)
    m, begin, q_start, k_start, row_start, bounds = tile
    q = _rows(q_ptr + q_start, m, length, HEADS * DIM, DIM, True)
    y = tl.zeros((M, DIM), tl.float32)
    row_max = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for part in tl.static_range(0 if DOCUMENTS else 1, 3):  # the middle part needs no mask
        for first in range(bounds[part], bounds[part + 1], N):
            n = first + tl.arange(0, N)
            k = _rows(k_ptr + k_start, n, length, GROUPS * DIM, DIM, part != 1)
            scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
            if part != 1:
                scores = tl.where(_visible(m[:, None], n[None, :], begin[:, None], DOCUMENTS), scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            if part != 1:  # a query may not have seen a key yet
                base = tl.where(new_max == -float("inf"), 0.0, new_max)
            else:
                base = new_max
            p = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(row_max - base)
            total = total * rescale + tl.sum(p, 1)
            v = _rows(v_ptr + k_start, n, length, GROUPS * DIM, DIM, part != 1)
            y = tl.dot(p.to(v.dtype), v, y * rescale[:, None])
            row_max = new_max
    pointers = y_ptr + q_start + m.to(tl.int64)[:, None] * (HEADS * DIM) + tl.arange(0, DIM)[None, :]
    tl.store(pointers, (y / total[:, None]).to(y_ptr.dtype.element_ty), mask=(m < length)[:, None])
    tl.store(log_sums_ptr + row_start + m, (row_max + tl.log2(total)) * LN_2, mask=m < length)


@triton.jit
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, dy_ptr, log_sums_ptr, delta_ptr, dq_ptr, begins_ptr, length, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    tile = _tile_of_queries(begins_ptr, length, HEADS, GROUPS, DIM, M, N, DOCUMENTS)
    m, begin, q_start, k_start, row_start, bounds = tile
    q = _rows(q_ptr + q_start, m, length, HEADS * DIM, DIM, True)
    dy = _rows(dy_ptr + q_start, m, length, HEADS * DIM, DIM, True)
    y = _rows(y_ptr + q_start, m, length, HEADS * DIM, DIM, True)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(delta_ptr + row_start + m, delta, mask=m < length)
    log_sums = tl.load(log_sums_ptr + row_start + m, mask=m < length, other=0.0) * LOG2_E
    dq = tl.zeros((M, DIM), tl.float32)
    for part in tl.static_range(0 if DOCUMENTS else 1, 3):
        for first in range(bounds[part], bounds[part + 1], N):
            n = first + tl.arange(0, N)
            k = _rows(k_ptr + k_start, n, length, GROUPS * DIM, DIM, part != 1)
            v = _rows(v_ptr + k_start, n, length, GROUPS * DIM, DIM, part != 1)
            p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - log_sums[:, None])
            if part != 1:
                p = tl.where(_visible(m[:, None], n[None, :], begin[:, None], DOCUMENTS), p, 0.0)
            dp = tl.dot(dy, tl.trans(v))
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
    pointers = dq_ptr + q_start + m.to(tl.int64)[:, None] * (HEADS * DIM) + tl.arange(0, DIM)[None, :]
    tl.store(pointers, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(m < length)[:, None])


@triton.jit
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dy_ptr, log_sums_ptr, delta_ptr, dk_ptr, dv_ptr, begins_ptr, ends_ptr, length, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(N % M == 0)
    first = tl.program_id(0) * N  # the first keys have the most queries, so their tiles begin first
    row, group = (tl.program_id(1) // GROUPS).to(tl.int64), tl.program_id(1) % GROUPS
    n = first + tl.arange(0, N)
    k_start = (row * length * GROUPS + group) * DIM
    k = _rows(k_ptr + k_start, n, length, GROUPS * DIM, DIM, True)
    v = _rows(v_ptr + k_start, n, length, GROUPS * DIM, DIM, True)
    # After the tile's own queries come those that see all of its keys, then those that see some of them.
    after = first + N
    all_seen = length
    end = length
    if DOCUMENTS:
        begins_ptr += row * length
        all_seen = tl.load(ends_ptr + row * length + first)
        end = tl.load(ends_ptr + row * length + tl.minimum(after, length) - 1)
    all_seen = tl.maximum(all_seen // M * M, after)
    begins, ends = (first, after, all_seen), (tl.minimum(after, end), all_seen, end)
    dk = tl.zeros((N, DIM), tl.float32)
    dv = tl.zeros((N, DIM), tl.float32)
    for head_in_group in range(HEADS // GROUPS):
        head = group * (HEADS // GROUPS) + head_in_group
        q_start = (row * length * HEADS + head) * DIM
        row_start = (row * HEADS + head) * length
        for part in tl.static_range(3):
            for start in range(begins[part], ends[part], M):
                m = start + tl.arange(0, M)
                q = _rows(q_ptr + q_start, m, length, HEADS * DIM, DIM, part != 1)
                dy = _rows(dy_ptr + q_start, m, length, HEADS * DIM, DIM, part != 1)
                begin = m
                if part != 1:
                    in_row = m < length
                    log_sums = tl.load(log_sums_ptr + row_start + m, mask=in_row, other=0.0) * LOG2_E
                    delta = tl.load(delta_ptr + row_start + m, mask=in_row, other=0.0)
                    if DOCUMENTS:
                        begin = tl.load(begins_ptr + m, mask=in_row, other=0)
                else:
                    log_sums = tl.load(log_sums_ptr + row_start + m) * LOG2_E
                    delta = tl.load(delta_ptr + row_start + m)
                # Transposed, [keys, queries], so that the products for dk and dv need no transposes.
                p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2_E) - log_sums[None, :])
                if part != 1:
                    seen = _visible(m[None, :], n[:, None], begin[None, :], DOCUMENTS) & in_row[None, :]
                    p = tl.where(seen, p, 0.0)
                dv = tl.dot(p.to(dy.dtype), dy, dv)
                dp = tl.dot(v, tl.trans(dy))
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk)
    offsets = k_start + n.to(tl.int64)[:, None] * (GROUPS * DIM) + tl.arange(0, DIM)[None, :]
    tl.store(dk_ptr + offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(n < length)[:, None])
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=(n < length)[:, None])
