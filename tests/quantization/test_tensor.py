"""What quantizers return, by hand; maxima of blocks; the order of block scales for tensor cores."""

import pytest
import torch

from megatron_fp4.quantization import NVFP4Tensor, QuantizedTensor
from megatron_fp4.quantization.elements import pack_codes
from megatron_fp4.quantization.tensor import block_amax, swizzle_scales, unswizzle_scales

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


SIZES = [(1, 1), (16, 1), (127, 3), (128, 4), (129, 5), (32, 9), (400, 17), (256, 64), (1040, 12)]


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_it_is_transformer_engines_layout(rows, columns):
    """Transformer Engine writes its swizzled scales through a layout of shape ((32, 4, row tiles), (4, column tiles))
    and stride ((16, 4, column tiles * 512), (1, 512)), the first mode of each the fastest.
    """
    scales, row_tiles, column_tiles = random_bytes(rows, columns), -(-rows // 128), -(-columns // 4)
    layout = swizzle_scales(scales).as_strided((row_tiles, 4, 32, column_tiles, 4), (column_tiles * 512, 4, 16, 512, 1))
    assert torch.equal(layout.reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns], scales)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_the_inverse_is_exact(rows, columns, dtype):
    scales = random_bytes(rows, columns).view(dtype)
    back = unswizzle_scales(swizzle_scales(scales), rows, columns)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))
