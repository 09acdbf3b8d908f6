"""The order of block scales for tensor cores."""

import pytest
import torch

from megatron_fp4.quantization.tensor import swizzle_scales, unswizzle_scales


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (127, 3), (128, 4), (400, 17), (1040, 12)])
def test_swizzled_scales_have_transformer_engines_layout_and_unswizzling_inverts_it(rows, columns):
    """Transformer Engine writes swizzled scales with a layout of shape ((32, 4, row tiles), (4, column tiles)) and
    stride ((16, 4, column tiles * 512), (1, 512)); the first mode of each varies fastest.
    """
    generator, row_tiles, column_tiles = torch.Generator().manual_seed(rows), -(-rows // 128), -(-columns // 4)
    scales = torch.randint(1, 256, (rows, columns), generator=generator).to(torch.uint8)
    swizzled = swizzle_scales(scales)
    layout = swizzled.as_strided((row_tiles, 4, 32, column_tiles, 4), (column_tiles * 512, 4, 16, 512, 1))
    assert torch.equal(layout.reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns], scales)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        back = unswizzle_scales(swizzle_scales(scales.view(dtype)), rows, columns)
        assert back.dtype == dtype and torch.equal(back.view(torch.uint8), scales)
