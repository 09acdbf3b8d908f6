"""Weights in square blocks: the codes of parts, cut anywhere, are those of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.formats import quantize
from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows
from megatron_fp4.quantization.tensor import QuantizedTensor

# Groups, rows of one without and with padding, and where its rows are cut: at blocks, within one, into pieces that are
# smaller than a block, and so that some parts have no rows.
CUTS = {
    "anywhere": (1, 96, 96, [0, 41, 82, 96]),
    "smaller than a block": (1, 64, 64, [*range(0, 65, 7), 64]),
    "groups with padding": (4, 50, 64, [0, 67, 134, 200]),
    "groups that end with a padded block": (3, 40, 64, [0, 24, 48, 72, 96, 120]),
    "parts without rows": (1, 32, 32, [0, 11, 22, 32, 32]),
}


def weight(rows: int) -> Tensor:
    """BF16, of many magnitudes, with a block of zeros, negative zeros and numbers that round to them."""
    generator = torch.Generator().manual_seed(rows)
    w = torch.randn(rows, 64, generator=generator) * torch.exp2(torch.randint(-9, 9, (rows, 1), generator=generator))
    w[:16, :32] = 0
    w[1, 40], w[2, 41] = -0.0, -1e-30
    return w.to(torch.bfloat16)


def padded(w: Tensor, group_rows: int, padded_rows: int) -> Tensor:
    return torch.nn.functional.pad(w.unflatten(0, (-1, group_rows)), (0, 0, 0, padded_rows - group_rows)).flatten(0, 1)


def expected(w: Tensor, form: str, group_rows: int, padded_rows: int) -> tuple[QuantizedTensor, Tensor, Tensor]:
    """The padded whole by the format's own quantizer, and its codes and scales without padding."""
    size = BLOCKS[form]
    made = quantize(padded(w, group_rows, padded_rows), form, (size, size))
    parts = (made.codes, made.scales.view(torch.uint8))
    codes, scales = (part.unflatten(0, (-1, padded_rows))[:, :group_rows].flatten(0, 1) for part in parts)
    return made, codes, scales


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("name", CUTS)
def test_parts_with_shared_maxima_make_the_codes_of_the_whole(name: str, form: str) -> None:
    groups, group_rows, padded_rows, cuts = CUTS[name]
    w = weight(groups * group_rows)
    made, codes, scales = expected(w, form, group_rows, padded_rows)
    blocks = [RowBlocks(form, group_rows, padded_rows, *ends) for ends in itertools.pairwise(cuts)]
    parts = [w[of.first : of.end] for of in blocks]
    # Every part's maxima, and of a block that several parts share the largest of theirs.
    maxima = [block_maxima(part, of) for part, of in zip(parts, blocks, strict=True)]
    together: dict[int, Tensor] = {}
    for of, found in zip(blocks, maxima, strict=True):
        for i, largest in enumerate(found):
            known = together.get(of.first_block + i)
            together[of.first_block + i] = largest if known is None else torch.maximum(known, largest)
    shared = [
        torch.stack([together[of.first_block + i] for i in range(of.num_blocks)]) if of.num_blocks else found
        for of, found in zip(blocks, maxima, strict=True)
    ]
    amax = w.abs().amax().float() if form == "nvfp4" else None
    rows = [
        quantize_rows(part, of, largest, amax)
        for part, of, largest in zip(parts, blocks, shared, strict=True)
        if of.num_blocks
    ]
    assert torch.equal(torch.cat([part[0] for part in rows]), codes)
    assert torch.equal(torch.cat([part[1] for part in rows]), scales)
    values = unpack_rows(codes.contiguous(), scales.contiguous(), RowBlocks(form, group_rows, padded_rows, 0, len(w)))
    assert torch.equal(values, made.block_values().to(torch.bfloat16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_poisons_its_block(bad: float) -> None:
    w = weight(32)
    w[20, 5] = bad
    blocks = RowBlocks("mxfp4", 32, 32, 0, 32)
    values = unpack_rows(*quantize_rows(w, blocks, block_maxima(w, blocks), None), blocks)
    assert not values[:, :32].isfinite().any()
    assert values[:, 32:].isfinite().all()
