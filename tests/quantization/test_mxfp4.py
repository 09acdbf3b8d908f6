import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize_mxfp4, rounding_key
from tests.quantization import oracle
from tests.quantization.cases import NAMES, check_unbiased, codes_of, tensors

BLOCKS = [(1, 32), (32, 32)]


def exponents(quantized) -> np.ndarray:
    return quantized.scales.reshape(-1, quantized.scales.shape[-1]).numpy()


def check_against_oracle(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...] | None = None) -> None:
    expected = oracle.mxfp4(values, block[0])
    quantized = quantize_mxfp4(torch.from_numpy(values).reshape(shape or values.shape), block)
    assert np.array_equal(exponents(quantized), np.log2(expected.scales) + 127)
    assert np.array_equal(codes_of(quantized), expected.codes)
    with np.errstate(over="ignore"):  # 4 * 2^126 is beyond single precision
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
    quantized = quantize_mxfp4(torch.from_numpy(values).reshape(shape))
    assert quantized.shape == shape
    assert quantized.scales.shape == (*shape[:-1], shape[-1] // 32)


def test_scales_are_rounded_up_around_every_power_of_two():
    centers = 6 * np.exp2(np.arange(-120, 120.0))
    for move in (0, 1, -1):
        amax = centers.astype(np.float32)
        for _ in range(abs(move)):
            amax = np.nextafter(amax, np.float32(np.inf * move))
        x = np.zeros((len(amax), 32), dtype=np.float32)
        x[:, 5] = -amax
        quantized = quantize_mxfp4(torch.from_numpy(x))
        expected = np.arange(-120, 120) + (move > 0) + 127
        assert exponents(quantized)[:, 0].tolist() == expected.tolist()
        check_against_oracle(x, (1, 32))


def test_nothing_saturates():
    for name in ("gauss", "student_t", "wide", "integer"):
        x = torch.from_numpy(tensors(32, 96)[name])
        quantized = quantize_mxfp4(x)
        unit = np.exp2(exponents(quantized).repeat(32, axis=1) - 127.0)
        assert (np.abs(x.numpy()) <= 6 * unit).all()
        assert (np.abs(x.numpy() - quantized.dequantize().double().numpy()) <= unit).all()


def test_zero_blocks_and_signs_of_zeros():
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([6.0, -0.0, -0.1, 0.1])
    quantized = quantize_mxfp4(x)
    assert codes_of(quantized)[0, :5].tolist() == [7, 0, 8, 0, 0]
    assert exponents(quantized)[0].tolist() == [127, 0]
    assert not quantized.dequantize()[0, 32:].any()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_non_finite_element_poisons_its_block(bad, block):
    for rounding in ("nearest", "stochastic"):
        x = torch.randn(64, 64)
        x[3, 40] = bad
        quantized = quantize_mxfp4(x, block, rounding, key=rounding_key(0))
        finite = torch.isfinite(quantized.dequantize())
        rows = slice(0, 32) if block[0] == 32 else slice(3, 4)
        assert not finite[rows, 32:].any()
        assert int((~finite).sum()) == block[0] * 32


def test_square_blocks_of_the_transpose_are_the_transpose():
    x = torch.from_numpy(tensors(64, 96)["student_t"])
    here, there = quantize_mxfp4(x, (32, 32)), quantize_mxfp4(x.t(), (32, 32))
    assert np.array_equal(codes_of(here).T, codes_of(there))
    assert torch.equal(here.dequantize().t(), there.dequantize())


@pytest.mark.parametrize("exponent", [-60, -1, 5, 60])
def test_a_power_of_two_scales_the_decoded_values_exactly(exponent):
    x = torch.from_numpy(tensors(32, 64)["student_t"])
    scaled = quantize_mxfp4(x * 2.0**exponent).dequantize()
    assert torch.equal(scaled, quantize_mxfp4(x).dequantize() * 2.0**exponent)


def test_decoded_values_decode_to_themselves():
    for block in BLOCKS:
        once = quantize_mxfp4(torch.from_numpy(tensors(64, 64)["student_t"]), block).dequantize()
        assert torch.equal(quantize_mxfp4(once, block).dequantize(), once)


def test_signal_to_noise_of_gaussians_is_below_that_of_nvfp4():
    x = torch.from_numpy(tensors(256, 256)["gauss"])
    for block, decibels in (((1, 32), 18.7), ((32, 32), 16.4)):
        decoded = quantize_mxfp4(x, block).dequantize().double().numpy()
        assert abs(oracle.snr_db(x.numpy(), decoded) - decibels) < 0.4


def test_stochastic_rounding_is_unbiased_and_takes_its_slice_of_the_draws():
    x = torch.from_numpy(tensors(64, 64)["student_t"])
    num = 1000
    total = torch.zeros(64, 64, dtype=torch.float64)
    for step in range(num):
        total += quantize_mxfp4(x, rounding="stochastic", key=rounding_key(step)).dequantize().double()
    unit = np.repeat(oracle.mxfp4(x.numpy()).scales, 32, axis=1)
    check_unbiased(total.numpy() / num, x.double().numpy(), unit, num)
    whole = quantize_mxfp4(x, rounding="stochastic", key=rounding_key(1))
    shard = quantize_mxfp4(x[32:, 32:], rounding="stochastic", key=rounding_key(1, row_offset=32, column_offset=32))
    assert np.array_equal(codes_of(shard), codes_of(whole)[32:, 32:])


def test_wrong_arguments_are_refused_with_value_and_remedy():
    with pytest.raises(ValueError, match=r"\(1, 16\).*\(1, 32\), \(32, 32\)"):
        quantize_mxfp4(torch.randn(32, 32), (1, 16))
    with pytest.raises(ValueError, match=r"48 columns.*32; pad to 64 with zeros"):
        quantize_mxfp4(torch.randn(32, 48))
    with pytest.raises(ValueError, match=r"40 rows.*32; pad to 64 with zeros"):
        quantize_mxfp4(torch.randn(40, 32), (32, 32))
    with pytest.raises(ValueError, match="'floor' is not 'nearest' or 'stochastic'"):
        quantize_mxfp4(torch.randn(32, 32), rounding="floor")
    with pytest.raises(TypeError, match=r"floating-point.*int32"):
        quantize_mxfp4(torch.ones(32, 32, dtype=torch.int32))
