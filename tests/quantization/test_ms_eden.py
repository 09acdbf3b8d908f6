"""MS-EDEN against a second implementation in NumPy, its edge cases, and its mean over signs and draws."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.hadamard import random_hadamard_transform, random_signs
from megatron_fp4.quantization.ms_eden import encode_ms_eden
from megatron_fp4.quantization.rounding import rounding_draws, rounding_key
from tests.quantization.oracle import E2M1, E4M3, nearest

KEY = rounding_key("draws")
INF, NAN = float("inf"), float("nan")


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def rotated(x: Tensor, signs: Tensor) -> Tensor:
    return random_hadamard_transform(x.bfloat16(), 128, signs).float()


def rotated_back(z: Tensor, signs: Tensor) -> Tensor:
    tiles = z.double().unflatten(-1, (-1, 128))
    return (random_hadamard_transform(tiles, 128, torch.ones(128)) * signs.double()).flatten(-2)


def ms_eden_in_fp64(z: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Codes [rows, cols] and scales [rows, cols / 16] of z, and the tensor's decode scale, by the paper's formulas."""
    largest = 6 / (17 / 16 * 0.93)
    decode_scale = np.abs(z).max() / (256 * largest)
    blocks = z.reshape(len(z), -1, 8, 16)
    scales = E4M3[nearest(np.abs(blocks).max(-1) / (largest * decode_scale), E4M3)]
    divisor = (scales * decode_scale)[..., None]
    u = np.divide(blocks, divisor, where=divisor > 0, out=np.zeros_like(blocks))
    codes = np.copysign(E2M1[nearest(np.minimum(np.abs(u), 6), E2M1[:8])], u)
    cross = (u * codes).sum((-1, -2))
    c = np.where(cross == 0, 1, (u * u).sum((-1, -2)) / np.where(cross == 0, 1, cross))
    corrected = scales * c[..., None]
    low = np.clip(np.searchsorted(E4M3, corrected, side="right") - 1, 0, len(E4M3) - 2)
    probability_up = (corrected - E4M3[low]) / (E4M3[low + 1] - E4M3[low])
    up = probability_up + uniform.reshape(corrected.shape) >= 1
    return codes.reshape(z.shape), np.where(up, E4M3[low + 1], E4M3[low]).reshape(len(z), -1), decode_scale


@pytest.mark.parametrize("case", ["normal", "of many magnitudes", "tiny blocks"])
def test_codes_and_scales_are_those_of_the_paper(case):
    x = normal(24, 384, seed=1)
    if case == "of many magnitudes":
        x = x * torch.exp2(torch.arange(384).div(16, rounding_mode="floor") % 24 - 12.0)
    if case == "tiny blocks":
        x[:, :100] *= 2.0**-20
        x[:, 100:200] *= 2.0**-15  # their scales are subnormal
    uniform = rounding_draws(KEY, 24, 24, "cpu").double().numpy()
    codes, scales, decode_scale = ms_eden_in_fp64(x.double().numpy(), uniform)
    encoded = encode_ms_eden(x, KEY)
    assert encoded.decode_scale().item() == pytest.approx(decode_scale, rel=1e-6)
    # In rare cases the error of FP32 takes a sum to the other side of a draw, or u to the other side of a tie.
    assert (encoded.elements.double().numpy() != codes).mean() < 1e-3
    assert (encoded.scales.double().numpy() != scales).mean() < 1e-2
    assert len(np.unique(scales)) > 20 or case == "normal"


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_non_finite_element_makes_all_values_non_finite(value):
    x = normal(4, 256)
    x[2, 130] = value
    assert not encode_ms_eden(x, KEY).dequantize().isfinite().any()
    # Also after the transform, which adds infinities of both signs.
    assert not encode_ms_eden(rotated(x, random_signs(128, KEY)), KEY).dequantize().isfinite().any()


NUM_DRAWS = 150


def test_it_is_unbiased_with_half_the_error_of_stochastic_rounding():
    x = normal(64, 256)
    energy = x.double().square().sum()
    total, errors, stochastic_errors = torch.zeros(64, 256, dtype=torch.double), [], []
    for step in range(NUM_DRAWS):
        signs = random_signs(128, rounding_key("signs", step))
        values = rotated_back(encode_ms_eden(rotated(x, signs), rounding_key("x", step)).dequantize(), signs)
        total += values
        errors.append(((values - x).square().sum() / energy).item())
        stochastic = quantize_nvfp4(x, rounding="stochastic", key=rounding_key(step)).dequantize()
        stochastic_errors.append(((stochastic - x).double().square().sum() / energy).item())
    mean, error = total / NUM_DRAWS, float(np.mean(errors))
    assert error < 0.6 * np.mean(stochastic_errors)
    # The squared error of the mean falls with the number of draws, as that of independent errors does.
    error_of_mean = ((mean - x).square().sum() / energy).item()
    assert 0.8 < error_of_mean * NUM_DRAWS / error < 1.2
    gain = ((mean * x).sum() / energy).item()
    assert abs(gain - 1) < 2e-3
    # Rounding to nearest alone shrinks the tensor.
    nearest = quantize_nvfp4(rotated(x, signs)).dequantize()
    gain_of_nearest = (rotated_back(nearest, signs) * x).sum() / energy
    assert gain_of_nearest < 0.998
