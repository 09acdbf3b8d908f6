"""The formats of GEMM operands: a row of `FORMATS` is all that other packages need to know of one.

A new format is a file like `microscaling.py` (its arithmetic in PyTorch, the reference), a row here, and a test;
kernels are optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Side
from megatron_fp4.quantization.fp4 import FusedFourOverSix, FusedFP4
from megatron_fp4.quantization.fp8 import FP8_BLOCKS, FusedFP8, encode_fp8
from megatron_fp4.quantization.microscaling import MX_BLOCKS, FusedMXFP8, encode_mxfp4, encode_mxfp8
from megatron_fp4.quantization.ms_eden import FusedMSEden, encode_ms_eden
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS, encode_nvfp4
from megatron_fp4.quantization.rounding import E2M1_MAX, E4M3_MAX, RoundingKey, fresh_rounding_key
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor


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

    encode: Callable[..., QuantizedTensor]
    blocks: tuple[tuple[int, int], ...]
    largest: float
    scales: torch.dtype
    fused: tuple[type[Fused], ...]
    tensor_scale: bool = False
    stochastic: bool = True
    options: tuple[str, ...] = ()
    encode_ms_eden: Callable[..., QuantizedTensor] | None = None

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
        options=("four_over_six",),
        encode_ms_eden=encode_ms_eden,
    ),
    "mxfp4": Format(encode_mxfp4, MX_BLOCKS, E2M1_MAX, UE8M0, (FusedFP4,)),
    "mxfp8": Format(encode_mxfp8, MX_BLOCKS, E4M3_MAX, UE8M0, (FusedMXFP8,), stochastic=False),
    "fp8": Format(
        encode_fp8, FP8_BLOCKS, E4M3_MAX, FP32, (FusedFP8,), stochastic=False, options=("power_of_two_scales",)
    ),
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
    """Quantize `x` ([..., cols], floating point) along its last dimension to the format `name`, its codes packed.

    block: elements that share a scale, (rows, columns); None: that of one row.
    rounding: `nearest` (ties to the even code) or `stochastic`, whose draws come from `key` and the element's
        position; without a key, one is drawn from torch's default generator.
    options: the format's, as its `encode_...` has them.

    Raises TypeError unless `x` is floating point, ValueError for an unknown format, another block or rounding or if the
    block does not tile `x`. Non-finite input does not raise (that would stall a GPU): it poisons what it is decoded to.
    """
    form = format_of(name)
    block = form.blocks[0] if block is None else block
    if block not in form.blocks:
        raise ValueError(f"{name}: block {block} is not one of {form.blocks}")
    roundings = ("nearest", "stochastic") if form.stochastic else ("nearest",)
    if rounding not in roundings:
        raise ValueError(f"{name}: rounding {rounding!r} is not {' or '.join(map(repr, roundings))}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: a floating-point tensor is needed, got {x.dtype}")
    if x.dim() < 1 or x.numel() == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} is a scalar or has no elements; skip empty tensors")
    rows = x.reshape(-1, x.shape[-1])
    for what, size, divisor in zip(("rows", "columns"), rows.shape, block, strict=True):
        if size % divisor:
            raise ValueError(
                f"{name}: {size} {what} (shape {tuple(x.shape)}) are not a multiple of the block's {divisor}; "
                f"pad to {-(-size // divisor) * divisor} with zeros"
            )
    if rounding == "nearest":
        key = None
    elif key is None:
        key = fresh_rounding_key()
    made = form.encode(rows.to(torch.float32), block, key, **options).reshaped(x.shape[:-1])
    return replace(made, elements=made.codes, negative=None)  # packed, an eighth of the FP32 values


def quantize_nvfp4(
    x: Tensor, block: tuple[int, int] = (1, 16), rounding: str = "nearest", **options: Any
) -> NVFP4Tensor:
    """`quantize` to NVFP4.

    options: `key`; `amax`, FP32 0-dim largest magnitude to scale by, where it is that of a larger tensor of which `x`
    is a shard; `four_over_six`, as `encode_nvfp4` has it.
    """
    return cast(NVFP4Tensor, quantize(x, "nvfp4", block, rounding, **options))
