import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize_mxfp8
from tests.quantization import oracle
from tests.quantization.cases import NAMES, tensors

BLOCKS = [(1, 32), (32, 32)]


def exponents(quantized) -> np.ndarray:
    return quantized.scales.reshape(-1, quantized.scales.shape[-1]).numpy()


def one_block_each(amax: np.ndarray) -> torch.Tensor:
    """[number, 32], with each of `amax` once, negative, and otherwise zeros."""
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -torch.from_numpy(amax.astype(np.float32))
    return x


def check_against_oracle(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...] | None = None) -> None:
    expected = oracle.mxfp8(values, block[0])
    quantized = quantize_mxfp8(torch.from_numpy(values).reshape(shape or values.shape), block)
    assert np.array_equal(exponents(quantized), np.log2(expected.scales) + 127)
    codes = quantized.codes.double().numpy().reshape(values.shape)
    assert np.array_equal(codes, expected.codes)
    assert np.array_equal(np.signbit(codes), np.signbit(expected.codes))
    with np.errstate(over="ignore"):  # 256 * 2^120 is beyond single precision
        decoded = expected.values.astype(np.float32)
    assert np.array_equal(quantized.dequantize().numpy().reshape(values.shape), decoded)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_scales_and_values_are_those_of_the_oracle(name, block):
    for seed in range(3):
        check_against_oracle(tensors(64, 96, seed)[name], block)


