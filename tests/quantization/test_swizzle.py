"""The layout of block scales against its formula, and against the layout that Transformer Engine states."""

import pytest
import torch

from megatron_fp4.quantization.tensor import swizzle_scales, swizzled_size, unswizzle_scales

SIZES = [(1, 1), (16, 1), (127, 3), (128, 4), (129, 5), (32, 9), (400, 17), (256, 64), (1040, 12)]


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_every_scale_is_where_the_formula_says_and_the_rest_is_zero(rows, columns):
    scales, width = random_bytes(rows, columns), -(-columns // 4) * 4
    swizzled = swizzle_scales(scales)
    seen = torch.zeros_like(swizzled, dtype=torch.bool)
    for r in range(rows):
        for c in range(columns):
            at = ((r // 128) * (width // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert swizzled[at] == scales[r, c]
            seen[at] = True
    assert swizzled.numel() == swizzled_size(rows, columns) == -(-rows // 128) * 128 * width
    assert not swizzled[~seen].any()


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


def test_a_transposed_view_is_read_as_it_is():
    scales = random_bytes(48, 160)
    assert torch.equal(swizzle_scales(scales.t()), swizzle_scales(scales.t().contiguous()))


def test_misuse():
    for wrong in (torch.ones(4, 4), torch.ones(16, dtype=torch.uint8), torch.ones(0, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="no matrix of one-byte block scales"):
            swizzle_scales(wrong)
    with pytest.raises(ValueError, match=r"is not that of 129 x 4 scales in tiles, \(1024,\)"):
        unswizzle_scales(torch.zeros(512, dtype=torch.uint8), 129, 4)
