"""The formats of GEMM operands: one row says everything about one that the rooms above need to know.

A new format is a file like `microscaling.py` (its arithmetic in PyTorch, the reference), a row here, and a test;
kernels are optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Side
from megatron_fp4.quantization.fp4 import FusedFourOverSix, FusedFP4
from megatron_fp4.quantization.fp8 import FP8_BLOCKS, FusedFP8, encode_fp8
from megatron_fp4.quantization.microscaling import MX_BLOCKS, FusedMXFP8, encode_mxfp4, encode_mxfp8
from megatron_fp4.quantization.ms_eden import FusedMSEden, encode_ms_eden
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS, encode_nvfp4
from megatron_fp4.quantization.rounding import E2M1_MAX, E4M3_MAX, RoundingKey
from megatron_fp4.quantization.tensor import Encoded, QuantizedTensor, checked


@dataclass(frozen=True)
class Format:
    """How operands of a format are made.

    encode: FP32 rows [rows, cols], block and key (None: round to nearest) to what they become, with `options` as
        keywords, and `amax` where there is a tensor scale.
    blocks: elements that may share a scale, (rows, columns), the columns along the dot product.
    largest: magnitude of the largest code.
    scales: dtype of a block scale (UE8M0 is stored in uint8).
    fused: the kernels on an NVIDIA GPU, where they exist; the first that make an operand do. They load Triton when one
        first starts.
    tensor_scale: whether one FP32 scale lies over the whole tensor. stochastic: whether codes may be rounded so.
    options: an operand's flags that are this format's.
    encode_ms_eden: as `encode`, of rotated rows by MS-EDEN, which has no block and no options; None: it has none.
    """

    encode: Callable[..., Encoded]
    blocks: tuple[tuple[int, int], ...]
    largest: float
    scales: torch.dtype
    fused: tuple[type[Fused], ...]
    tensor_scale: bool = False
    stochastic: bool = True
    options: tuple[str, ...] = ()
    encode_ms_eden: Callable[..., Encoded] | None = None

    def kernels(self, side: Side, along: str) -> type[Fused] | None:
        """Those that make an operand along `columns` or `rows`; None: PyTorch does."""
        return next((kernels for kernels in self.fused if kernels.makes(side, along)), None)

    @property
    def tile(self) -> int:
        """The longer side of a block."""
        return self.blocks[0][1]


E4M3, UE8M0, FP32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
FORMATS = {
    "nvfp4": Format(
        encode_nvfp4,
        NVFP4_BLOCKS,
        E2M1_MAX,
        E4M3,
        (FusedFP4, FusedMSEden, FusedFourOverSix),
        tensor_scale=True,
        options=("four_over_six", "four_over_six_error"),
        encode_ms_eden=encode_ms_eden,
    ),
    "mxfp4": Format(encode_mxfp4, MX_BLOCKS, E2M1_MAX, UE8M0, (FusedFP4,)),
    "mxfp8": Format(encode_mxfp8, MX_BLOCKS, E4M3_MAX, UE8M0, (FusedMXFP8,), stochastic=False),
    "fp8": Format(encode_fp8, FP8_BLOCKS, E4M3_MAX, FP32, (FusedFP8,), options=("power_of_two_scales",)),
}


def format_of(name: str) -> Format:
    """The row of `name`; ValueError for an unknown format."""
    if name not in FORMATS:
        raise ValueError(f"operand format {name!r} is not one of bf16, {', '.join(FORMATS)}")
    return FORMATS[name]


def quantize(
    x: Tensor,
    name: str,
    block: tuple[int, int] | None = None,
    rounding: str = "nearest",
    *,
    key: RoundingKey | None = None,
    **options: Any,
) -> QuantizedTensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension to the format `name`.

    block: None: that of one row. rounding, key: as in `quantize_nvfp4`. options: the format's.
    Raises TypeError unless `x` is floating point, ValueError for an unknown format, another block or rounding or if the
    block does not tile `x`.
    """
    form = format_of(name)
    block = form.blocks[0] if block is None else block
    rows, key = checked(x, block, form.blocks, rounding, key, name)
    return form.encode(rows, block, key, **options).packed(x.shape[:-1])
