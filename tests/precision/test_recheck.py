"""A linear that is computed again by the reference: what is found, whose turn it is, and that nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.emulated import EMULATED, EmulatedBackend, GemmOperand, OperandRequest, quantize_operand
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, SLOTS, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.verify import Recheck, Rechecked, operand_fault
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.rounding import rounding_key
from tests.precision import reference as ref
from tests.recipes import changed
from tests.training.harness import alone

CPU = torch.device("cpu")
ONE_SIDED = changed(ref.NVFP4, dgrad_gradient=Operand(), dgrad_weight=Operand())


def context_of(recipe: Recipe, backend=EMULATED, **settings) -> LinearContext:
    return LinearContext("blocks.0.mixer.in_proj", recipe, StepState(seed=1), backend, **settings)


def rechecked(context: LinearContext, x: Tensor, w: Tensor, dy: Tensor, step: int = 0) -> Rechecked:
    """Two micro-batches of a step under the watcher."""
    recheck = Recheck(1, {context.name: context}, CPU)
    with alone():
        backend = context.backend
        with recheck.watching(step):
            for context.clock.micro_batch in (3, 7):
                ref.run(x, w, dy, context)
        assert context.backend is backend
        found = recheck.collect()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("recipe", "comparisons"),
    [
        (ref.NVFP4, 5 + 3),  # dgrad borrows the codes of fprop's weight
        (ref.MXFP4, 6 + 3),
        (ref.FP8, 5 + 3),
        (ref.ALL_THE_WAY, 6 + 3),
        (ref.QUARTET2, 6 + 3),
        (ref.QAF, 2 + 1),
        (ONE_SIDED, 4 + 2),
        (replace(ref.NVFP4, rht_signs="fresh"), 5 + 3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_emulation_is_the_reference(recipe, comparisons, dtype):
    context = context_of(recipe, num_groups=3)
    context.out_group_offset = 1
    x, w, dy = ref.tensors(128, 256, 3 * 80, dtype=dtype)
    found = rechecked(context, x, w, dy)
    assert found.faults == [] and found.comparisons == comparisons


def test_codes_that_were_kept_are_made_again_and_seen():
    context = context_of(ref.NVFP4)
    x, w, dy = ref.tensors(32, 64, 48)
    expected = ref.run(x, w, dy, context)
    kept = context.weight_cache
    assert kept is not None
    assert rechecked(context, x, w, dy).comparisons == 8
    context.clock.micro_batch = 0
    for mine, theirs in zip(ref.run(x, w, dy, context), expected, strict=True):
        assert torch.equal(mine, theirs)


class Spoiled(EmulatedBackend):
    """The emulation with one operand (by its label) or one product (its number) spoiled."""

    def __init__(self, operand: str = "", spoil=lambda made: made, gemm: int | None = None) -> None:
        self.operand, self.spoil, self.number, self.calls = operand, spoil, gemm, 0

    def operands(self, x, columns, rows, **settings):
        made = super().operands(x, columns, rows, **settings)

        def spoiled(maker, request):
            return lambda: self.spoil(maker()) if request.slot.name == self.operand else maker()

        pairs = zip(made, (columns, rows), strict=True)
        return tuple(maker and spoiled(maker, request) for maker, request in pairs)

    def gemm(self, a, b, out_dtype, total=None, rows=None):
        product = super().gemm(a, b, out_dtype, total, rows)
        self.calls += 1
        return self.spoil(product) if self.calls - 1 == self.number else product


def flipped(made):
    values = made.unpacked().clone()
    row, column = divmod(int(values.abs().argmax()), values.shape[1])
    values[row, column] *= -1
    return replace(made, values=values)


@pytest.mark.parametrize("name", [slot.name for slot in SLOTS])
def test_one_wrong_code_in_any_operand_is_found(name):
    context = context_of(ref.ALL_THE_WAY, Spoiled(name, flipped))
    found = rechecked(context, *ref.tensors(32, 64, 48))
    assert len(found.faults) == 1
    assert found.faults[0].startswith(f"rank 0: {name}: values differ in 1 of ")


def test_a_wrong_tensor_scale_is_found():
    context = context_of(ref.NVFP4, Spoiled("wgrad_activation", lambda made: replace(made, scale=made.scale * 3)))
    (fault,) = rechecked(context, *ref.tensors(32, 64, 48)).faults
    assert "wgrad_activation: tensor scale differ in 1 of 1" in fault


def test_draws_of_another_key_are_found():
    class OtherDraws(EmulatedBackend):
        def operands(self, x, columns, rows, **settings):
            if rows is not None and rows.key is not None:
                rows = replace(rows, key=replace(rows.key, row_offset=1))
            return super().operands(x, columns, rows, **settings)

    (fault,) = rechecked(context_of(ref.NVFP4, OtherDraws()), *ref.tensors(32, 64, 48)).faults
    assert "wgrad_gradient: values differ" in fault


@pytest.mark.parametrize(("number", "name"), [(0, "fprop"), (1, "dgrad"), (2, "wgrad")])
def test_a_wrong_product_is_found(number, name):
    context = context_of(ref.NVFP4, Spoiled(spoil=lambda product: product * 1.02, gemm=number))
    (fault,) = rechecked(context, *ref.tensors(32, 64, 48)).faults
    assert fault.startswith(f"rank 0: {name} product: relative error 2.00e-02")


def test_the_rows_of_products_take_turns():
    """One wrong row of 96 is met in one of a linear's first two turns, of 64 rows each."""

    def one_row(product: Tensor) -> Tensor:
        product = product.clone()
        product[2] = 0
        return product

    x, w, dy = ref.tensors(96, 64, 48)
    found = [
        len(rechecked(context_of(ref.NVFP4, Spoiled(spoil=one_row, gemm=0)), x, w, dy, step).faults) for step in (0, 1)
    ]
    assert sum(found) == 1


