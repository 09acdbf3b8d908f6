"""The reference quantizers themselves, against what a format's definition says: by brute force over all codes, in FP64.

Everything else is compared with these functions; this does not call their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import E2M1_VALUES, E4M3_MAX, e2m1_values, ue8m0_values, unpack_codes
from megatron_fp4.quantization.fp8 import quantize_fp8
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.mxfp4 import quantize_mxfp4
from megatron_fp4.quantization.mxfp8 import quantize_mxfp8
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4

# Quotients and products are FP32: near a tie the other neighbour is as good to that precision.
_SLACK = 1e-6


def properties(device: torch.device) -> Iterator[tuple[str, bool]]:
    """(what must hold, whether it does) on random tensors with outliers."""
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(256, 256, generator=generator, device=device)
    x[:, ::41] *= 30
    x[::9] *= 1e-3
    e2m1 = torch.tensor([*(-value for value in E2M1_VALUES[1:]), *E2M1_VALUES], dtype=torch.float64, device=device)
    every = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float64)
    e4m3 = every[every.isfinite()]

    nvfp4 = quantize_nvfp4(x)
    decode = nvfp4.amax.double() / 2688
    scales = nvfp4.scales.double()
    blocks = x.double().unflatten(-1, (-1, 16))
    block_amax = blocks.abs().amax(-1)
    yield "NVFP4: block scales are the nearest E4M3 numbers", _nearest(scales, block_amax / 6 / decode, e4m3)
    codes = e2m1_values(unpack_codes(nvfp4.codes)).double()
    yield (
        "NVFP4: codes are the nearest of all 15",
        _nearest(codes, (blocks / scales[..., None] / decode).flatten(-2), e2m1),
    )
    square, turned = quantize_nvfp4(x, (16, 16)), quantize_nvfp4(x.t(), (16, 16))
    same = torch.equal(unpack_codes(square.codes).t(), unpack_codes(turned.codes))
    yield "NVFP4: 16x16 codes of the transpose are the transposed codes", same

    mxfp4 = quantize_mxfp4(x)
    powers, blocks = ue8m0_values(mxfp4.scales).double(), x.double().unflatten(-1, (-1, 32))
    least = _least_powers(powers, blocks.abs().amax(-1) / 6)
    yield "MXFP4: scales are the least powers of two that clip nothing", least
    codes = e2m1_values(unpack_codes(mxfp4.codes)).double()
    yield "MXFP4: codes are the nearest of all 15", _nearest(codes, (blocks / powers[..., None]).flatten(-2), e2m1)

    mxfp8 = quantize_mxfp8(x)
    powers = ue8m0_values(mxfp8.scales).double()
    least = _least_powers(powers, blocks.abs().amax(-1) / E4M3_MAX)
    yield "MXFP8: scales are the least powers of two that clip nothing", least
    quotients = (blocks / powers[..., None]).flatten(-2)
    yield "MXFP8: codes are the nearest E4M3 numbers", _nearest(mxfp8.codes.double(), quotients, e4m3)

    fp8 = quantize_fp8(x)
    quotients = (x.double().unflatten(-1, (-1, 128)) / fp8.scales.double()[..., None]).flatten(-2)
    yield "FP8: codes are the nearest E4M3 numbers", _nearest(fp8.codes.double(), quotients, e4m3)

    rows, columns = x.to(torch.bfloat16), x.flip(0).to(torch.bfloat16)
    exact = rows.double() @ columns.double().t()
    after = (random_hadamard_transform(t.double(), 16) for t in (rows, columns))
    left, right = after
    yield "RHT: both sides transformed, the product is the same", torch.allclose(left @ right.t(), exact, rtol=1e-10)


def _least_powers(powers: Tensor, needed: Tensor) -> bool:
    """Whether every power of two is at least what is needed, and half of it is less."""
    return bool(((powers >= needed * (1 - _SLACK)) & (powers / 2 < needed * (1 + _SLACK))).all())


def _nearest(chosen: Tensor, exact: Tensor, grid: Tensor) -> bool:
    """Whether no number of `grid` is nearer to `exact` than `chosen` is."""
    error = (chosen - exact).abs()
    least = torch.full_like(error, torch.inf)
    for value in grid.unique():
        least = torch.minimum(least, (value - exact).abs())
    return bool((error <= least + _SLACK * exact.abs().clamp(min=_SLACK)).all())
