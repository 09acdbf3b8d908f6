"""The table of formats of GEMM operands. A row of `FORMATS` is all that other packages need to know about a format.

A new format needs a file like `microscaling.py` (its arithmetic in PyTorch, the reference), a row here, and a test; or
it is a member of the family in `family.py`, whose rows are made from its parts. Kernels are optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Side
from megatron_fp4.quantization.family import GRIDS, amax_of_scope, members
from megatron_fp4.quantization.fp4 import FusedFourOverSix, FusedFP4
from megatron_fp4.quantization.fp8 import FP8_BLOCKS, FusedFP8, encode_fp8
from megatron_fp4.quantization.microscaling import MX_BLOCKS, FusedMXFP8, encode_mxfp4, encode_mxfp8
from megatron_fp4.quantization.ms_eden import FusedMSEden, encode_ms_eden
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS, encode_nvfp4
from megatron_fp4.quantization.rounding import E2M1_MAX, E4M3_MAX, Place, RoundingKey, fresh_rounding_key
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Format:
    """How operands of a format are made.

    encode: quantizes FP32 rows [rows, cols], given block and key (None: round to nearest); takes `options` as keywords,
        and `amax` if it has a scope.
    blocks: its allowed blocks, (rows, columns) of the elements that share a scale, columns along the dot product. One
        alone: it is no choice, because blocks have no scales.
    largest: magnitude of the largest code.
    scales: dtype of a block scale (UE8M0 is stored in uint8).
    fused: classes of NVIDIA GPU kernels, if there are any; the first that can make an operand makes it. Triton is
        imported when a kernel is first launched.
    bits: of a code. scale_bits: of a block's scale.
    scope: what shares an FP32 scale beside those of blocks: `tensor`, or as in family.py; empty: nothing.
    exact: whether BF16 holds every `code * block scale`. stochastic: whether codes may be rounded stochastically.
    options: flags of an operand that apply to this format only.
    encode_ms_eden: as `encode`, but by MS-EDEN: from rotated rows, always with a key, without block and options;
        None: no MS-EDEN.
    """

    encode: Callable[..., QuantizedTensor]
    blocks: tuple[tuple[int, int], ...]
    largest: float
    scales: torch.dtype
    fused: tuple[type[Fused], ...]
    bits: int = 4
    scale_bits: int = 8
    scope: str = ""
    exact: bool = True
    stochastic: bool = True
    options: tuple[str, ...] = ()
    encode_ms_eden: Callable[..., QuantizedTensor] | None = None

    def kernels(self, side: Side, along: str) -> type[Fused] | None:
        """The kernels that make this operand along `columns` or `rows`; None: PyTorch makes it."""
        return next((kernels for kernels in self.fused if kernels.makes(side, along)), None)

    @property
    def tensor_scale(self) -> bool:
        """Whether the tensor has one FP32 scale."""
        return self.scope == "tensor"

    def amax(self, rows: Tensor) -> Tensor | None:
        """The largest magnitudes of FP32 [rows, cols] that `encode` takes; None: it takes none."""
        return amax_of_scope(rows, self.scope)

    def amax_groups(self, place: Place) -> tuple[ProcessGroup, ...]:
        """The groups of ranks over which `amax` of rows at `place` is reduced."""
        rows, columns = Place(rows=place.rows), Place(columns=place.columns)
        return {"tensor": place, "row": columns, "column": rows}.get(self.scope, Place()).amax_groups

    def multiple(self, block: tuple[int, int]) -> int:
        """What the columns of an operand in blocks of `block` are a multiple of."""
        return 128 if self.scope == "128" else block[1]


E4M3, UE8M0, FP32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
FORMATS = {
    "nvfp4": Format(
        encode_nvfp4,
        NVFP4_BLOCKS,
        E2M1_MAX,
        E4M3,
        (FusedFP4, FusedMSEden, FusedFourOverSix),
        scope="tensor",
        options=("four_over_six",),
        encode_ms_eden=encode_ms_eden,
    ),
    "mxfp4": Format(encode_mxfp4, MX_BLOCKS, E2M1_MAX, UE8M0, (FusedFP4,)),
    "mxfp8": Format(encode_mxfp8, MX_BLOCKS, E4M3_MAX, UE8M0, (FusedMXFP8,), bits=8, stochastic=False),
    "fp8": Format(
        encode_fp8,
        FP8_BLOCKS,
        E4M3_MAX,
        FP32,
        (FusedFP8,),
        bits=8,
        scale_bits=32,
        exact=False,
        stochastic=False,
        options=("power_of_two_scales",),
    ),
}
NAMES = f"{', '.join(FORMATS)} or a member of the family in quantization/family.py, such as e2m1_e5m2 or e4m3_tensor"
FORMATS |= {
    member.name: Format(
        member.encode,
        member.blocks,
        member.largest,
        FP32,
        (),
        bits=1 + sum(GRIDS[member.element][:2]),
        scope=member.scope,
        exact=member.exact == torch.bfloat16,
    )
    for member in members()
}


def format_of(name: str) -> Format:
    """The row of `name`. Raises ValueError for an unknown format."""
    if name not in FORMATS:
        raise ValueError(f"operand format {name!r} is not one of bf16, {NAMES}")
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
    """Quantize `x` ([..., cols], floating point) along its last dimension to the format `name`, with packed codes.

    block: (rows, columns) of the elements that share a scale; None: the format's block of one row.
    rounding: `nearest` (ties to the even code) or `stochastic`: draws are a function of `key` and the element's
        position; without a key, one is drawn from torch's default generator.
    options: those of the format's `encode_...` function.

    Raises TypeError if `x` is not floating point; ValueError for an unknown format, for a block or rounding that the
    format does not have, for a scalar or empty tensor, and if the block does not divide the size of `x`. Non-finite
    input is not checked, because that would stall a GPU; the result is then decoded to non-finite numbers.
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
    for dim, size, divisor in zip(("rows", "columns"), rows.shape, block, strict=True):
        if size % divisor:
            raise ValueError(
                f"{name}: {size} {dim} (shape {tuple(x.shape)}) are not a multiple of the block's {divisor}; "
                f"pad to {-(-size // divisor) * divisor} with zeros"
            )
    if rounding == "nearest":
        key = None
    elif key is None:
        key = fresh_rounding_key()
    quantized = form.encode(rows.to(torch.float32), block, key, **options).reshaped(x.shape[:-1])
    return replace(quantized, elements=quantized.codes, negative=None)  # 4-bit codes take an eighth of the FP32 values


def quantize_nvfp4(
    x: Tensor, block: tuple[int, int] = (1, 16), rounding: str = "nearest", **options: Any
) -> NVFP4Tensor:
    """`quantize` to NVFP4.

    options: `key`, as in `quantize`; `amax` and `four_over_six`, as in `encode_nvfp4`. `amax` is of the whole tensor.
    """
    return cast(NVFP4Tensor, quantize(x, "nvfp4", block, rounding, **options))
