"""Weights in square blocks: the codes of parts, cut anywhere, are those of the whole weight."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.formats import quantize
from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows

# Groups, rows of a group without and with padding, and where the weight is cut: between blocks, within a block, into
# parts that are smaller than a block, and so that some parts have no rows.
CUTS = {
    "anywhere": (1, 96, 96, [0, 41, 82, 96]),
    "smaller than a block": (1, 64, 64, [*range(0, 65, 7), 64]),
    "groups with padding": (4, 50, 64, [0, 67, 134, 200]),
    "groups that end with a padded block": (3, 40, 64, [0, 24, 48, 72, 96, 120]),
    "parts without rows": (1, 32, 32, [0, 11, 22, 32, 32]),
}


def weight(rows: int) -> Tensor:
    """BF16 [rows, 64] of many magnitudes, with a block of zeros, a negative zero and a number that is rounded to it."""
    generator = torch.Generator().manual_seed(rows)
    w = torch.randn(rows, 64, generator=generator) * torch.exp2(torch.randint(-9, 9, (rows, 1), generator=generator))
    w[:16, :32] = 0
    w[1, 40], w[2, 41] = -0.0, -1e-30
    return w.to(torch.bfloat16)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("name", CUTS)
def test_parts_with_shared_maxima_have_the_codes_of_the_whole(name: str, form: str) -> None:
    """The codes that the format's own quantizer makes of the whole padded weight, without the padding."""
    groups, group_rows, padded_rows, cuts = CUTS[name]
    w, size = weight(groups * group_rows), BLOCKS[form]
    padded = torch.nn.functional.pad(w.unflatten(0, (-1, group_rows)), (0, 0, 0, padded_rows - group_rows))
    expected = quantize(padded.flatten(0, 1), form, (size, size))
    codes, scales = (
        each.unflatten(0, (-1, padded_rows))[:, :group_rows].flatten(0, 1).contiguous()
        for each in (expected.codes, expected.scales.view(torch.uint8))
    )
    whole = RowBlocks(form, group_rows, padded_rows, 0, len(w))
    parts = [RowBlocks(form, group_rows, padded_rows, *ends) for ends in itertools.pairwise(cuts)]
    # The maximum of a block that several parts share is the largest of these parts' maxima.
    maxima = torch.zeros(whole.num_blocks, 64 // size)
    for part in parts:
        shared = maxima[part.first_block : part.first_block + part.num_blocks]
        torch.maximum(shared, block_maxima(w[part.first : part.end], part), out=shared)
    amax = w.abs().amax().float() if form == "nvfp4" else None
    codes_of_parts, scales_of_parts = [], []
    for part in parts:
        if part.num_blocks:
            shared = maxima[part.first_block : part.first_block + part.num_blocks]
            part_codes, part_scales = quantize_rows(w[part.first : part.end], part, shared, amax)
            codes_of_parts.append(part_codes)
            scales_of_parts.append(part_scales)
    assert torch.equal(torch.cat(codes_of_parts), codes)
    assert torch.equal(torch.cat(scales_of_parts), scales)
    assert torch.equal(unpack_rows(codes, scales, whole), expected.block_values().to(torch.bfloat16))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_element_makes_its_block_non_finite(value: float) -> None:
    w = weight(32)
    w[20, 5] = value
    blocks = RowBlocks("mxfp4", 32, 32, 0, 32)
    values = unpack_rows(*quantize_rows(w, blocks, block_maxima(w, blocks), None), blocks)
    assert not values[:, :32].isfinite().any()
    assert values[:, 32:].isfinite().all()