def test_nan_that_disappears_is_found():
    x, w, dy = ref.tensors(32, 64, 48)
    x[5, 7] = float("nan")
    assert rechecked(context_of(ref.NVFP4), x, w, dy).faults == []
    hidden = Spoiled(
        "fprop_activation", lambda made: replace(made, values=made.values.nan_to_num(), scale=made.scale.nan_to_num())
    )
    (fault, *_) = rechecked(context_of(ref.NVFP4, hidden), x, w, dy).faults
    assert "fprop_activation: is finite although it was made of NaN or inf" in fault


def test_nothing_but_zeros_is_no_fault():
    x, w, dy = ref.tensors(32, 64, 48)
    assert rechecked(context_of(ref.NVFP4), x * 0, w, dy * 0).faults == []


def test_a_recomputed_forward_is_no_second_comparison():
    context = context_of(ref.NVFP4)
    x, w, dy = (t.requires_grad_() for t in ref.tensors(32, 64, 48))
    recheck = Recheck(1, {context.name: context}, CPU)
    with alone():
        with recheck.watching(0):
            y = torch.utils.checkpoint.checkpoint(quantized_linear, x, w, context, use_reentrant=False)
            y.backward(dy.detach())
        found = recheck.collect()
    assert found is not None and found.comparisons == 8 and found.faults == []


def test_whose_turn_it_is():
    names = [f"blocks.{i}.mixer.up_proj" for i in range(4)]
    linears = {name: LinearContext(name, BF16 if name == names[1] else ref.NVFP4) for name in names}
    recheck = Recheck(10, linears, CPU)
    due = [recheck.due(step) for step in range(0, 50, 10)]
    assert due == [(names[0], 0), (names[2], 0), (names[3], 0), (names[0], 1), (names[2], 1)]
    assert recheck.due(11) is None and Recheck(0, linears, CPU).due(0) is None
    for context in linears.values():
        context.recipe = BF16
    assert recheck.due(0) is None
    with recheck.watching(0):
        assert all(context.backend is EMULATED for context in linears.values())
    assert recheck.collect() is None


def test_a_report_is_one_line():
    found = Rechecked("blocks.0.mixer.in_proj", 9, 8, ["rank 1: a", "rank 1: b"])
    assert str(found) == "recheck of blocks.0.mixer.in_proj in step 10: rank 1: a (and 1 more)"
    assert "8 comparisons with the reference, no difference" in str(replace(found, faults=[]))


# ------------------------------------------------------------------- operands whose draws and transforms are their own

ROW, DRAWN = Operand("nvfp4", (1, 16)), Operand("nvfp4", (1, 16), "stochastic")
KEY = rounding_key("its own")


def native(rows: Tensor, operand: Operand, rht: int = 0) -> te.NativeOperand:
    """What a native quantizer with its own draws, and its own order of sums in the transform, may make of `rows`."""
    if rht:
        # Another order: a matrix product in double precision, rounded once.
        eye = random_hadamard_transform(torch.eye(rht, dtype=torch.float64), rht, fixed_signs(rht))
        rows = (rows.double().unflatten(-1, (-1, rht)) @ eye).flatten(-2).bfloat16()
    quantized = quantize_nvfp4(rows, rounding=operand.rounding, key=KEY if operand.rounding == "stochastic" else None)
    layout = te._Layout(operand, "columns", dict, ())
    return te.NativeOperand(quantized.codes, quantized.scales.view(torch.uint8), quantized.amax.view(1), layout)


def request_of(operand: Operand, rht: int) -> OperandRequest:
    key = rounding_key("ours") if operand.rounding == "stochastic" else None
    return OperandRequest(operand, rht, "fixed", key, None, "x")


