from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_fp4.measure.diagnostics import (
    operand_statistics,
    operand_sums,
    product_sums,
    quantized_values,
    relative_error,
    sum_of_squares,
)
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization import quantize_fp8, quantize_mxfp4, quantize_nvfp4, rounding_key
from tests.quantization.cases import tensors

KEY = rounding_key("diagnostics")
OPERANDS = {
    "nvfp4": Operand("nvfp4", (1, 16)),
    "nvfp4 square": Operand("nvfp4", (16, 16)),
    "nvfp4 SR": Operand("nvfp4", (1, 16), "stochastic"),
    "nvfp4 4/6": Operand("nvfp4", (1, 16), four_over_six=True),
    "mxfp4": Operand("mxfp4", (1, 32)),
    "mxfp4 SR": Operand("mxfp4", (1, 32), "stochastic"),
    "fp8": Operand("fp8", (1, 128)),
    "fp8 square": Operand("fp8", (128, 128), power_of_two_scales=True),
}


def _public(x: torch.Tensor, operand: Operand) -> torch.Tensor:
    if operand.format == "nvfp4":
        return quantize_nvfp4(
            x, operand.block, operand.rounding, key=KEY, four_over_six=operand.four_over_six
        ).dequantize()
    if operand.format == "mxfp4":
        return quantize_mxfp4(x, operand.block, operand.rounding, key=KEY).dequantize()
    return quantize_fp8(
        x, operand.block, operand.rounding, key=KEY, power_of_two_scales=operand.power_of_two_scales
    ).dequantize()


def _statistics(x: torch.Tensor, operand: Operand) -> dict[str, float]:
    values, limits = quantized_values(x, operand, KEY if operand.rounding == "stochastic" else None, x.abs().amax())
    sums = operand_sums(x, values, limits).tolist()
    largest = x.abs().amax().item()
    return operand_statistics([*sums, sums[0], x.numel()], [largest, largest], transformed=False)


@pytest.mark.parametrize("operand", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("case", ["gauss", "student_t", "wide", "sparse", "zero_blocks", "halfway"])
def test_statistics_are_those_of_the_public_quantizers(operand: Operand, case: str) -> None:
    x = torch.from_numpy(tensors(128, 256)[case])
    exact, values = x.double().numpy(), _public(x, operand).double().numpy()
    found = _statistics(x, operand)
    error = ((values - exact) ** 2).sum()
    expected = 10 * math.log10((exact**2).sum() / error) if error else math.inf
    assert found["snr_db"] == pytest.approx(expected, abs=0.01)
    assert found["zeroed"] == pytest.approx(((exact != 0) & (values == 0)).sum() / (exact != 0).sum(), abs=1e-12)
    assert found["rms"] == pytest.approx(np.sqrt((exact**2).mean()), rel=1e-4)
    assert found["crest"] == pytest.approx(np.abs(exact).max() / np.sqrt((exact**2).mean()), rel=1e-4)


def test_saturation_is_what_lies_beyond_the_largest_code() -> None:
    x = torch.from_numpy(tensors(64, 256)["gauss"])
    quantized = quantize_nvfp4(x)
    limit = quantized.scales.double() * (quantized.amax.double() / 448)
    beyond = (x.double().abs().unflatten(-1, (-1, 16)) > limit[..., None] * (1 + 1e-6)).sum().item()
    assert beyond > 0  # some scales are rounded down
    assert _statistics(x, OPERANDS["nvfp4"])["saturated"] == pytest.approx(beyond / x.numel(), abs=1e-12)
    # Scales of MXFP4 are rounded up, and those of FP8 are not rounded: nothing is ever beyond.
    assert _statistics(x, OPERANDS["mxfp4"])["saturated"] == 0
    assert _statistics(x, OPERANDS["fp8"])["saturated"] == 0


def test_a_block_whose_scale_is_zero_is_lost_and_not_saturated() -> None:
    x = torch.full((1, 32), 1.0)
    x[:, 16:] = 1e-6
    assert quantize_nvfp4(x).scales[0, 1] == 0
    found = _statistics(x, OPERANDS["nvfp4"])
    assert (found["zeroed"], found["saturated"]) == (0.5, 0)


def test_relative_error_of_a_product() -> None:
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(product_sums(exact + 0.5, exact).tolist()) == pytest.approx(1 / 5)
    assert relative_error([0.0, 0.0]) == 0 and relative_error([0.0, 1.0]) == math.inf
    assert relative_error(product_sums(torch.zeros(2, 2), exact).tolist()) == 1  # an all-zero result


def test_sums_of_parts_are_those_of_the_whole() -> None:
    x = torch.from_numpy(tensors(64, 256)["student_t"])
    values, limits = quantized_values(x, OPERANDS["nvfp4"], None, x.abs().amax())
    parts = sum(operand_sums(x[i : i + 16], values[i : i + 16], limits[i : i + 16]) for i in range(0, 64, 16))
    assert torch.allclose(parts, operand_sums(x, values, limits), rtol=1e-5)
    assert sum_of_squares(torch.empty(0, 4)) == 0
