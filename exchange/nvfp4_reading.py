"""NVFP4 tensors of a folder decoded by the format's definition, apart from what writes them.

E2M1 (OCP MX 1.0, section 5.3.3): codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign; two codes a byte, the
low nibble first. E4M3 (OCP FP8): exponent bias 7, no infinity, NaN where exponent and mantissa are all ones. A value is
code * scale of its 16 * tensor scale.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """FP32 `code * block scale` [out, in], which is exact. codes: uint8 [out, in / 2]. scales: E4M3 [out, in / 16].

    Raises ValueError for other types, or shapes that do not belong together.
    """
    if codes.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are {codes.dtype} and scales {scales.dtype}, not uint8 and float8_e4m3fn")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if tuple(scales.shape) != (rows, columns // 16) or columns % 16:
        raise ValueError(f"scales are {list(scales.shape)} for {rows} x {columns} codes")
    pairs, block = _tables()
    values = pairs[codes.long()].view(rows, columns // 16, 16)
    return (values * block[scales.view(torch.uint8).long()][..., None]).view(rows, columns)


@functools.cache
def _tables() -> tuple[Tensor, Tensor]:
    """FP32 [256, 2], the two values of each byte of codes, and FP32 [256], the value of each scale."""
    grid = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
    return torch.tensor([[grid[byte & 15], grid[byte >> 4]] for byte in range(256)]), torch.tensor(
        [_e4m3(byte) for byte in range(256)]
    )


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)
