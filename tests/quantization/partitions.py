"""Parts of a tensor, each quantized at its place, against the whole tensor: for the PyTorch quantizers and for the
kernels, on any device."""

import torch
from torch import Tensor

from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EMULATED, GemmOperand, codes_transpose, side_of
from megatron_fp4.precision.recipe import SLOTS
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import WHOLE, Place, Span, rounding_key
from tests.precision.reference import RECIPES

Case = tuple[OperandRequest, bool]  # and whether the operand is the transposed tensor


def cases() -> dict[str, Case]:
    """Every quantized operand of the recipes, without those whose scales follow from all rows."""
    found = {}
    for recipe in RECIPES.values():
        for slot in SLOTS:
            operand, rht = recipe[slot], recipe.gemms[slot.gemm].rht
            by_column = operand.quantized and format_of(operand.format).scope == "column"
            if operand.quantized and operand.source == "tensor" and not by_column:
                key = rounding_key("draws") if operand.drawn else None
                request = OperandRequest(operand, rht, recipe.rht_signs, key, rounding_key("signs") if rht else None)
                transform = f", {recipe.rht_signs} transform of {rht}" if rht else ""
                found[f"{operand}{transform}{', transposed' if slot.transposed else ''}"] = request, slot.transposed
    return found


CASES = cases()


def unit_of(case: Case) -> int:
    """Rows of a complete block: a partition has to keep them together."""
    request, transposed = case
    multiple = format_of(request.operand.format).multiple(request.operand.block)
    return max(multiple, request.rht) if transposed else request.operand.block[0]


def tensor(case: Case, device: str) -> Tensor:
    """Some rows and columns in BF16. The first half of the columns is equal in all rows and has the largest magnitude,
    also after a transform in either direction: so every part has the maximum of the whole."""
    request, transposed = case
    width = max(format_of(request.operand.format).multiple(request.operand.block), 0 if transposed else request.rht)
    x = torch.randn(3 * max(32, unit_of(case)), 2 * width, generator=torch.Generator().manual_seed(0))
    x[:, :width] = torch.arange(width) % 7 / 7
    x[:, 0] = 1024
    return x.bfloat16().to(device)


def made(x: Tensor, place: Place, case: Case, keep: bool = False) -> GemmOperand:
    request, transposed = case
    kept = OperandRequest(request.operand, request.rht, request.signs, request.key, request.signs_key, keep=keep)
    makers = EMULATED.operands(x, place, *((None, kept) if transposed else (kept, None)))
    return makers[transposed]()  # type: ignore[misc]


def parts_of(num_rows: int, unit: int) -> dict[str, list[Tensor]]:
    """Partitions of the rows, by indices."""
    blocks = torch.arange(num_rows).view(-1, unit)
    thirds = blocks.unflatten(0, (3, -1))
    shuffled = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1))]
    return {
        "contiguous": [thirds[0].flatten(), thirds[1:].flatten()],
        "shuffled": [part.flatten() for part in shuffled.split(2 * len(blocks) // 3)],
    }


def check_parts(case: Case, device: str) -> None:
    """Parts have the codes of the whole: contiguous ones, whose place is their first row, and all, with an index. At
    another place they have not, if codes are drawn."""
    (request, transposed), x = case, tensor(case, device)
    whole = made(x, WHOLE, case).unpacked().cpu()
    for name, parts in parts_of(len(x), unit_of(case)).items():
        for keep, part in enumerate(parts):
            index, expected = part.to(device), whole[:, part] if transposed else whole[part]
            for at in (index, int(part[0])) if name == "contiguous" else (index,):
                assert torch.equal(made(x[index], Place(Span(at)), case, bool(keep)).unpacked().cpu(), expected), name
            if request.operand.drawn and name == "contiguous" and part[0] > 0:
                assert not torch.equal(made(x[index], WHOLE, case).unpacked().cpu(), expected)


def kernels_take(case: Case) -> bool:
    """Whether kernels make the operand, on a GPU."""
    request, transposed = case
    along = "rows" if transposed and not codes_transpose(request) else "columns"
    return format_of(request.operand.format).kernels(side_of(request), along) is not None
