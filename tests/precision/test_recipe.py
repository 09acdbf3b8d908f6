from dataclasses import replace

import pytest

from megatron_fp4.config.precision_schema import (
    DgradConfig,
    FpropConfig,
    OperandConfig,
    PrecisionConfig,
    SecondOperandConfig,
    WgradConfig,
)
from megatron_fp4.precision.recipe import BF16, DGRAD_GRADIENT, SLOTS, Operand, recipe_from_config, switched_recipe
from tests.composing import CONFIGS, composed
from tests.precision import reference as ref

NAMES = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
PUBLISHED = {
    "bf16": BF16,
    "nvfp4": ref.NVFP4,
    "mxfp4": ref.MXFP4,
    "mxfp8": ref.MXFP8,
    "fp8_block": replace(ref.FP8, name="fp8_block"),
    "nvfp4_nemotron_3": replace(ref.NVFP4, name="nvfp4_nemotron_3"),
    **{
        name: ref.changed(ref.NVFP4, name=name, fprop_activation=ref.SIX, fprop_weight=ref.SIX, dgrad_weight=ref.W)
        for name in ("nvfp4_4over6_1x16", "nvfp4_4over6_1x16_qkv_bf16", "nvfp4_best")
    },
    "nvfp4_quartet2": ref.QUARTET2,
    "nvfp4_all_the_way": replace(ref.ALL_THE_WAY, name="nvfp4_all_the_way"),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_recipes_of_the_configs_are_the_published_ones(name):
    assert recipe_from_config(composed(f"precision={name}").precision) == PUBLISHED[name]


def test_every_field_of_a_config_is_in_the_recipe():
    """No option is accepted and then ignored."""
    for index, slot in enumerate(SLOTS):
        given, source = ("fp8", "128x128", "stochastic", "squared"), "tensor"
        odd = OperandConfig(*given)
        if slot.key in ("dgrad.weight", "wgrad.activation"):
            odd, source = SecondOperandConfig(*given, "forward"), "forward"
        six = [odd if i == index else SecondOperandConfig("nvfp4", "1x16") for i in range(6)]
        config = PrecisionConfig(
            name="x",
            rht_signs="none",
            fp8_power_of_two_scales=True,
            fprop=FpropConfig(six[0], six[1], 2),
            dgrad=DgradConfig(six[2], six[3], 4),
            wgrad=WgradConfig(six[4], six[5], 8),
        )
        recipe = recipe_from_config(config)
        operand = Operand("fp8", (128, 128), "stochastic", "squared", True, source)
        assert recipe.operands == {key: operand if key == slot else ref.X for key in SLOTS}
        assert (recipe.name, recipe.rht_signs) == ("x", "none")
        assert (recipe.fprop.rht, recipe.dgrad.rht, recipe.wgrad.rht) == (2, 4, 8)


def test_a_switch_of_one_pass_leaves_the_other_which_then_has_1x16_weights():
    plain = {"fprop_activation": Operand(), "fprop_weight": Operand()}
    rows = ref.changed(ref.NVFP4, fprop_weight=ref.W, dgrad_weight=ref.W)
    assert switched_recipe(ref.NVFP4, BF16, "forward") == ref.changed(ref.NVFP4, name="nvfp4, forward bf16", **plain)
    for recipe in (ref.NVFP4, rows):
        assert switched_recipe(recipe, BF16, "backward") == replace(ref.QAF, name="nvfp4, backward bf16")
    to_fp8 = switched_recipe(ref.NVFP4, ref.FP8, "backward")
    assert (to_fp8[DGRAD_GRADIENT], to_fp8.fprop.left) == (ref.F8, ref.X)


@pytest.mark.parametrize("option, other", [("rht_signs", "fresh"), ("amax", "shard")])
def test_a_switch_of_one_pass_takes_signs_and_maxima_from_the_recipe_that_still_uses_them(option, other):
    nvfp4 = ref.changed(ref.NVFP4, fprop_rht=16)
    theirs = replace(nvfp4, **{option: other})
    assert getattr(switched_recipe(nvfp4, theirs, "both"), option) == other
    assert getattr(switched_recipe(theirs, nvfp4, "both"), option) == getattr(nvfp4, option)
    for scope in ("forward", "backward"):
        # If one of the two recipes is BF16, the other's value is taken.
        assert getattr(switched_recipe(BF16, theirs, scope), option) == other
        assert getattr(switched_recipe(theirs, BF16, scope), option) == other
        assert getattr(switched_recipe(theirs, theirs, scope), option) == other

    for scope in ("forward", "backward"):
        message = f"nvfp4 keeps precision.{option}={getattr(nvfp4, option)} and other has {other}, .*=both$"
        with pytest.raises(ValueError, match=message):
            switched_recipe(nvfp4, replace(theirs, name="other"), scope)
