"""Measuring operands: quantizing a small one again as it is, and of a large one a sample.

A sample is half a million elements: whole blocks out of bands of rows that lie evenly over the tensor, quantized with
the whole tensor's maximum. Its SNR is good to a few hundredths of a decibel unless a few rows hold most of the
tensor's energy. Samples of equal operands wait for each other and are quantized together, because launching the
hundred small kernels of a quantizer costs a GPU more than running them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.measure.statistics import operand_sums
from megatron_fp4.precision.emulated import encode_operand
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import scale_values

LARGE = 2**21  # elements; larger operands are measured by a sample
SAMPLE = 2**19  # elements of a sample: whole blocks of every format
_BAND_ROWS = 128  # the rows of the largest block
_TOGETHER = 16  # samples that are quantized together

Sums = Callable[[Tensor], None]


@dataclass(frozen=True)
class _Waiting:
    tiles: Tensor
    amax: Tensor
    key: RoundingKey | None
    then: Sums


class Samples:
    """Samples that wait to be quantized, by operand."""

    def __init__(self) -> None:
        self._waiting: dict[Operand, list[_Waiting]] = {}

    def put(self, sample: Tensor, operand: Operand, key: RoundingKey | None, amax: Tensor, then: Sums) -> None:
        """Have `then` called with the sums (`operand_sums`) of a sample from `sample_rows`, at the latest by `flush`.

        key: of the draws, for this or another sample of the same operand. amax: FP32 0-dim.
        """
        waiting = self._waiting.setdefault(operand, [])
        waiting.append(_Waiting(_tiles(sample, operand.group), amax, key, then))
        # Four-over-six compares errors under one maximum for all rows.
        if len(waiting) >= (1 if operand.four_over_six else _TOGETHER):
            self._measure(operand, waiting)

    def flush(self) -> None:
        """Measure everything that waits."""
        for operand, waiting in self._waiting.items():
            if waiting:
                self._measure(operand, waiting)

    def _measure(self, operand: Operand, waiting: list[_Waiting]) -> None:
        count, rows = len(waiting), waiting[0].tiles.shape[0]
        tiles = torch.stack([one.tiles for one in waiting]).to(torch.float32)
        amax = torch.stack([one.amax for one in waiting]).repeat_interleave(rows)[:, None]
        if count == 1:
            amax = waiting[0].amax
        values, limits = quantized_values(tiles.flatten(0, 1), operand, waiting[0].key, amax)
        for i, one in enumerate(waiting):
            here = slice(i * rows, (i + 1) * rows)
            one.then(operand_sums(tiles[i], values[here], limits[here]))
        waiting.clear()


def quantized_values(rows: Tensor, operand: Operand, key: RoundingKey | None, amax: Tensor) -> tuple[Tensor, Tensor]:
    """What `operand` makes of FP32 `rows` [rows, k]: real values FP32 [rows, k], and the largest magnitude that each
    block's scale can express, FP32 [rows, k / block].

    key: of stochastic rounding, None rounds to nearest. amax: FP32, of the whole tensor, 0-dim, or [rows, 1] where rows
    are of several tensors (nvfp4 without four-over-six).
    """
    encoded = encode_operand(rows, operand, key, amax=amax)
    values, limits, scale = encoded.block_values(), scale_values(encoded.scales), encoded.decode_scale()
    if scale is not None:
        values, limits = values.mul_(scale), limits * scale
    return values, limits * format_of(operand.format).largest


def sample_rows(x: Tensor) -> Tensor:
    """Bands of rows of `x` [rows, cols] that lie evenly over it, at least `SAMPLE` elements (of at least as many)."""
    band = math.gcd(x.shape[0], _BAND_ROWS)
    num_bands = x.shape[0] // band
    wanted = -(-SAMPLE // (band * x.shape[1]))
    return x.unflatten(0, (-1, band))[:: num_bands // wanted][:wanted].flatten(0, 1)


def transformed(x: Tensor, signs: Tensor) -> tuple[Tensor, float]:
    """The Hadamard transform of `x` [rows, cols] as a BF16 tensor, and a factor to multiply it with.

    A matrix product with entries of +-1, a fraction of the memory traffic of the exact butterflies, from which it may
    differ in the last bit.
    """
    size = signs.shape[0]
    matrix = _hadamard_matrix(size, x.device) * signs[:, None]
    product = x.to(torch.bfloat16).unflatten(-1, (-1, size)) @ matrix.to(torch.bfloat16)
    return product.flatten(-2), 1.0 / math.sqrt(size)


@functools.cache
def device_signs(size: int, device: torch.device) -> Tensor:
    """`fixed_signs`, kept: made anew they would be copied from the host, which waits for the device."""
    return fixed_signs(size, device)


@functools.cache
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    return random_hadamard_transform(torch.eye(size), size, torch.ones(size)).sign().to(device)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The first `SAMPLE` elements of `x` [rows, cols], block (or group) by block: [SAMPLE / block columns, block
    columns]."""
    rows, columns = block
    if rows > 1:
        x = x.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2)
    return x.reshape(-1, columns)[: SAMPLE // columns]
