import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize_nvfp4, rounding_key
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from tests.quantization import oracle
from tests.quantization.cases import NAMES, check_unbiased, close_in_single, codes_of, scales_of, tensors

BLOCKS = [(1, 16), (16, 16)]
INF, NAN = float("inf"), float("nan")


def check_against_oracle(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...] | None = None) -> None:
    expected = oracle.nvfp4(values, block[0])
    quantized = quantize_nvfp4(torch.from_numpy(values).reshape(shape or values.shape), block)
    assert np.array_equal(scales_of(quantized), expected.scales)
    assert np.array_equal(codes_of(quantized), expected.codes)
    assert quantized.amax.item() == expected.amax
    assert close_in_single(quantized.dequantize(), expected.values)
    block_values = quantized.block_values().double().numpy().reshape(values.shape)
    assert np.array_equal(block_values, oracle.E2M1[expected.codes] * np.repeat(expected.scales, 16, axis=1))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_scales_and_values_are_those_of_the_oracle(name, block):
    for seed in range(3):
        check_against_oracle(tensors(32, 64, seed)[name], block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(16, 16), (1, 16, 16), (2, 3, 16, 32), (4, 8, 48), (16, 240)])
def test_leading_dimensions_are_rows(shape, block):
    rows = int(np.prod(shape[:-1]))
    values = tensors(rows, shape[-1])["student_t"]
    check_against_oracle(values, block, shape)
    quantized = quantize_nvfp4(torch.from_numpy(values).reshape(shape), block)
    assert quantized.shape == shape
    assert quantized.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert quantized.scales.shape == (*shape[:-1], shape[-1] // 16)
    assert quantized.dequantize().shape == shape
    assert quantized.codes.dtype == torch.uint8
    assert quantized.scales.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_quantized_as_their_single_precision_values(dtype):
    x = torch.from_numpy(tensors(16, 32)["gauss"]).to(dtype)
    expected = oracle.nvfp4(x.float().numpy())
    assert np.array_equal(codes_of(quantize_nvfp4(x)), expected.codes)
    assert quantize_nvfp4(x).dequantize(dtype).dtype == dtype


def test_strided_input():
    x = torch.from_numpy(tensors(64, 32)["gauss"])
    assert np.array_equal(codes_of(quantize_nvfp4(x.t())), codes_of(quantize_nvfp4(x.t().contiguous())))
    vector = quantize_nvfp4(x[0])
    assert vector.shape == (32,)


def tensors_that_differ(monkeypatch, name: str, variant, num: int = 400) -> list[np.ndarray]:
    """Tensors for which the oracle with one function replaced gives other codes or scales.

    Integers: their ratios lie exactly half way between codes often enough.
    """
    rng = np.random.default_rng(5)
    found = []
    for _ in range(num):
        values = rng.integers(-400, 401, (16, 64)).astype(np.float32)
        values[0, 0] = 448 + rng.integers(500)
        right = oracle.nvfp4(values)
        with monkeypatch.context() as patch:
            patch.setattr(oracle, name, variant)
            wrong = oracle.nvfp4(values)
        if not (np.array_equal(right.codes, wrong.codes) and np.array_equal(right.scales, wrong.scales)):
            found.append(values)
    return found


def test_the_tensor_scale_is_a_true_division(monkeypatch):
    def reciprocal_first(amax, cap=448):
        return np.float32(1) / amax * np.float32(6 * cap)

    found = tensors_that_differ(monkeypatch, "tensor_scale", reciprocal_first)
    assert len(found) >= 3  # this test would otherwise show nothing
    for values in found:
        check_against_oracle(values, (1, 16))


def test_the_sixth_is_folded_into_the_tensor_scale(monkeypatch):
    def divide_first(block_amax, tensor_scale):
        return block_amax / np.float32(6) * tensor_scale

    found = tensors_that_differ(monkeypatch, "wanted_scale", divide_first)
    assert len(found) >= 3
    for values in found:
        check_against_oracle(values, (1, 16))


def test_tensor_scale_of_many_maxima():
    rng = np.random.default_rng(1)
    amax = np.exp(rng.uniform(-100, 88, 5000)).astype(np.float32)
    for cap in (448.0, 256.0):
        with np.errstate(over="ignore", divide="ignore"):
            expected = np.array([oracle.tensor_scale(a, cap) for a in amax])
        actual = torch.stack([encode_tensor_scale(a, cap) for a in torch.from_numpy(amax)])
        assert np.array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("block", BLOCKS)
def test_all_zero_tensor(block):
    quantized = quantize_nvfp4(torch.zeros(16, 32), block)
    assert not quantized.codes.any()
    assert not quantized.scales.float().any()
    assert quantized.amax == 0
    assert torch.equal(quantized.dequantize(), torch.zeros(16, 32))


def test_signs_of_zeros():
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([6.0, -0.0, -0.1, 0.1, -6.0, -1e-30])
    assert codes_of(quantize_nvfp4(x))[0, :6].tolist() == [7, 0, 8, 0, 15, 8]
    assert not torch.signbit(quantize_nvfp4(x).dequantize()[0, 1])


def test_a_block_whose_scale_underflows_keeps_saturated_codes_and_decodes_to_zero():
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    x[0, 16:19] = torch.tensor([1e-7, -1e-8, 0.0])
    quantized = quantize_nvfp4(x)
    assert quantized.scales.float().tolist() == [[448.0, 0.0]]
    assert codes_of(quantized)[0, 16:20].tolist() == [7, 15, 0, 0]
    assert not quantized.dequantize()[0, 16:].any()


def test_the_tensor_scale_is_not_floored_for_tiny_gradients():
    x = torch.from_numpy(tensors(32, 64)["gauss"])
    for exponent in (-30, -60, -90):
        tiny = quantize_nvfp4(x * 2.0**exponent)
        assert oracle.snr_db((x * 2.0**exponent).numpy(), tiny.dequantize().double().numpy()) > 19


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("four_over_six", [False, True])
def test_one_non_finite_element_poisons_everything_that_is_decoded(bad, block, four_over_six):
    for x in (torch.randn(16, 64), torch.zeros(16, 64)):
        x[3, 40] = bad
        for rounding in ("nearest", "stochastic"):
            quantized = quantize_nvfp4(x, block, rounding, key=rounding_key(0), four_over_six=four_over_six)
            assert not torch.isfinite(quantized.amax)
            assert not torch.isfinite(quantized.dequantize()).any()


def test_a_finite_shared_maximum_does_not_hide_nan():
    x = torch.randn(4, 64)
    x[1, 20] = NAN
    decoded = quantize_nvfp4(x, amax=torch.tensor(5.0)).dequantize()
    assert decoded[1, 16:32].isnan().all()


def test_a_shared_maximum_gives_a_shard_the_codes_of_the_whole():
    x = torch.from_numpy(tensors(32, 64)["student_t"])
    whole = quantize_nvfp4(x)
    for rows, columns in ((slice(0, 16), slice(0, 64)), (slice(0, 32), slice(32, 64))):
        shard = quantize_nvfp4(x[rows, columns], amax=x.abs().max())
        assert np.array_equal(codes_of(shard), codes_of(whole)[rows, columns])
        assert torch.equal(shard.dequantize(), whole.dequantize()[rows, columns])


def test_wrong_arguments_are_refused_with_value_and_remedy():
    x = torch.randn(16, 32)
    with pytest.raises(ValueError, match=r"\(2, 16\).*\(1, 16\), \(16, 16\)"):
        quantize_nvfp4(x, (2, 16))
    with pytest.raises(ValueError, match=r"'up'.*'nearest' or 'stochastic'"):
        quantize_nvfp4(x, rounding="up")
    with pytest.raises(ValueError, match=r"33 columns \(shape \(16, 33\)\).*16; pad to 48 with zeros"):
        quantize_nvfp4(torch.randn(16, 33))
    with pytest.raises(ValueError, match=r"20 rows \(shape \(4, 5, 32\)\).*16; pad to 32 with zeros"):
        quantize_nvfp4(torch.randn(4, 5, 32), (16, 16))
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        quantize_nvfp4(torch.ones(16, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match="scalar"):
        quantize_nvfp4(torch.tensor(1.0))


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("name", ["gauss", "student_t", "wide", "halfway", "sparse", "subnormal"])
def test_square_blocks_of_the_transpose_are_the_transpose(name, four_over_six):
    x = torch.from_numpy(tensors(64, 48)[name])
    here = quantize_nvfp4(x, (16, 16), four_over_six=four_over_six)
    there = quantize_nvfp4(x.t(), (16, 16), four_over_six=four_over_six)
    assert np.array_equal(codes_of(here).T, codes_of(there))
    assert torch.equal(here.dequantize().t(), there.dequantize())
    assert np.array_equal(scales_of(here)[::16].T, scales_of(there)[::16])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("exponent", [-40, -3, 1, 40, 92, 93, 107, 108, 109, 110, 120])
def test_a_power_of_two_scales_the_decoded_values_exactly(block, exponent, four_over_six):
    x = torch.from_numpy(tensors(32, 64)["student_t"])
    assert 2**7 < x.abs().max() < 2**8
    plain, scaled = (quantize_nvfp4(t, block, four_over_six=four_over_six) for t in (x, x * 2.0**exponent))
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scales.view(torch.uint8), scaled.scales.view(torch.uint8))
    assert torch.equal(plain.dequantize() * 2.0**exponent, scaled.dequantize())


@pytest.mark.parametrize("four_over_six", [False, True])
def test_the_largest_finite_number_is_decoded(four_over_six):
    x = torch.tensor([[torch.finfo(torch.float32).max, -1e38, 1e38, *[0.0] * 13]])
    decoded = quantize_nvfp4(x, four_over_six=four_over_six).dequantize()
    assert torch.isfinite(decoded).all()
    torch.testing.assert_close(decoded, x, rtol=0.15, atol=0)


def test_decoded_values_are_divided_last_wherever_that_is_finite():
    """Bit for bit `code * scale * amax / 2688`, up to where the product overflows."""
    x = torch.from_numpy(tensors(32, 64)["gauss"])
    for exponent in range(-149, 128, 3):
        quantized = quantize_nvfp4(x, amax=torch.tensor(1.7 * 2.0**exponent))
        product = quantized.block_values() * quantized.amax
        finite = product.isfinite()
        expected = product / torch.tensor(2688.0)
        assert torch.equal(quantized.dequantize()[finite], expected[finite])


def test_a_capped_tensor_scale_lets_tiny_tensors_decode_too_small():
    """Below an amax of 2688 / FLT_MAX = 7.9e-36 the encode scale is capped, the decode scale is not (as specified)."""
    x = torch.from_numpy(tensors(32, 64)["gauss"])
    for amax in (8e-36, 4e-36, 1e-36):
        tiny = x / x.abs().max() * amax
        shrunk = quantize_nvfp4(tiny).dequantize().abs().max().item() / amax
        assert shrunk == pytest.approx(min(1, amax * 3.4028e38 / 2688), rel=0.1)


def test_negation_flips_the_sign_bits():
    x = torch.from_numpy(tensors(16, 64)["gauss"])
    assert np.array_equal(codes_of(quantize_nvfp4(-x)), codes_of(quantize_nvfp4(x)) ^ 8)
    assert torch.equal(quantize_nvfp4(-x).dequantize(), -quantize_nvfp4(x).dequantize())


@pytest.mark.parametrize("block", BLOCKS)
def test_decoded_values_quantize_to_themselves(block):
    """Where the largest element of each block took the code of 6 (else the block's scale may shrink)."""
    x = torch.from_numpy(tensors(64, 64)["gauss"]).clone()
    once = quantize_nvfp4(x, block)
    twice = quantize_nvfp4(once.dequantize(), block, amax=once.amax)
    magnitude = codes_of(once) & 7
    tiles = magnitude.reshape(64 // block[0], block[0], 4, 16)
    full = (tiles.max(axis=(1, 3)) == 7).repeat(block[0], axis=0).repeat(16, axis=1)
    assert full.mean() > 0.9
    positive_zero = np.where(codes_of(once) == 8, 0, codes_of(once))
    assert np.array_equal(positive_zero[full], codes_of(twice)[full])
    assert torch.equal(once.dequantize()[torch.from_numpy(full)], twice.dequantize()[torch.from_numpy(full)])


@pytest.mark.parametrize("block", BLOCKS)
def test_no_element_errs_by_more_than_its_interval(block):
    """Half the widest spacing (1 of 6), plus what a scale rounded down clips (1/16 of 6), of the block's scale."""
    for name in ("gauss", "student_t", "integer", "sparse"):
        x = tensors(64, 64)[name]
        quantized = quantize_nvfp4(torch.from_numpy(x), block)
        unit = np.repeat(scales_of(quantized), 16, axis=1) * quantized.amax.item() / 2688
        error = np.abs(x - quantized.dequantize().double().numpy())
        assert (error <= 1.0001 * unit + 2.0**-9 * 6 * quantized.amax.item() / 2688).all()


def test_signal_to_noise_of_gaussians():
    x = torch.from_numpy(tensors(256, 256)["gauss"])
    known = {((1, 16), False): 20.6, ((16, 16), False): 19.1, ((1, 16), True): 21.2, ((16, 16), True): 19.1}
    for (block, four_over_six), decibels in known.items():
        decoded = quantize_nvfp4(x, block, four_over_six=four_over_six).dequantize()
        assert abs(oracle.snr_db(x.numpy(), decoded.double().numpy()) - decibels) < 0.3
    stochastic = quantize_nvfp4(x, rounding="stochastic", key=rounding_key(0)).dequantize()
    assert 16.5 < oracle.snr_db(x.numpy(), stochastic.double().numpy()) < 18.5


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_four_over_six_is_the_oracle_and_no_block_is_worse_than_the_plain_choice(name, block):
    x = tensors(32, 64)[name]
    expected = oracle.nvfp4(x, block[0], four_over_six=True)
    quantized = quantize_nvfp4(torch.from_numpy(x), block, four_over_six=True)
    assert quantized.scale_max == 256
    assert np.array_equal(scales_of(quantized), expected.scales)
    assert np.array_equal(codes_of(quantized), expected.codes)
    # Against both choices in double precision; sums of single-precision errors may differ in their last digits.
    six = oracle.nvfp4(x, block[0], four_over_six=True, never_four=True)
    ours, plain = (oracle.block_error(x, values, block[0]) for values in (expected.values, six.values))
    assert (ours <= plain * (1 + 1e-5) + 1e-44).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_four_over_six_prefers_six_on_ties_and_four_where_it_is_better(block):
    exact_in_both = torch.zeros(16, 16)
    exact_in_both[:, 0] = 4.0
    quantized = quantize_nvfp4(exact_in_both, block, four_over_six=True)
    assert codes_of(quantized)[0, 0] == 7
    assert quantized.scales.float().unique().tolist() == [256.0]
    better_in_four = torch.zeros(16, 16)
    better_in_four[:, :2] = torch.tensor([4.0, 3.0])
    quantized = quantize_nvfp4(better_in_four, block, four_over_six=True)
    assert codes_of(quantized)[0, :2].tolist() == [6, 5]
    assert quantized.scales.float().unique().tolist() == [384.0]
    assert torch.equal(quantized.dequantize(), better_in_four)


def test_four_over_six_uses_both_choices():
    x = torch.from_numpy(tensors(64, 256)["gauss"])
    highest = (codes_of(quantize_nvfp4(x, four_over_six=True)) & 7).reshape(64, 16, 16).max(axis=2)
    assert 0.1 < (highest == 6).mean() < 0.9


@pytest.mark.parametrize("block", BLOCKS)
def test_stochastic_rounding_takes_neighbours_and_is_unbiased(block):
    x = tensors(16, 64)["student_t"]
    scales = oracle.nvfp4(x, block[0])
    unit = np.repeat(scales.scales, 16, axis=1) * scales.amax / 2688
    clipped = np.clip(x, -6 * unit, 6 * unit)
    num = 2000
    total = np.zeros_like(unit)
    for step in range(num):
        quantized = quantize_nvfp4(torch.from_numpy(x), block, "stochastic", key=rounding_key(step))
        assert np.array_equal(scales_of(quantized), scales.scales)
        values = oracle.E2M1[codes_of(quantized)] * unit
        total += values
    check_unbiased(total / num, clipped, unit, num)
    distance = np.abs(values - clipped) / unit
    assert distance.max() < 2
    assert (distance[np.abs(clipped / unit) < 2] <= 0.5 + 1e-6).all()


def test_stochastic_rounding_of_tiny_gradients_is_not_all_zero():
    x = torch.full((64, 64), 1e-12)
    x[:, 0] = 3e-11  # the rest lies at a fifth, far below the first code
    quantized = quantize_nvfp4(x, rounding="stochastic", key=rounding_key(0)).dequantize()
    others = quantized[:, 1:16]
    assert 0.3 < (others > 0).float().mean() < 0.5
    assert abs(others.mean().item() / 1e-12 - 1) < 0.1
    assert not quantize_nvfp4(x).dequantize()[:, 1:16].any()


def test_stochastic_shards_take_their_slice_of_the_draws():
    x = torch.from_numpy(tensors(32, 64)["gauss"])
    whole = quantize_nvfp4(x, rounding="stochastic", key=rounding_key(1))
    key = rounding_key(1, row_offset=16, column_offset=32)
    shard = quantize_nvfp4(x[16:, 32:], rounding="stochastic", key=key, amax=x.abs().max())
    assert np.array_equal(codes_of(shard), codes_of(whole)[16:, 32:])
    unplaced = quantize_nvfp4(x[16:, 32:], rounding="stochastic", key=rounding_key(1), amax=x.abs().max())
    assert not np.array_equal(codes_of(unplaced), codes_of(whole)[16:, 32:])


def test_without_a_key_stochastic_rounding_follows_torch():
    x = torch.randn(16, 64)
    torch.manual_seed(1)
    first, second = (quantize_nvfp4(x, rounding="stochastic").codes for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(quantize_nvfp4(x, rounding="stochastic").codes, first)
    assert not torch.equal(first, second)
