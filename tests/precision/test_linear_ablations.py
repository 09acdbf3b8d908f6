"""Every knob of a recipe changes the GEMMs that it names, as it says, and no other."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.precision.recipe import BF16, Operand, Recipe
from tests.precision import reference as ref
from tests.quantization import oracle
from tests.recipes import changed

FLAT = changed(ref.NVFP4, fprop_weight=ref.W, dgrad_weight=ref.W)
ROTATED = changed(FLAT, dgrad_rht=128, wgrad_rht=128, rht_signs="fresh")
PLAIN = changed(ref.NVFP4, wgrad_rht=0)
SIX = Operand("nvfp4", (1, 16), four_over_six=True)
NEAREST_DY = Operand("nvfp4", (1, 16))
SHAPE = (128, 128, 128)


def operand_changes(recipe: Recipe, names: str, **changes) -> Recipe:
    operands = {slot.name: replace(operand, **changes) for slot, operand in recipe.operands.items()}
    return changed(recipe, **{name: operands[name] for name in names.split()})


KNOBS = {
    # knob: (before, after, which of y, dx and dw change)
    "fprop rht 16": (ref.NVFP4, changed(ref.NVFP4, fprop_rht=16), "y"),
    "fprop rht 128": (FLAT, changed(FLAT, fprop_rht=128), "y"),
    "dgrad rht 2": (ref.NVFP4, changed(ref.NVFP4, dgrad_rht=2), "dx"),
    "dgrad rht 64": (ref.NVFP4, changed(ref.NVFP4, dgrad_rht=64), "dx"),
    "wgrad rht off": (ref.NVFP4, PLAIN, "dw"),
    "wgrad rht 4": (ref.NVFP4, changed(ref.NVFP4, wgrad_rht=4), "dw"),
    "wgrad rht 128": (ref.NVFP4, changed(ref.NVFP4, wgrad_rht=128), "dw"),
    "no signs": (ref.NVFP4, replace(ref.NVFP4, rht_signs="none"), "dw"),
    "fresh signs": (ref.NVFP4, replace(ref.NVFP4, rht_signs="fresh"), "dw"),
    "fresh signs without a transform": (PLAIN, replace(PLAIN, rht_signs="fresh"), ""),
    "nearest in dgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "dgrad_gradient", rounding="nearest"), "dx"),
    "nearest in wgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "wgrad_gradient", rounding="nearest"), "dw"),
    "stochastic x in fprop": (ref.NVFP4, operand_changes(ref.NVFP4, "fprop_activation", rounding=ref.SR), "y"),
    "stochastic x in wgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "wgrad_activation", rounding=ref.SR), "dw"),
    "stochastic w in fprop": (ref.NVFP4, operand_changes(ref.NVFP4, "fprop_weight", rounding=ref.SR), "y"),
    "stochastic w in dgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "dgrad_weight", rounding=ref.SR), "dx"),
    "1x16 weights": (ref.NVFP4, FLAT, "y dx"),
    "1x16 weights in fprop": (ref.NVFP4, changed(ref.NVFP4, fprop_weight=ref.W), "y"),
    "16x16 activations": (ref.NVFP4, operand_changes(ref.NVFP4, "fprop_activation", block=(16, 16)), "y"),
    "16x16 gradients in dgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "dgrad_gradient", block=(16, 16)), "dx"),
    "4/6 of x in fprop": (ref.NVFP4, operand_changes(ref.NVFP4, "fprop_activation", four_over_six=True), "y"),
    "4/6 of x in wgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "wgrad_activation", four_over_six=True), "dw"),
    "4/6 of dy in wgrad": (ref.NVFP4, operand_changes(ref.NVFP4, "wgrad_gradient", four_over_six=True), "dw"),
    "4/6 of w": (ref.NVFP4, operand_changes(ref.NVFP4, "fprop_weight dgrad_weight", four_over_six=True), "y dx"),
    "w of dgrad as fprop": (FLAT, operand_changes(FLAT, "dgrad_weight", source="codes"), "dx"),
    "16x16 w of dgrad as fprop": (ref.NVFP4, operand_changes(ref.NVFP4, "dgrad_weight", source="codes"), ""),
    "x of wgrad as fprop": (PLAIN, operand_changes(PLAIN, "wgrad_activation", source="codes"), "dw"),
    "4/6 by squares": (
        operand_changes(FLAT, "fprop_weight fprop_activation", four_over_six=True),
        operand_changes(FLAT, "fprop_weight fprop_activation", four_over_six=True, four_over_six_error="squared"),
        "y",
    ),
    "w of dgrad from codes": (FLAT, operand_changes(FLAT, "dgrad_weight", source="forward"), "dx"),
    "x of wgrad from codes": (FLAT, operand_changes(FLAT, "wgrad_activation", source="forward"), "dw"),
    "MS-EDEN of dy in dgrad": (ROTATED, operand_changes(ROTATED, "dgrad_gradient", rounding="ms_eden"), "dx"),
    "MS-EDEN of w": (ROTATED, operand_changes(ROTATED, "dgrad_weight", rounding="ms_eden"), "dx"),
    "MS-EDEN of dy in wgrad": (ROTATED, operand_changes(ROTATED, "wgrad_gradient", rounding="ms_eden"), "dw"),
    "MS-EDEN of x": (ROTATED, operand_changes(ROTATED, "wgrad_activation", rounding="ms_eden"), "dw"),
    "powers of two of w": (
        ref.FP8,
        operand_changes(ref.FP8, "fprop_weight dgrad_weight", power_of_two_scales=True),
        "y dx",
    ),
    "powers of two of dy": (
        ref.FP8,
        operand_changes(ref.FP8, "dgrad_gradient wgrad_gradient", power_of_two_scales=True),
        "dx dw",
    ),
    "bf16 x in wgrad": (ref.NVFP4, changed(ref.NVFP4, wgrad_activation=Operand()), "dw"),
    "bf16 forward": (ref.NVFP4, changed(ref.NVFP4, fprop_activation=Operand(), fprop_weight=Operand()), "y"),
    "bf16 backward": (FLAT, replace(ref.QAF, name="qaf"), "dx dw"),
    "the name": (ref.NVFP4, replace(ref.NVFP4, name="another"), ""),
}


@pytest.fixture(scope="module")
def operands():
    x, w, dy = ref.tensors(*SHAPE)
    x[:, ::7] *= 20  # unequal channels, so that every choice of blocks matters
    return x, w, dy


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_changes_what_it_names_and_nothing_else(knob, operands):
    before, after, changed = KNOBS[knob]
    results = [ref.run(*operands, ref.context_of(recipe)) for recipe in (before, after)]
    exact = ref.linear(*(ref.double(t) for t in operands), BF16)
    for name, old, new, full in zip(("y", "dx", "dw"), *results, exact, strict=True):
        if name in changed.split():
            assert oracle.snr_db(ref.double(old), ref.double(new)) < 60, f"{name} did not change"
        else:
            assert torch.equal(old, new), f"{name} changed"
        assert oracle.snr_db(full, ref.double(new)) > 8


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("size", [2, 8, 16, 32, 128])
def test_transforms_of_every_size_cancel(gemm, size, operands):
    """A transformed GEMM is the oracle's, and close to the exact one: both operands took the same signs."""
    for signs in ("fixed", "none", "fresh"):
        recipe = ref.nearest(changed(FLAT, wgrad_rht=0, rht_signs=signs))
        recipe = changed(recipe, **{f"{gemm}_rht": size})
        context = ref.context_of(recipe)
        context.step_state.micro_batch = 3
        results = dict(zip(("fprop", "dgrad", "wgrad"), ref.run(*operands, context), strict=True))
        exact = dict(zip(results, ref.linear(*(ref.double(t) for t in operands), BF16), strict=True))
        assert oracle.snr_db(exact[gemm], ref.double(results[gemm])) > 12
        if signs == "fixed":
            expected = dict(zip(results, ref.linear(*(ref.double(t) for t in operands), recipe), strict=True))
            # A transform's BF16 rounding may fall the other way on a tie that single precision cannot see.
            assert oracle.snr_db(expected[gemm], ref.double(results[gemm])) > 60


def test_fresh_signs_change_with_the_call_and_fixed_ones_do_not(operands):
    for signs, same in (("fixed", True), ("none", True), ("fresh", False)):
        recipe = ref.nearest(replace(ref.NVFP4, rht_signs=signs))
        results = []
        for step, micro_batch in ((0, 0), (0, 1), (1, 0)):
            context = ref.context_of(recipe)
            context.step_state.step, context.step_state.micro_batch = step, micro_batch
            results.append(ref.run(*operands, context)[2])
        assert torch.equal(results[0], results[1]) == same
        assert torch.equal(results[0], results[2]) == same
        assert torch.equal(results[1], results[2]) == same
