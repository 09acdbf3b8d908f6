import numpy as np
import pytest
import torch

from megatron_fp4.quantization import quantize_fp8, rounding_key
from tests.quantization import oracle
from tests.quantization.cases import NAMES, close_in_single, tensors

BLOCKS = [(1, 128), (128, 128)]


def check_against_oracle(
    values: np.ndarray, block: tuple[int, int], power_of_two: bool, shape: tuple[int, ...] | None = None
) -> None:
    expected = oracle.fp8(values, block[0], power_of_two)
    x = torch.from_numpy(values).reshape(shape or values.shape)
    quantized = quantize_fp8(x, block, power_of_two_scales=power_of_two)
    assert np.array_equal(quantized.codes.double().numpy().reshape(values.shape), expected.codes)
    scales = quantized.scales.numpy().reshape(expected.scales.shape)
    nonzero = np.abs(expected.codes).reshape(len(values), -1, 128).max(axis=2) > 0
    assert np.array_equal(scales[nonzero], expected.scales[nonzero])
    assert np.isfinite(scales).all()
    assert close_in_single(quantized.dequantize(), expected.values, ulps=1)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_scales_and_values_are_those_of_the_oracle(name, block, power_of_two):
    check_against_oracle(tensors(128, 256, 4)[name], block, power_of_two)


@pytest.mark.parametrize("shape", [(2, 2, 32, 128), (1, 128, 256)])
def test_leading_dimensions_are_rows(shape):
    values = tensors(int(np.prod(shape[:-1])), shape[-1])["student_t"]
    for block in BLOCKS:
        check_against_oracle(values, block, False, shape)
    quantized = quantize_fp8(torch.from_numpy(values).reshape(shape))
    assert quantized.shape == shape
    assert quantized.scales.shape == (*shape[:-1], shape[-1] // 128)
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.scales.dtype == torch.float32


def test_powers_of_two_are_rounded_down_and_off_by_default():
    x = torch.from_numpy(tensors(4, 256)["gauss"])
    plain, rounded = quantize_fp8(x), quantize_fp8(x, power_of_two_scales=True)
    encode = 1 / rounded.scales.double()
    assert torch.equal(encode.log2(), encode.log2().round())
    assert not torch.equal(plain.scales, rounded.scales)
    assert (rounded.scales >= plain.scales * (1 - 1e-6)).all()
    assert (rounded.scales < 2 * plain.scales).all()


def test_the_largest_element_of_a_block_takes_448():
    x = torch.from_numpy(tensors(64, 256)["student_t"])
    codes = quantize_fp8(x).codes.float().reshape(64, 2, 128)
    assert torch.equal(codes.abs().amax(-1), torch.full((64, 2), 448.0))


def test_zero_blocks():
    x = torch.zeros(2, 256)
    x[1, 130] = 3.0
    quantized = quantize_fp8(x)
    assert quantized.scales[0].tolist() == [1, 1]
    assert torch.equal(quantized.dequantize() != 0, x != 0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_non_finite_element_poisons_its_block(bad, block):
    for rounding in ("nearest", "stochastic"):
        for power_of_two in (False, True):
            x = torch.randn(128, 256)
            x[3, 140] = bad
            quantized = quantize_fp8(x, block, rounding, key=rounding_key(0), power_of_two_scales=power_of_two)
            finite = torch.isfinite(quantized.dequantize())
            assert not finite[slice(3, 4) if block[0] == 1 else slice(None), 128:].any()
            assert int((~finite).sum()) == block[0] * 128


def test_square_blocks_of_the_transpose_are_the_transpose():
    x = torch.from_numpy(tensors(128, 256)["student_t"])
    here, there = quantize_fp8(x, (128, 128)), quantize_fp8(x.t(), (128, 128))
    assert torch.equal(here.codes.float().t(), there.codes.float())
    assert torch.equal(here.dequantize().t(), there.dequantize())


def test_signal_to_noise_of_gaussians():
    x = torch.from_numpy(tensors(128, 512)["gauss"])
    for block in BLOCKS:
        for power_of_two in (False, True):
            decoded = quantize_fp8(x, block, power_of_two_scales=power_of_two).dequantize().double().numpy()
            assert 31 < oracle.snr_db(x.numpy(), decoded) < 33


def test_stochastic_rounding_is_unbiased_between_neighbours_down_to_subnormals():
    x = torch.zeros(1024, 128)
    x[:, 0] = 448.0
    points = torch.tensor(
        [447.0, 300.1, 17.3, 1.03, 0.0171, 2.0**-6 * 1.01, 2.0**-7 * 1.1, 0.3 * 2.0**-9, 1.5 * 2.0**-9]
    )
    points = torch.cat([points, -points])
    x[:, 1 : 1 + len(points)] = points
    quantized = quantize_fp8(x, rounding="stochastic", key=rounding_key(0))
    assert quantized.scales.unique().tolist() == [1.0]
    values = quantized.dequantize().double()[:, 1 : 1 + len(points)]
    table = np.concatenate([-oracle.E4M3[::-1], oracle.E4M3])
    for column, point in enumerate(points.double().tolist()):
        low, high = table[table <= point].max(), table[table >= point].min()
        assert set(values[:, column].unique().tolist()) <= {low, high}
        share = (point - low) / (high - low)
        assert abs(values[:, column].mean().item() - point) < 4 * (high - low) * (share * (1 - share) / 1024) ** 0.5


def test_stochastic_rounding_leaves_the_grid_alone_and_takes_its_slice_of_the_draws():
    grid = torch.from_numpy(np.concatenate([oracle.E4M3, [-448.0]])).float()[None]
    rounded = quantize_fp8(grid, rounding="stochastic", key=rounding_key(2))
    assert torch.equal(rounded.codes.float(), grid)
    x = torch.from_numpy(tensors(64, 256)["gauss"])
    whole = quantize_fp8(x, rounding="stochastic", key=rounding_key(2))
    shard = quantize_fp8(x[32:, 128:], rounding="stochastic", key=rounding_key(2, row_offset=32, column_offset=128))
    assert torch.equal(shard.codes.float(), whole.codes.float()[32:, 128:])
    other = quantize_fp8(x, rounding="stochastic", key=rounding_key(3))
    assert not torch.equal(other.codes.float(), whole.codes.float())


def test_wrong_arguments_are_refused_with_value_and_remedy():
    with pytest.raises(ValueError, match=r"\(1, 32\).*\(1, 128\), \(128, 128\)"):
        quantize_fp8(torch.randn(128, 128), (1, 32))
    with pytest.raises(ValueError, match=r"96 columns.*128; pad to 128 with zeros"):
        quantize_fp8(torch.randn(128, 96))
    with pytest.raises(ValueError, match=r"100 rows.*128; pad to 128 with zeros"):
        quantize_fp8(torch.randn(100, 128), (128, 128))
    with pytest.raises(ValueError, match="'ceil' is not 'nearest' or 'stochastic'"):
        quantize_fp8(torch.randn(1, 128), rounding="ceil")
    with pytest.raises(TypeError, match=r"floating-point.*bool"):
        quantize_fp8(torch.ones(1, 128, dtype=torch.bool))
