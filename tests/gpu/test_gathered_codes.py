"""Weights as 4-bit codes on a GPU: kernels against the reference on a CPU, bit for bit."""

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows
from tests.gpu import INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def normal(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator)


# Rows and columns, rows of a group without and with padding, the part's first row and the row after its last.
PARTS = {
    "all rows": (192, 608, 192, 192, 0, 192),
    "cut in blocks": (192, 608, 192, 192, 41, 150),
    "less than a block": (64, 96, 64, 64, 17, 25),
    "a part of groups": (200, 256, 50, 64, 67, 134),
}
if not INTERPRETED:
    PARTS["large"] = (2836, 5120, 2836, 2848, 0, 2836)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("part", PARTS)
def test_kernels(form: str, part: str) -> None:
    rows, columns, group_rows, padded, first, end = PARTS[part]
    for scale, dtype in ((1.0, torch.float32), (1e-33, torch.bfloat16), (1e-39, torch.float32), (1e36, torch.bfloat16)):
        w = normal(rows, columns) * torch.exp2(torch.arange(rows) % 13 - 6.0)[:, None] * scale
        w[:16, :32] = 0
        w[1, 1], w[2, 2] = -0.0, -1e-45
        check(w.to(dtype), RowBlocks(form, group_rows, padded, first, end), f"{part}, {scale}")


def check(w: Tensor, blocks: RowBlocks, what: str) -> None:
    """Compare all three passes over the part's rows, with the maxima of all rows."""
    rounded, part = w.to(torch.bfloat16), slice(blocks.first, blocks.end)
    all_blocks = RowBlocks(blocks.format, blocks.group_rows, blocks.padded_group_rows, 0, len(w))
    all_maxima = block_maxima(rounded, all_blocks)
    assert torch.equal(block_maxima(w.cuda(), all_blocks).cpu(), all_maxima), what
    assert torch.equal(block_maxima(w[part].cuda(), blocks).cpu(), block_maxima(rounded[part], blocks)), what
    maxima = all_maxima[blocks.first_block : blocks.first_block + blocks.num_blocks]
    amax = rounded.abs().amax().float() if blocks.format == "nvfp4" else None
    expected = quantize_rows(rounded[part], blocks, maxima, amax)
    found = quantize_rows(w[part].cuda(), blocks, maxima.cuda(), None if amax is None else amax.cuda())
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)), what
    codes, scales = quantize_rows(rounded, all_blocks, all_maxima, amax)
    values = unpack_rows(codes.cuda(), scales.cuda(), all_blocks)
    assert torch.equal(values.cpu(), unpack_rows(codes, scales, all_blocks)), what


@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_that_are_not_finite(form: str) -> None:
    """Scales and values are the reference's; codes do not matter if their scale is NaN."""
    w, blocks = normal(96, 96).bfloat16(), RowBlocks(form, 96, 96, 0, 96)
    w[3, 5], w[40, 70] = float("inf"), float("nan")
    amax = w.abs().amax().float() if form == "nvfp4" else None
    maxima = block_maxima(w, blocks)
    assert torch.equal(block_maxima(w.cuda(), blocks).cpu().nan_to_num(-1.0), maxima.nan_to_num(-1.0))
    expected = quantize_rows(w, blocks, maxima, amax)
    found = quantize_rows(w.cuda(), blocks, maxima.cuda(), None if amax is None else amax.cuda())
    assert torch.equal(found[1].cpu(), expected[1])
    values, others = unpack_rows(*found, blocks).cpu(), unpack_rows(*expected, blocks)
    assert torch.equal(values.nan_to_num(-1.0), others.nan_to_num(-1.0)) and values.isnan().any()