@pytest.mark.parametrize("shape", [(2, 3, 32, 64), (32, 32), (1, 32, 128)])
def test_leading_dimensions_are_rows(shape):
    values = tensors(int(np.prod(shape[:-1])), shape[-1])["student_t"]
    for block in BLOCKS:
        check_against_oracle(values, block, shape)
    quantized = quantize_mxfp8(torch.from_numpy(values).reshape(shape))
    assert quantized.shape == shape
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.scales.shape == (*shape[:-1], shape[-1] // 32)
    assert quantized.scales.dtype == torch.uint8


@pytest.mark.parametrize("move", [0, 1, -1])
def test_scales_are_rounded_up_around_every_power_of_two(move):
    powers = np.arange(-125, 119)
    amax = (448 * np.exp2(powers.astype(np.float64))).astype(np.float32)
    amax = np.nextafter(amax, np.float32(np.inf * move)) if move else amax
    x = one_block_each(amax)
    assert exponents(quantize_mxfp8(x))[:, 0].tolist() == (powers + (move > 0) + 127).tolist()
    check_against_oracle(x.numpy(), (1, 32))


def test_the_smallest_scale_reaches_up_to_a_mantissa_of_one_half():
    """The quotient in exponent field 0: a mantissa of at most 0x400000 is at most 2^-127 and takes code 0."""
    quotient = np.array([0x400000, 0x400001, 0x3FFFFF, 1], dtype=np.int32).view(np.float32).astype(np.float64)
    expected = [0, 1, 0, 0]
    x = one_block_each(448 * quotient)
    assert exponents(quantize_mxfp8(x))[:, 0].tolist() == expected
    check_against_oracle(x.numpy(), (1, 32))


def test_both_kernels_of_transformer_engine_take_the_same_scale_of_every_bfloat16():
    """One multiplies by 1/448 in single precision, the other by its BF16 neighbour 0x3b12: the same power of two."""
    amax = (torch.arange(1, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    wanted = amax.double().numpy() * (1.140625 * 2.0**-9)
    exponent = np.maximum(np.ceil(np.log2(wanted)), -127) + 127
    assert np.array_equal(exponents(quantize_mxfp8(one_block_each(amax.numpy())))[:, 0], exponent)


def test_nothing_saturates_and_errors_are_at_most_half_a_spacing():
    for name in ("gauss", "student_t", "wide", "integer"):
        x = tensors(32, 96)[name].astype(np.float64)
        quantized = quantize_mxfp8(torch.from_numpy(x).float())
        unit = np.exp2(exponents(quantized).repeat(32, axis=1) - 127.0)
        assert (np.abs(x) <= 448 * unit).all()
        spacing = np.maximum(np.exp2(np.floor(np.log2(np.maximum(np.abs(x) / unit, 2.0**-6))) - 3), 2.0**-9)
        assert (np.abs(x - quantized.dequantize().double().numpy()) <= spacing * unit / 2).all()


def test_zero_blocks_and_signs_of_zeros():
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([448.0, -0.0, -(2.0**-11), 2.0**-11])
    quantized = quantize_mxfp8(x)
    # As the instruction that Transformer Engine uses: E4M3 has a negative zero.
    assert quantized.codes.view(torch.uint8)[0, :5].tolist() == [0x7E, 0x80, 0x80, 0, 0]
    assert exponents(quantized)[0].tolist() == [127, 0]
    assert not quantized.dequantize()[0, 32:].any()


def test_values_of_bfloat16_tensors_are_bfloat16_numbers_however_small():
    bits = torch.randint(0, 0x1000, (4096, 64), generator=torch.Generator().manual_seed(0))  # all below 2^-95
    x = ((bits >> torch.arange(64) % 8).to(torch.int32) << 16).view(torch.float32)
    quantized = quantize_mxfp8(x)
    assert exponents(quantized).min() == 0
    assert torch.equal(quantized.dequantize(torch.bfloat16).float(), quantized.dequantize())
    # A single-precision tensor can do otherwise.
    wide = torch.tensor([[2.0**-127 * 400, 2.0**-135, *[0.0] * 30]])
    assert not torch.equal(quantize_mxfp8(wide).dequantize(torch.bfloat16).float(), quantize_mxfp8(wide).dequantize())


def test_the_largest_numbers_round_to_infinity_and_not_to_something_smaller():
    below, at = 2.0**127 * 1.9375 - 2.0**110, 2.0**127 * 1.9375
    decoded = quantize_mxfp8(one_block_each(np.array([below, at]))).dequantize()[:, 5]
    assert decoded.tolist() == [-(2.0**127) * 1.875, -float("inf")]


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_non_finite_element_poisons_its_block(bad, block):
    x = torch.randn(64, 64)
    x[3, 40] = bad
    quantized = quantize_mxfp8(x, block)
    finite = torch.isfinite(quantized.dequantize())
    rows = slice(0, 32) if block[0] == 32 else slice(3, 4)
    assert not finite[rows, 32:].any()
    assert int((~finite).sum()) == block[0] * 32
    assert (quantized.scales == 255).sum() == block[0]


def test_square_blocks_of_the_transpose_are_the_transpose():
    x = torch.from_numpy(tensors(64, 96)["student_t"])
    here, there = quantize_mxfp8(x, (32, 32)), quantize_mxfp8(x.t(), (32, 32))
    assert torch.equal(here.codes.float().t(), there.codes.float())
    assert torch.equal(here.dequantize().t(), there.dequantize())


@pytest.mark.parametrize("exponent", [-60, -1, 5, 60])
def test_a_power_of_two_scales_the_decoded_values_exactly(exponent):
    x = torch.from_numpy(tensors(32, 64)["student_t"])
    scaled = quantize_mxfp8(x * 2.0**exponent).dequantize()
    assert torch.equal(scaled, quantize_mxfp8(x).dequantize() * 2.0**exponent)


def test_decoded_values_decode_to_themselves():
    for block in BLOCKS:
        once = quantize_mxfp8(torch.from_numpy(tensors(64, 64)["student_t"]), block).dequantize()
        assert torch.equal(quantize_mxfp8(once, block).dequantize(), once)


def test_signal_to_noise_of_gaussians():
    x = torch.from_numpy(tensors(256, 256)["gauss"])
    for block in BLOCKS:
        assert abs(oracle.snr_db(x.numpy(), quantize_mxfp8(x, block).dequantize().double().numpy()) - 31.5) < 0.5


def test_wrong_arguments_are_refused_with_value_and_remedy():
    with pytest.raises(ValueError, match=r"\(1, 16\).*\(1, 32\), \(32, 32\)"):
        quantize_mxfp8(torch.randn(32, 32), (1, 16))
    with pytest.raises(ValueError, match=r"48 columns.*32; pad to 64 with zeros"):
        quantize_mxfp8(torch.randn(32, 48))
    with pytest.raises(ValueError, match=r"40 rows.*32; pad to 64 with zeros"):
        quantize_mxfp8(torch.randn(40, 32), (32, 32))
    with pytest.raises(TypeError, match=r"floating-point.*int32"):
        quantize_mxfp8(torch.ones(32, 32, dtype=torch.int32))
