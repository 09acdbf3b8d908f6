"""An operand that a backend made of a run's own tensor, against the reference quantizer.

The emulation's draws are functions of keys, so its operands must be the reference's bit for bit, stochastic ones
included. Transformer Engine's are too where they are rounded to nearest without a transform. Its draws are its own:
there every code must be one of its value's two neighbours. And behind a Hadamard transform two correct sums of a run's
values may round to neighbouring BF16 numbers (the self-test's samples avoid that): there amax may be off by one such
step, a block scale by one E4M3 step, and codes must follow from values within one step, under the operand's own scales.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand, OperandRequest
from megatron_fp4.precision.comparison import (
    difference,
    expected_parts,
    further,
    parts_by_rows,
    parts_fault,
    row_chunks,
)
from megatron_fp4.precision.emulated import shared_amax, transform_signs
from megatron_fp4.precision.reference import quantized
from megatron_fp4.quantization.elements import E2M1_MAX, E2M1_VALUES, FP32_MAX, e2m1_values, unpack_codes
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.tensor import NVFP4Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# One step of BF16 where it is widest, relative; and what FP32 sums of 16 may be off near zero, in units of the E2M1
# grid, whose largest value is that of the tile.
_BF16_STEP, _NEAR_ZERO = 2.0**-7, 2.0**-14


def operand_fault(made: BackendOperand, rows: Tensor, request: OperandRequest, group: ProcessGroup | None) -> str:
    """What of the operand `made` differs from the reference, or an empty string.

    rows: [n, k], what it was made of, before the transform. group: ranks that share the tensor's maximum; then a
    collective of theirs (nvfp4).
    """
    operand = request.operand
    signs = None
    if request.rht:
        signs = transform_signs(request.rht, request.signs, request.signs_key, rows.device)

    def source(chunk: slice) -> Tensor:
        part = rows[chunk]
        return part if signs is None else random_hadamard_transform(part.to(torch.bfloat16), request.rht, signs)

    amax = functools.reduce(torch.maximum, (source(chunk).abs().amax() for chunk in row_chunks(rows))).to(torch.float32)
    amax = shared_amax(amax, group) if format_of(operand.format).tensor_scale else amax
    if not amax.isfinite():
        return "" if _poisoned(made) else "is finite although it was made of NaN or inf"
    if made.decoded is not None and (request.key is not None or request.rht):
        decoded = made.decoded()
        assert isinstance(decoded, NVFP4Tensor)
        faults = (_native_fault(decoded, chunk, source(chunk), request, amax) for chunk in row_chunks(rows))
        return next(filter(None, faults), "")

    def expected(chunk: slice) -> dict[str, Tensor]:
        return expected_parts(quantized(source(chunk), operand, further(request.key, chunk.start), amax), made)

    return parts_fault(rows, parts_by_rows(made), expected)


def _poisoned(made: BackendOperand) -> bool:
    return any(part is not None and not bool(part.isfinite().all()) for part in (made.scale, made.unpacked()))


def _native_fault(decoded: NVFP4Tensor, chunk: slice, source: Tensor, request: OperandRequest, amax: Tensor) -> str:
    """Codes with Transformer Engine's draws or behind its transform, which exist in NVFP4 alone."""
    step = _BF16_STEP if request.rht else 0.0
    if not (decoded.amax - amax).abs() <= step * amax:
        return f"amax is {decoded.amax.item():g} instead of {amax.item():g}"
    right = quantized(source, request.operand, None, decoded.amax)
    scales = decoded.scales[chunk]
    assert isinstance(right, NVFP4Tensor)
    apart = (scales.view(torch.uint8).to(torch.int16) - right.scales.view(torch.uint8).to(torch.int16)).abs()
    if (apart > (1 if request.rht else 0)).any():
        return f"scales {difference(scales, right.scales, chunk.start)}"

    scales = scales.to(torch.float32)
    codes = e2m1_values(unpack_codes(decoded.codes[chunk]))
    encode = (scales * encode_tensor_scale(decoded.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    positions = (source.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)
    slack = positions.abs() * step + (_NEAR_ZERO if request.rht else 0.0)
    lowest, highest = ((positions + side).clamp(-E2M1_MAX, E2M1_MAX) for side in (-slack, slack))
    if request.key is None:
        least, most = _nearest(lowest, up=False), _nearest(highest, up=True)
    else:
        least, most = _neighbour(lowest, up=False), _neighbour(highest, up=True)
    # Under a scale of zero the codes do not show.
    strangers = ((codes < least) | (codes > most)) & (scales > 0).repeat_interleave(16, dim=1)
    if not strangers.any():
        return ""
    row, column = strangers.nonzero()[0].tolist()
    return (
        f"codes differ in {int(strangers.sum())} of {strangers.numel()}, first at {[row + chunk.start, column]}: "
        f"{codes[row, column].item():g} for {positions[row, column].item():g}"
    )


def _grid(device: torch.device) -> Tensor:
    return torch.tensor([*(-value for value in E2M1_VALUES[:0:-1]), *E2M1_VALUES], device=device)


def _neighbour(positions: Tensor, up: bool) -> Tensor:
    """The E2M1 value at or above (`up`), or at or below, FP32 |positions| <= 6."""
    grid = _grid(positions.device)
    index = torch.searchsorted(grid, positions.contiguous(), right=not up) - (0 if up else 1)
    return grid[index.clamp(0, grid.numel() - 1)]


def _nearest(positions: Tensor, up: bool) -> Tensor:
    """The nearest E2M1 value of FP32 |positions| <= 6, of two equally near the one above (`up`) or below."""
    grid = _grid(positions.device)
    return grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, positions.contiguous(), right=up)]
