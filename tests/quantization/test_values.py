"""NVFP4, MXFP4, MXFP8 and FP8 blocks against an independent statement of them (oracle.py), and their edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize, quantize_nvfp4, rounding_key
from megatron_fp4.quantization.rounding import rounding_draws
from tests.quantization import oracle
from tests.quantization.cases import NAMES, close_in_single, codes_of, scales_of, tensors

INF, NAN = float("inf"), float("nan")
SQUARED = {"four_over_six": "squared"}
# Name -> format, oracle, width of a block, keywords of the quantizer and of the oracle.
FORMATS: dict[str, tuple[str, Callable[..., oracle.Quantized], int, dict[str, Any], dict[str, Any]]] = {
    "nvfp4": ("nvfp4", oracle.nvfp4, 16, {}, {}),
    "four over six": ("nvfp4", oracle.nvfp4, 16, {"four_over_six": "absolute"}, {"four_over_six": True}),
    "four over six, squares": ("nvfp4", oracle.nvfp4, 16, SQUARED, {"four_over_six": True, "squared": True}),
    "mxfp4": ("mxfp4", oracle.mxfp4, 32, {}, {}),
    "mxfp8": ("mxfp8", oracle.mxfp8, 32, {}, {}),
    "fp8": ("fp8", oracle.fp8, 128, {}, {}),
    "fp8, powers of two": ("fp8", oracle.fp8, 128, {"power_of_two_scales": True}, {"power_of_two": True}),
}
FOUR_BITS = [name for name in FORMATS if "fp8" not in name]
SQUARE = pytest.mark.parametrize("square", [False, True], ids=["1xN", "NxN"])


def quantized(name: str, x: torch.Tensor, square: bool = False, **settings: Any) -> Any:
    form, _, width, options, _ = FORMATS[name]
    return quantize(x, form, (width if square else 1, width), **options, **settings)


def codes_in(name: str, made: Any) -> np.ndarray:
    """E2M1 codes, or E4M3 values, [rows, cols]."""
    if name in FOUR_BITS:
        return codes_of(made)
    return made.codes.double().reshape(-1, made.codes.shape[-1]).numpy()


def scales_in(name: str, made: Any) -> np.ndarray:
    return np.exp2(scales_of(made) - 127) if name.startswith("mx") else scales_of(made)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", NAMES)
@SQUARE
def test_codes_scales_and_values_are_those_of_the_oracle(name: str, case: str, square: bool) -> None:
    _, restated, width, _, settings = FORMATS[name]
    x = tensors(128, 256, 4)[case]
    made, expected = quantized(name, torch.from_numpy(x), square), restated(x, width if square else 1, **settings)
    codes, scales = codes_in(name, made), scales_in(name, made)
    assert np.array_equal(codes, expected.codes)
    counts = np.ones(scales.shape, dtype=bool)
    if name.startswith("fp8"):  # a block of zeros may have any scale
        counts = np.abs(codes).reshape(len(x), -1, width).max(axis=2) > 0
    assert np.array_equal(scales[counts], expected.scales[counts]) and np.isfinite(scales).all()
    assert close_in_single(made.dequantize(), expected.values)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_are_rows_and_any_float_dtype_is_taken(name: str) -> None:
    width = FORMATS[name][2]
    x = torch.from_numpy(tensors(width, 2 * width)["student_t"])
    for square in (False, True):
        whole, batched = quantized(name, x, square), quantized(name, x.reshape(2, width // 2, -1), square)
        assert batched.shape == (2, width // 2, 2 * width) and batched.scales.shape == (2, width // 2, 2)
        assert torch.equal(batched.dequantize().flatten(0, 1), whole.dequantize())
        assert torch.equal(quantized(name, x.t().contiguous().t(), square).dequantize(), whole.dequantize())
    low = quantized(name, x.bfloat16())
    assert np.array_equal(codes_in(name, low), codes_in(name, quantized(name, x.bfloat16().float())))
    assert low.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@SQUARE
def test_a_non_finite_element_poisons_its_block_and_of_nvfp4_everything(name: str, bad: float, square: bool) -> None:
    form, _, width, *_ = FORMATS[name]
    x = torch.randn(128, 256)
    x[3, 140] = bad
    for rounding in ("nearest", "stochastic") if name in FOUR_BITS else ("nearest",):
        finite = torch.isfinite(quantized(name, x, square, rounding=rounding, key=rounding_key(0)).dequantize())
        poisoned = torch.zeros(128, 256, dtype=torch.bool)
        poisoned[slice(0, width) if square else slice(3, 4), 140 // width * width :][:, :width] = True
        assert torch.equal(~finite, poisoned | torch.tensor(form == "nvfp4"))


@pytest.mark.parametrize("name", FORMATS)
def test_shards_have_the_codes_of_the_whole(name: str) -> None:
    """With the maximum of the whole, and, rounded stochastically, their slice of the draws."""
    x = torch.from_numpy(tensors(64, 256)["gauss"])
    shared = {"amax": x.abs().max()} if FORMATS[name][0] == "nvfp4" else {}
    place = {"row_offset": 32, "column_offset": 128}
    for rounding in ("nearest", "stochastic") if name in FOUR_BITS else ("nearest",):
        first, placed = ({"rounding": rounding, "key": rounding_key(1, **at)} for at in ({}, place))
        whole = codes_in(name, quantized(name, x, **first))[32:, 128:]
        assert np.array_equal(codes_in(name, quantized(name, x[32:, 128:], **placed, **shared)), whole)
        if rounding == "stochastic":
            unplaced = quantized(name, x[32:, 128:], **first, **shared)
            assert not np.array_equal(codes_in(name, unplaced), whole)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@SQUARE
def test_stochastic_rounding_takes_a_neighbour_by_the_draw_of_the_place(name: str, square: bool) -> None:
    """That this is unbiased is in test_rounding.py."""
    _, restated, width, *_ = FORMATS[name]
    x, key = tensors(width, 64)["student_t"], rounding_key("draws")
    made = quantized(name, torch.from_numpy(x), square, rounding="stochastic", key=key)
    expected = restated(x, width if square else 1)
    assert np.array_equal(scales_in(name, made), expected.scales)
    unit = np.repeat(expected.scales, width, axis=1) * (expected.amax / 2688 if name == "nvfp4" else 1)
    magnitude = np.minimum(np.abs(x) / unit, 6)
    spacing = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1, 2))
    rounded = np.floor(magnitude / spacing + rounding_draws(key, *x.shape, "cpu").numpy()) * spacing
    assert np.array_equal(oracle.E2M1[codes_of(made)], np.copysign(rounded, x))


def test_without_a_key_stochastic_rounding_follows_torch() -> None:
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
        ("wanted_scale", lambda block_amax, scale: block_amax / np.float32(6) * scale),  # the sixth not folded into S
    ],
)
def test_nvfp4_computes_in_the_papers_order(monkeypatch: pytest.MonkeyPatch, name: str, variant: Any) -> None:
    """On tensors for which another order gives other codes. Integers: their ratios are ties often enough."""
    rng, differ = np.random.default_rng(5), 0
    for _ in range(400):
        x = rng.integers(-400, 401, (16, 64)).astype(np.float32)
        x[0, 0] = 448 + rng.integers(500)
        right = oracle.nvfp4(x)
        with monkeypatch.context() as patch:
            patch.setattr(oracle, name, variant)
            wrong = oracle.nvfp4(x)
        if not (np.array_equal(right.codes, wrong.codes) and np.array_equal(right.scales, wrong.scales)):
            differ += 1
            made = quantize_nvfp4(torch.from_numpy(x))
            assert np.array_equal(codes_of(made), right.codes) and np.array_equal(scales_of(made), right.scales)
    assert differ >= 3


# Edges.


def test_zeros_and_their_signs() -> None:
    assert not any(quantized(name, torch.zeros(128, 256)).dequantize().any() for name in FORMATS)
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([6.0, -0.0, -0.1, 0.1, -6.0, -1e-30])
    assert codes_of(quantize_nvfp4(x))[0, :6].tolist() == [7, 0, 8, 0, 15, 8]
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, -0.0, -(2.0**-11), 2.0**-11])  # E4M3 has a negative zero
    assert quantize(x, "mxfp8").codes.view(torch.uint8)[0, :5].tolist() == [0x7E, 0x80, 0x80, 0, 0]


def test_values_of_bf16_tensors_in_mxfp8_are_bf16_numbers_however_small() -> None:
    bits = torch.randint(0, 0x1000, (4096, 64), generator=torch.Generator().manual_seed(0))  # all below 2^-95
    x = ((bits >> torch.arange(64) % 8).to(torch.int32) << 16).view(torch.float32)
    made = quantize(x, "mxfp8")
    assert made.scales.min() == 0
    assert torch.equal(made.dequantize(torch.bfloat16).float(), made.dequantize())


def test_wrong_arguments_are_refused_with_value_and_remedy() -> None:
    x = torch.randn(16, 32)
    for wrong, arguments in (
        (r"\(2, 16\).*\(1, 16\), \(16, 16\)", (x, (2, 16))),
        (r"'up'.*'nearest' or 'stochastic'", (x, (1, 16), "up")),
        (r"33 columns \(shape \(16, 33\)\).*16; pad to 48 with zeros", (torch.randn(16, 33),)),
        (r"20 rows \(shape \(4, 5, 32\)\).*16; pad to 32 with zeros", (torch.randn(4, 5, 32), (16, 16))),
        ("is a scalar or has no elements", (torch.empty(0, 16),)),
        (r"floating-point.*int64", (torch.ones(16, 16, dtype=torch.int64),)),
    ):
        with pytest.raises((ValueError, TypeError), match=wrong):
            quantize_nvfp4(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8: rounding 'stochastic' is not 'nearest'"):
        quantize(torch.randn(16, 128), "fp8", rounding="stochastic")
    with pytest.raises(ValueError, match="four_over_six 'mean' is not 'absolute', 'squared' or ''"):
        quantize_nvfp4(x, four_over_six="mean")


def test_what_is_returned_is_as_small_as_its_codes() -> None:
    for name, bits in (("nvfp4", 4), ("mxfp4", 4), ("mxfp8", 8), ("fp8", 8)):
        made = quantize(torch.randn(128, 128), name)
        assert made.negative is None and made.elements.nbytes == 128 * 128 * bits // 8
