"""NVFP4, MXFP4, MXFP8 and FP8 blocks against an independent implementation (oracle.py), and their edge cases."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize, quantize_nvfp4, rounding_key
from tests.quantization import oracle
from tests.quantization.cases import NAMES, close_in_fp32, codes_of, scales_of, tensors

INF, NAN = float("inf"), float("nan")


class Format(NamedTuple):
    """A format, the oracle's function for it, the columns of a block, and the options of both quantizers."""

    name: str
    oracle: Callable[..., oracle.Quantized]
    width: int
    options: dict[str, Any]
    oracle_options: dict[str, Any]


FORMATS = {
    "nvfp4": Format("nvfp4", oracle.nvfp4, 16, {}, {}),
    "four over six": Format("nvfp4", oracle.nvfp4, 16, {"four_over_six": "absolute"}, {"four_over_six": True}),
    "four over six, squares": Format(
        "nvfp4", oracle.nvfp4, 16, {"four_over_six": "squared"}, {"four_over_six": True, "squared": True}
    ),
    "mxfp4": Format("mxfp4", oracle.mxfp4, 32, {}, {}),
    "mxfp8": Format("mxfp8", oracle.mxfp8, 32, {}, {}),
    "fp8": Format("fp8", oracle.fp8, 128, {}, {}),
    "fp8, powers of two": Format("fp8", oracle.fp8, 128, {"power_of_two_scales": True}, {"power_of_two": True}),
}
FOUR_BITS = [name for name in FORMATS if "fp8" not in name]
SQUARE = pytest.mark.parametrize("square", [False, True], ids=["1xN", "NxN"])


def quantized(name: str, x: torch.Tensor, square: bool = False, **settings: Any) -> Any:
    form = FORMATS[name]
    return quantize(x, form.name, (form.width if square else 1, form.width), **form.options, **settings)


def codes_in(name: str, q: Any) -> np.ndarray:
    """E2M1 codes, or E4M3 values, [rows, cols]."""
    if name in FOUR_BITS:
        return codes_of(q)
    return q.codes.double().reshape(-1, q.codes.shape[-1]).numpy()


def scales_in(name: str, q: Any) -> np.ndarray:
    return np.exp2(scales_of(q) - 127) if name.startswith("mx") else scales_of(q)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", NAMES)
