"""An operand of any backend beside the reference: in comparable parts, and where they differ.

A zero's sign is free: no product sees it, the emulation does not keep it, and hardware that rounds to E2M1 keeps the
sign of a number that becomes zero (code 8), of an exact -0.0 perhaps as well, where the reference has code 0. Only
where a backend promises our own bytes (`bytes_fault`) is it not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.fp8 import quantize_fp8
from megatron_fp4.quantization.mxfp4 import quantize_mxfp4
from megatron_fp4.quantization.mxfp8 import quantize_mxfp8
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import FP8Tensor, MXFP4Tensor, MXFP8Tensor, NVFP4Tensor

# Elements that are compared at once, in whole blocks of every format: bounds the memory of the reference.
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**22, 128

if TYPE_CHECKING:
    from megatron_fp4.precision.backend import OperandRequest
    from megatron_fp4.precision.torch_scaled_mm import PackedOperand

Quantized = NVFP4Tensor | MXFP4Tensor | MXFP8Tensor | FP8Tensor


def reference(rows: Tensor, operand: Operand, amax: Tensor, key: RoundingKey | None = None) -> Quantized:
    """`rows` [n, k] by the reference quantizer. amax: of the whole tensor. key: of the draws; None: to nearest."""
    rounding = "nearest" if key is None else "stochastic"
    if operand.format == "nvfp4":
        return quantize_nvfp4(rows, operand.block, rounding, key=key, amax=amax, four_over_six=operand.four_over_six)
    if operand.format == "mxfp4":
        return quantize_mxfp4(rows, operand.block, rounding, key=key)
    if operand.format == "mxfp8":
        return quantize_mxfp8(rows, operand.block)
    return quantize_fp8(rows, operand.block, rounding, key=key, power_of_two_scales=operand.power_of_two_scales)


def actual_parts(made: object, rows: slice) -> dict[str, Tensor]:
    """An operand in comparable parts: codes and scales of native operands, values of emulated ones."""
    return parts_by_rows(made)(rows)


def parts_by_rows(made: object) -> Callable[[slice], dict[str, Tensor]]:
    """`actual_parts` of an operand that is decoded once, as a function of the rows."""
    if isinstance(made, te.NativeOperand):
        decoded = made.decoded()
        return lambda rows: _code_parts(decoded, rows)
    values, scale = made.unpacked(), made.scale  # type: ignore[attr-defined]
    whole = {} if scale is None else {"tensor scale": scale}
    return lambda rows: {"values": values[rows].to(torch.float32) + 0.0} | whole


def _code_parts(quantized: Quantized, rows: slice) -> dict[str, Tensor]:
    parts = {"codes": quantized.codes[rows], "scales": quantized.scales[rows]}
    if isinstance(quantized, NVFP4Tensor):
        parts |= {"codes": unsigned_zeros(parts["codes"]), "amax": quantized.amax}
    return parts


def unsigned_zeros(codes: Tensor) -> Tensor:
    """Packed E2M1 codes (uint8, two a byte) with code 8, the negative zero, as code 0."""
    low = torch.where((codes & 0x0F) == 0x08, codes & 0xF0, codes)
    return torch.where((low & 0xF0) == 0x80, low & 0x0F, low)


def expected_parts(quantized: Quantized, made: object) -> dict[str, Tensor]:
    """The reference in the parts that `actual_parts` has of `made`."""
    if isinstance(made, te.NativeOperand):
        return _code_parts(quantized, slice(None))
    if isinstance(quantized, NVFP4Tensor):
        return {"values": quantized.block_values() + 0.0, "tensor scale": quantized.decode_scale()}
    return {"values": quantized.dequantize() + 0.0}


def bytes_fault(made: PackedOperand, rows: Tensor, request: OperandRequest) -> str:
    """What of an operand differs from the reference of `rows` [n, k] (after the transform), draws included."""
    amax = rows.abs().amax().to(torch.float32)
    codes, scales = made.plain()

    def expected(chunk: slice) -> dict[str, Tensor]:
        right = reference(rows[chunk], request.operand, amax, further(request.key, chunk.start))
        parts = {"codes": right.codes, "scales": right.scales.view(scales.dtype)}
        return parts | ({"tensor scale": right.decode_scale()} if isinstance(right, NVFP4Tensor) else {})

    def actual(chunk: slice) -> dict[str, Tensor]:
        parts = {"codes": codes[chunk], "scales": scales[chunk]}
        return parts | ({} if made.scale is None else {"tensor scale": made.scale})

    return parts_fault(rows, actual, expected)


def further(key: RoundingKey | None, rows: int) -> RoundingKey | None:
    """The draws of a tensor from its row `rows` on."""
    return None if key is None else replace(key, row_offset=key.row_offset + rows)


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """The rows of a matrix, some at a time: whole blocks of every format."""
    size = max(_CHUNK_ROWS, _CHUNK_ELEMENTS // rows.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    return (slice(start, start + size) for start in range(0, rows.shape[0], size))


def parts_fault(
    rows: Tensor,
    actual: Callable[[slice], Mapping[str, Tensor]],
    expected: Callable[[slice], Mapping[str, Tensor]],
) -> str:
    """The first part in which an operand of `rows` [n, k] is not the reference, and where; empty if there is none.

    actual, expected: parts of the given rows; those that are expected are compared.
    """
    for chunk in row_chunks(rows):
        found = actual(chunk)
        for part, right in expected(chunk).items():
            if fault := difference(found[part], right, chunk.start):
                return f"{part} {fault}"
    return ""


def difference(actual: Tensor, expected: Tensor, first_row: int = 0) -> str:
    """Where two tensors differ in any bit, in words; empty if nowhere."""
    if actual.shape != expected.shape:
        return f"have shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    unequal = _bits(actual) != _bits(expected)
    if not unequal.any():
        return ""
    at = unequal.nonzero()[0].tolist()
    found, right = actual[tuple(at)].to(torch.float32).item(), expected[tuple(at)].to(torch.float32).item()
    where = [at[0] + first_row, *at[1:]] if at else "the tensor"
    return f"differ in {int(unequal.sum())} of {unequal.numel()}, first at {where}: {found:g} instead of {right:g}"


def _bits(t: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return t.contiguous().view(sizes[t.element_size()])


def operand_values(made: object) -> Tensor:
    """[rows, k]: what an operand stands for, without the tensor scale."""
    if isinstance(made, te.NativeOperand):
        decoded = made.decoded()
        return decoded.block_values() if isinstance(decoded, NVFP4Tensor) else decoded.dequantize()
    return made.unpacked()  # type: ignore[attr-defined]


def operand_scale(made: object) -> Tensor | float:
    """FP64 0-dim: the tensor scale of an operand."""
    if isinstance(made, te.NativeOperand):
        decoded = made.decoded()
        return decoded.decode_scale().to(torch.float64) if isinstance(decoded, NVFP4Tensor) else 1.0
    scale = made.scale  # type: ignore[attr-defined]
    return 1.0 if scale is None else scale.to(torch.float64)