def rows_of(size: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # Values of unlike size, so that sums are not exact.
    return (torch.randn(size, 256, generator=generator) * torch.randn(size, 256, generator=generator).exp()).bfloat16()


@pytest.mark.parametrize("rht", [0, 16])
@pytest.mark.parametrize("operand", [ROW, DRAWN], ids=str)
def test_native_operands_may_draw_and_add_up_by_themselves(operand, rht):
    rows = rows_of()
    assert operand_fault(native(rows, operand, rht), rows, request_of(operand, rht), None) == ""


@pytest.mark.parametrize("operand", [ROW, DRAWN], ids=str)
def test_only_behind_a_transform_values_may_be_one_step_of_bf16_off(operand):
    rows = rows_of()
    after = random_hadamard_transform(rows, 16, fixed_signs(16))
    step = torch.randint(-1, 2, after.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    moved = (after.view(torch.int16) + step).view(torch.bfloat16)
    assert operand_fault(native(moved, operand), rows, request_of(operand, 16), None) == ""
    assert operand_fault(native(moved, operand), after, request_of(operand, 0), None) != ""


@pytest.mark.parametrize("rht", [0, 16])
@pytest.mark.parametrize("operand", [ROW, DRAWN], ids=str)
@pytest.mark.parametrize("part", ["codes", "scales", "amax", "rounding"])
def test_wrong_native_operands_are_found(operand, rht, part):
    rows = rows_of()
    made = native(rows, operand, rht)
    if part == "codes":
        # The code of the largest value of a block becomes zero.
        codes = made.data.clone()
        at = int((codes.view(-1) & 0xF == 7).nonzero()[0])
        codes.view(-1)[at] &= 0xF0
        made = replace(made, data=codes)
    elif part == "scales":
        scales = made.scales.clone()
        scales[3, 5] -= 8  # half
        made = replace(made, scales=scales)
    elif part == "amax":
        made = replace(made, amax=made.amax * 1.02)
    elif operand is DRAWN:
        made = native(rows.roll(1, 0), operand, rht)
    else:
        made = replace(native(rows, DRAWN, rht), layout=made.layout)
    fault = operand_fault(made, rows, request_of(operand, rht), None)
    assert fault.split(" ")[0] in {part, "codes", "scales"}, fault
    if part != "rounding":
        assert fault.startswith(part) or (part == "amax" and fault), fault


def test_a_native_operand_without_draws_or_transform_must_have_the_reference_bits():
    rows = rows_of()
    made = native(rows, ROW)
    scales = made.scales.clone()
    scales[3, 5] += 1
    fault = operand_fault(replace(made, scales=scales), rows, request_of(ROW, 0), None)
    assert fault.startswith("scales differ in 1 of")


def test_large_operands_are_compared_piece_by_piece(monkeypatch):
    """Draws and blocks of a piece are those of the whole."""
    monkeypatch.setattr("megatron_fp4.precision.verify._CHUNK_ELEMENTS", 1)
    rows = rows_of(384)
    for operand, rht in ((DRAWN, 16), (Operand("nvfp4", (16, 16)), 0), (Operand("fp8", (128, 128)), 0)):
        request = request_of(operand, rht)
        signs = fixed_signs(rht) if rht else None
        made = quantize_operand(rows, operand, rht=rht, signs=signs, key=request.key)
        assert operand_fault(made, rows, request, None) == ""
        wrong = made.unpacked().clone()
        wrong[300, 0] += 1
        fault = operand_fault(replace(made, values=wrong), rows, request, None)
        assert "first at [300, 0]" in fault
    made = native(rows, DRAWN)
    at = int((made.data[256:].reshape(-1) & 0xF == 7).nonzero()[0]) + 256 * 128
    made.data.view(-1)[at] &= 0xF0
    fault = operand_fault(made, rows, request_of(DRAWN, 0), None)
    assert fault.startswith(f"codes differ in 1 of 32768, first at [{at // 128}, {at % 128 * 2}]: 0 for ")


@pytest.mark.parametrize("rht", [0, 16])
@pytest.mark.parametrize("operand", [ROW, DRAWN], ids=str)
@pytest.mark.parametrize("is_native", [False, True])
def test_an_operand_is_decoded_once_however_many_pieces_it_has(is_native, operand, rht, monkeypatch):
    monkeypatch.setattr("megatron_fp4.precision.verify._CHUNK_ELEMENTS", 1)
    rows, request = rows_of(384), request_of(operand, rht)
    kind, method = (te.NativeOperand, "decoded") if is_native else (GemmOperand, "unpacked")
    made: object = native(rows, operand, rht)
    if not is_native:
        made = quantize_operand(rows, operand, rht=rht, signs=fixed_signs(rht) if rht else None, key=request.key)
    decode, decoded = getattr(kind, method), []
    monkeypatch.setattr(kind, method, lambda self: decoded.append(self) or decode(self))
    assert operand_fault(made, rows, request, None) == ""
    assert len(decoded) == 1