@SQUARE
def test_codes_scales_and_values_are_those_of_the_oracle(name: str, case: str, square: bool) -> None:
    form, x = FORMATS[name], tensors(128, 256, 4)[case]
    actual = quantized(name, torch.from_numpy(x), square)
    expected = form.oracle(x, form.width if square else 1, **form.oracle_options)
    codes, scales = codes_in(name, actual), scales_in(name, actual)
    assert np.array_equal(codes, expected.codes)
    compared = np.ones(scales.shape, dtype=bool)
    if name.startswith("fp8"):  # a block of zeros may have any scale
        compared = np.abs(codes).reshape(len(x), -1, form.width).max(axis=2) > 0
    assert np.array_equal(scales[compared], expected.scales[compared]) and np.isfinite(scales).all()
    assert close_in_fp32(actual.dequantize(), expected.values)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_are_rows_and_any_float_dtype_is_allowed(name: str) -> None:
    width = FORMATS[name].width
    x = torch.from_numpy(tensors(width, 2 * width)["student_t"])
    for square in (False, True):
        whole, batched = quantized(name, x, square), quantized(name, x.reshape(2, width // 2, -1), square)
        assert batched.shape == (2, width // 2, 2 * width) and batched.scales.shape == (2, width // 2, 2)
        assert torch.equal(batched.dequantize().flatten(0, 1), whole.dequantize())
        assert torch.equal(quantized(name, x.t().contiguous().t(), square).dequantize(), whole.dequantize())
    from_bf16 = quantized(name, x.bfloat16())
    assert np.array_equal(codes_in(name, from_bf16), codes_in(name, quantized(name, x.bfloat16().float())))
    assert from_bf16.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@SQUARE
def test_a_non_finite_element_makes_its_block_non_finite_and_in_nvfp4_all_values(name, value: float, square) -> None:
    form, x = FORMATS[name], torch.randn(128, 256)
    x[3, 140] = value
    expected = torch.full((128, 256), form.name == "nvfp4")
    first_column = 140 // form.width * form.width
    expected[slice(0, form.width) if square else 3, first_column : first_column + form.width] = True
    for rounding in ("nearest", "stochastic") if name in FOUR_BITS else ("nearest",):
        values = quantized(name, x, square, rounding=rounding, key=rounding_key(0)).dequantize()
        assert torch.equal(~values.isfinite(), expected)


def test_without_a_key_stochastic_rounding_uses_torchs_generator() -> None:
    torch.manual_seed(1)
    x, state = torch.randn(16, 64), torch.get_rng_state()
    first, second = (quantize_nvfp4(x, rounding="stochastic").codes for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(quantize_nvfp4(x, rounding="stochastic").codes, first) and not torch.equal(first, second)


# The order of operations.


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("tensor_scale", lambda amax, cap=448: np.float32(1) / amax * np.float32(6 * cap)),  # no true division
        ("wanted_scale", lambda block_amax, scale: block_amax / np.float32(6) * scale),  # 1/6 is not folded into S
    ],
)
def test_nvfp4_computes_in_the_papers_order(monkeypatch: pytest.MonkeyPatch, name: str, variant: Any) -> None:
    """Tested on tensors for which another order gives other codes: ratios of integers are ties often enough."""
    rng, num_different = np.random.default_rng(5), 0
    for _ in range(400):
        x = rng.integers(-400, 401, (16, 64)).astype(np.float32)
        x[0, 0] = 448 + rng.integers(500)
        expected = oracle.nvfp4(x)
        with monkeypatch.context() as patch:
            patch.setattr(oracle, name, variant)
            other = oracle.nvfp4(x)
        if not (np.array_equal(expected.codes, other.codes) and np.array_equal(expected.scales, other.scales)):
            num_different += 1
            actual = quantize_nvfp4(torch.from_numpy(x))
            assert np.array_equal(codes_of(actual), expected.codes)
            assert np.array_equal(scales_of(actual), expected.scales)
    assert num_different >= 3


# Edge cases.


def test_zeros_and_their_signs() -> None:
    assert not any(quantized(name, torch.zeros(128, 256)).dequantize().any() for name in FORMATS)
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([6.0, -0.0, -0.1, 0.1, -6.0, -1e-30])
    assert codes_of(quantize_nvfp4(x))[0, :6].tolist() == [7, 0, 8, 0, 15, 8]
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, -0.0, -(2.0**-11), 2.0**-11])  # E4M3 has a negative zero
    assert quantize(x, "mxfp8").codes.view(torch.uint8)[0, :5].tolist() == [0x7E, 0x80, 0x80, 0, 0]


def test_mxfp8_values_of_bf16_tensors_are_exact_in_bf16_however_small() -> None:
    bits = torch.randint(0, 0x1000, (4096, 64), generator=torch.Generator().manual_seed(0))  # all below 2^-95
    x = ((bits >> torch.arange(64) % 8).to(torch.int32) << 16).view(torch.float32)
    q = quantize(x, "mxfp8")
    assert q.scales.min() == 0
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize())


def test_errors_for_wrong_arguments_give_value_and_remedy() -> None:
    x = torch.randn(16, 32)
    for message, arguments in (
        (r"\(2, 16\).*\(1, 16\), \(16, 16\)", (x, (2, 16))),
        (r"'up'.*'nearest' or 'stochastic'", (x, (1, 16), "up")),
        (r"33 columns \(shape \(16, 33\)\).*16; pad to 48 with zeros", (torch.randn(16, 33),)),
        (r"20 rows \(shape \(4, 5, 32\)\).*16; pad to 32 with zeros", (torch.randn(4, 5, 32), (16, 16))),
        ("is a scalar or has no elements", (torch.empty(0, 16),)),
        (r"floating-point.*int64", (torch.ones(16, 16, dtype=torch.int64),)),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            quantize_nvfp4(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8: rounding 'stochastic' is not 'nearest'"):
        quantize(torch.randn(16, 128), "fp8", rounding="stochastic")
    with pytest.raises(ValueError, match="four_over_six 'mean' is not 'absolute', 'squared' or ''"):
        quantize_nvfp4(x, four_over_six="mean")


def test_quantized_tensors_keep_only_packed_codes() -> None:
    for name, bits in (("nvfp4", 4), ("mxfp4", 4), ("mxfp8", 8), ("fp8", 8)):
        q = quantize(torch.randn(128, 128), name)
        assert q.negative is None and q.elements.nbytes == 128 * 128 * bits // 8
