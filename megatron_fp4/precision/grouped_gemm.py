"""Launches the grouped GEMMs of `quantization/kernels/grouped_gemm.py`. On a CPU `emulated.py` multiplies each segment.

`torch.nn.functional.grouped_mm` does not serve: its output has the operands' dtype, and a tensor scale that is applied
after a rounding to BF16 changes a quarter of the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Kernel, launch
from megatron_fp4.quantization.segments import TILE_ROWS, Segments

# Tiles (rows, columns, dot product) and options of an H200. One program fills its shared memory; of the weights' three
# programs, whose sums are short, one multiplies while another adds its tile to the gradient. With several segments for
# an expert a program holds two sums, for which the registers of 4 warps do not suffice.
_ROWS_TILE, _ROWS = (TILE_ROWS, 256, 64), Kernel("grouped_gemm.rows_kernel", num_warps=8, num_stages=4)
_ONE_SEGMENT = (128, 128, 32), Kernel("grouped_gemm.weights_kernel", num_warps=4, num_stages=4)
_SEVERAL_SEGMENTS = (128, 128, 64), Kernel("grouped_gemm.weights_kernel", num_warps=8, num_stages=5)


def multiply_rows(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    segments: Segments,
    out_dtype: torch.dtype,
    *,
    per_expert: tuple[int, int],
) -> Tensor:
    """scale_a scale_b (a b^T) of each segment with its expert's b: [rows, n] in `out_dtype`.

    a: BF16 [padded rows, k], contiguous. b: BF16 of all experts. per_expert: (n, k) of an expert; b is [experts * n, k]
    or [n, experts * k]. scale_a: FP32 [segments]; scale_b: FP32 [experts]; None: 1.
    """
    (n, k), (_, block_n, block_k) = per_expert, _ROWS_TILE
    a, in_rows = a.contiguous(), b.shape[1] == k
    segment, tile_starts = segments.tiles
    out = torch.empty(segments.rows, n, dtype=out_dtype, device=a.device)
    strides = k, (n * b.stride(0) if in_rows else k * b.stride(1)), *b.stride()
    sizes = segments.rows, len(segments.counts), len(segment), n, k, *strides
    tensors = segment, segments.starts, segments.padded_starts, tile_starts
    launch(
        _ROWS,
        (len(segment) * -(-n // block_n),),
        (a, b, out, a if scale_a is None else scale_a, a if scale_b is None else scale_b, *tensors, *sizes),
        {
            **_constants(_ROWS_TILE, segments, scale_a, scale_b),
            "EVEN_N": n % block_n == 0,
            "EVEN_K": k % block_k == 0,
        },
    )
    return out


def multiply_weights(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, segments: Segments, total: Tensor | None
) -> Tensor:
    """The sum of scale_a scale_b (a b^T) over the segments of each expert: FP32 [experts, m, n], added to `total`.

    a: BF16 [m, padded rows]; b: BF16 [n, padded rows]; as views of contiguous [padded rows, m], [padded rows, n].
    scale_a, scale_b: FP32 [segments]; None: 1.
    """
    tile, kernel = _ONE_SEGMENT if segments.sources == 1 else _SEVERAL_SEGMENTS
    a, b, (block_m, block_n, _) = a.t().contiguous(), b.t().contiguous(), tile
    m, n, num_experts = a.shape[1], b.shape[1], segments.num_experts
    out = torch.empty(num_experts, m, n, device=a.device) if total is None else total
    scales = a if scale_a is None else scale_a, a if scale_b is None else scale_b
    launch(
        kernel,
        (num_experts * -(-m // block_m) * -(-n // block_n),),
        (a, b, out, *scales, segments.padded_starts, m, n, m, n),
        {**_constants(tile, segments, scale_a, scale_b), "ADD": total is not None},
    )
    return out


def _constants(
    tile: tuple[int, int, int], segments: Segments, scale_a: Tensor | None, scale_b: Tensor | None
) -> dict[str, int]:
    block = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return {"SOURCES": segments.sources, "SCALE_A": scale_a is not None, "SCALE_B": scale_b is not None, **block}
