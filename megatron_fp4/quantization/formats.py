"""The formats of GEMM operands: one row says everything about one that the rooms above need to know.

A new format is a file like `mxfp8.py` (its arithmetic in PyTorch, the reference), a row here, and a test; kernels are
optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_fp4.quantization.cuda import Fused, Side
from megatron_fp4.quantization.elements import E2M1_MAX, E4M3_MAX
from megatron_fp4.quantization.fp4 import FusedFourOverSix, FusedFP4
from megatron_fp4.quantization.fp8 import FP8_BLOCKS, FusedFP8, encode_fp8
from megatron_fp4.quantization.ms_eden import FusedMSEden, encode_ms_eden
from megatron_fp4.quantization.mxfp4 import MXFP4_BLOCKS, encode_mxfp4
from megatron_fp4.quantization.mxfp8 import MXFP8_BLOCKS, FusedMXFP8, encode_mxfp8
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS, encode_nvfp4
from megatron_fp4.quantization.tensor import Encoded


@dataclass(frozen=True)
class Format:
    """How operands of a format are made.

    encode: FP32 rows [rows, cols], block and key (None: round to nearest) to what they become, with `options` as
        keywords, and `amax` where there is a tensor scale.
    blocks: elements that may share a scale, (rows, columns), the columns along the dot product.
    largest: magnitude of the largest code.
    scales: dtype of a block scale (UE8M0 is stored in uint8).
    fused, special: the kernels on an NVIDIA GPU, where they exist, and others for some operands that those do not make.
        They load Triton when one first starts.
    tensor_scale: whether one FP32 scale lies over the whole tensor. stochastic: whether codes may be rounded so.
    options: an operand's flags that are this format's.
    encode_ms_eden: as `encode`, of rotated rows by MS-EDEN, which has no block and no options; None: it has none.
    """

    encode: Callable[..., Encoded]
    blocks: tuple[tuple[int, int], ...]
    largest: float
    scales: torch.dtype
    fused: type[Fused] | None = None
    tensor_scale: bool = False
    stochastic: bool = True
    options: tuple[str, ...] = ()
    encode_ms_eden: Callable[..., Encoded] | None = None
    special: tuple[type[Fused], ...] = ()

    def kernels(self, side: Side, along: str) -> type[Fused] | None:
        """Those that make an operand along `columns` or `rows`; None: PyTorch does."""
        candidates = self.special if self.fused is None else (self.fused, *self.special)
        return next((kernels for kernels in candidates if kernels.makes(side, along)), None)

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
        FusedFP4,
        tensor_scale=True,
        options=("four_over_six", "four_over_six_error"),
        encode_ms_eden=encode_ms_eden,
        special=(FusedMSEden, FusedFourOverSix),
    ),
    "mxfp4": Format(encode_mxfp4, MXFP4_BLOCKS, E2M1_MAX, UE8M0, FusedFP4),
    "mxfp8": Format(encode_mxfp8, MXFP8_BLOCKS, E4M3_MAX, UE8M0, FusedMXFP8, stochastic=False),
    "fp8": Format(encode_fp8, FP8_BLOCKS, E4M3_MAX, FP32, FusedFP8, options=("power_of_two_scales",)),
}


def format_of(name: str) -> Format:
    """The row of `name`; ValueError for an unknown format."""
    if name not in FORMATS:
        raise ValueError(f"operand format {name!r} is not one of bf16, {', '.join(FORMATS)}")
    return FORMATS[name]
