"""The order of block scales for tensor cores."""

import pytest
import torch

from megatron_fp4.quantization.tensor import swizzle_scales, unswizzle_scales

SIZES = [(1, 1), (127, 3), (128, 4), (400, 17), (1040, 12)]


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
