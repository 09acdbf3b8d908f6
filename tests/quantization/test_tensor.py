import re

import pytest
import torch

from megatron_fp4.quantization import NVFP4Tensor, QuantizedTensor, quantize_fp8, quantize_mxfp4, quantize_nvfp4
from megatron_fp4.quantization.elements import pack_codes
from megatron_fp4.quantization.tensor import as_rows, block_amax

CODES = torch.tensor([[1, 9, 7, 15, *range(12)]], dtype=torch.uint8)
VALUES = [0.5, -0.5, 6, -6, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5]


def test_nvfp4_by_hand():
    """With a maximum of 2688 = 6 * 448 a value is code times scale."""
    tensor = NVFP4Tensor(
        pack_codes(CODES), torch.tensor([[2.0]]).to(torch.float8_e4m3fn), (1, 16), torch.tensor(5376.0)
    )
    assert tensor.shape == (1, 16)
    assert tensor.block_values().tolist() == [[2 * v for v in VALUES]]
    assert tensor.dequantize().tolist() == [[4 * v for v in VALUES]]
    assert tensor.decode_scale() == 2
    four = NVFP4Tensor(tensor.codes, tensor.scales, (1, 16), torch.tensor(1536.0), scale_max=256.0)
    assert four.dequantize().tolist() == [[2 * v for v in VALUES]]
    assert tensor.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_mxfp4_by_hand():
    tensor = QuantizedTensor(
        pack_codes(torch.cat([CODES, CODES], 1)), torch.tensor([[130]], dtype=torch.uint8), (1, 32)
    )
    assert tensor.shape == (1, 32)
    assert tensor.dequantize().tolist() == [[8 * v for v in VALUES * 2]]


def test_fp8_by_hand():
    codes = torch.arange(256.0).reshape(2, 128).clamp(max=16).to(torch.float8_e4m3fn)
    tensor = QuantizedTensor(codes, torch.tensor([[0.5], [0.25]]), (1, 128))
    assert tensor.shape == (2, 128)
    assert tensor.dequantize().tolist() == [[0.5 * min(i, 16) for i in range(128)], [4.0] * 128]


def test_scales_belong_to_consecutive_columns():
    codes = pack_codes(torch.full((2, 32), 2, dtype=torch.uint8))
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn)
    values = NVFP4Tensor(codes, scales, (1, 16), torch.tensor(2688.0)).dequantize()
    assert values.tolist() == [[1.0] * 16 + [2.0] * 16, [4.0] * 16 + [8.0] * 16]


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (1, 32), (32, 32), (1, 128), (128, 128)])
def test_block_maxima_are_replicated_over_the_rows_of_a_block(block):
    x = torch.randn(128, 256)
    x[17, 40] = float("nan")
    actual = block_amax(x, block)
    assert actual.shape == (128, 256 // block[1])
    for row in range(0, 128, 13):
        for column in range(actual.shape[1]):
            top = row // block[0] * block[0]
            tile = x[top : top + block[0], column * block[1] : (column + 1) * block[1]].abs()
            expected = tile.amax()
            assert torch.equal(actual[row, column], expected) or (expected.isnan() and actual[row, column].isnan())


def test_rows_are_flattened_leading_dimensions_in_single_precision():
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    rows = as_rows(x, (1, 16), "here")
    assert rows.dtype == torch.float32
    assert torch.equal(rows, x.float().reshape(6, 32))
    with pytest.raises(ValueError, match=r"here: 6 rows \(shape \(2, 3, 32\)\) are not a multiple of the block's 16"):
        as_rows(x, (16, 16), "here")


@pytest.mark.parametrize("quantize", [quantize_nvfp4, quantize_mxfp4, quantize_fp8])
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 128)])
def test_empty_tensors_are_refused(quantize, shape):
    message = rf"{quantize.__name__}: shape {re.escape(str(shape))} has no elements.*skip empty tensors"
    with pytest.raises(ValueError, match=message):
        quantize(torch.empty(shape))
