"""What quantization returns: codes and scales, and how they decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.formats import E2M1_MAX, E4M3_MAX, e2m1_values, ue8m0_values, unpack_codes


@dataclass(frozen=True)
class NVFP4Tensor:
    """E2M1 codes under E4M3 block scales under one FP32 tensor scale.

    codes: uint8 [..., cols / 2], low nibble = even column.
    scales: float8_e4m3fn [..., cols / 16], one per 16 columns; replicated over the 16 rows of a 16x16 block.
    amax: FP32, 0-dim, the largest magnitude of the whole tensor. NaN or inf poisons everything that is decoded.
    block: elements that share a scale, (rows, columns).
    scale_max: what the largest block scale was mapped to: 448, or 256 for four-over-six.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    block: tuple[int, int] = (1, 16)
    scale_max: float = E4M3_MAX

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the codes stand for."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def block_values(self) -> Tensor:
        """FP32 `code * block scale`, exact in BF16 too, without the tensor scale (the operand of an emulated GEMM)."""
        values = e2m1_values(unpack_codes(self.codes))
        return (values.unflatten(-1, (-1, 16)) * self.scales.to(torch.float32)[..., None]).flatten(-2)

    def decode_scale(self) -> Tensor:
        """FP32 0-dim factor from `block_values` to real values: amax / (6 * scale_max).

        Below an amax of some 3e-35 it is subnormal and has fewer digits, below 2e-42 it is 0.
        """
        # Divided by a tensor: on CUDA a division by a Python number is a product with its reciprocal.
        return self.amax / torch.full_like(self.amax, E2M1_MAX * self.scale_max)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e2m1 * scale * amax / 2688` (computed in FP32, left to right) in `dtype`, of shape `shape`."""
        room = headroom(self.amax)
        divisor = torch.full_like(self.amax, E2M1_MAX * self.scale_max) * room
        return (self.block_values() * (self.amax * room) / divisor).to(dtype)


@dataclass(frozen=True)
class MXFP4Tensor:
    """E2M1 codes under UE8M0 block scales; there is no tensor scale.

    codes: uint8 [..., cols / 2], low nibble = even column.
    scales: uint8 [..., cols / 32], biased exponents; replicated over the 32 rows of a 32x32 block. 255 is NaN.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] = (1, 32)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the codes stand for."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e2m1 * 2^(scale - 127)` in `dtype`."""
        values = e2m1_values(unpack_codes(self.codes))
        return (values.unflatten(-1, (-1, 32)) * ue8m0_values(self.scales)[..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True)
class MXFP8Tensor:
    """E4M3 values under UE8M0 block scales; there is no tensor scale.

    codes: float8_e4m3fn [..., cols].
    scales: uint8 [..., cols / 32], biased exponents; replicated over the 32 rows of a 32x32 block. 255 is NaN.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] = (1, 32)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the codes stand for."""
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e4m3 * 2^(scale - 127)` in `dtype`."""
        values = self.codes.to(torch.float32).unflatten(-1, (-1, 32))
        return (values * ue8m0_values(self.scales)[..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True)
class FP8Tensor:
    """E4M3 values under FP32 block scales.

    codes: float8_e4m3fn [..., cols].
    scales: FP32 decode scales [..., cols / 128]; replicated over the 128 rows of a 128x128 block.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] = (1, 128)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the codes stand for."""
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e4m3 * scale` in `dtype`."""
        values = self.codes.to(torch.float32).unflatten(-1, (-1, 128))
        return (values * self.scales[..., None]).flatten(-2).to(dtype)


def headroom(amax: Tensor) -> Tensor:
    """2^-12 where `amax` is so large that `e2m1 * scale * amax` could overflow, else 1; NaN counts as small.

    On both sides of the division by 2688 < 2^12 it moves no bit of what does not overflow: no factor becomes subnormal.
    """
    return torch.where(amax > 2.0**100, torch.full_like(amax, 2.0**-12), torch.ones_like(amax))


def as_rows(x: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """`x` as FP32 [rows, cols] after checking that `block` tiles it; `name` is the format, for the error.

    Leading dimensions are flattened into rows; blocks of more than one row need them to divide as flattened.
    Raises TypeError for tensors that are not floating point and ValueError for sizes that do not divide or are zero.
    """
    if not x.is_floating_point():
        raise TypeError(f"{name}: a floating-point tensor is needed, got {x.dtype}")
    if x.dim() < 1:
        raise ValueError(f"{name}: a tensor with at least one dimension is needed, got a scalar")
    if x.numel() == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no elements, and so no largest one; skip empty tensors")
    rows = x.reshape(-1, x.shape[-1])
    for what, size, divisor in (("rows", rows.shape[0], block[0]), ("columns", rows.shape[1], block[1])):
        if size % divisor != 0:
            raise ValueError(
                f"{name}: {size} {what} (shape {tuple(x.shape)}) are not a multiple of the block's {divisor}; "
                f"pad to {-(-size // divisor) * divisor} with zeros"
            )
    return rows.to(torch.float32)


def block_amax(rows: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of FP32 [rows, cols], replicated over a block's rows: [rows, cols / block[1]].

    NaN wins over every number.
    """
    amax = rows.abs().unflatten(-1, (-1, block[1]))
    while amax.shape[-1] > 1:  # by halves: several times faster on a CPU than a reduction over so few elements
        half = amax.shape[-1] // 2
        amax = torch.maximum(amax[..., :half], amax[..., half:])
    amax = amax[..., 0]
    if block[0] > 1:
        amax = amax.unflatten(0, (-1, block[0])).amax(1).repeat_interleave(block[0], dim=0)
    return amax
