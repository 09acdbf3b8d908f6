import pytest
import torch

import megatron_fp4.precision.emulated as emulated
from megatron_fp4.config.precision_schema import (
    Bf16BlocksConfig,
    ComposedException,
    DgradConfig,
    FpropConfig,
    RecipeConfig,
    SecondOperandConfig,
    WgradConfig,
)
from megatron_fp4.logging.console import plan_table
from megatron_fp4.precision.linear import LinearContext
from megatron_fp4.precision.plan import LinearShape, Plan, PrecisionController, build_plan
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT
from megatron_fp4.precision.rng import StepState
from tests.composing import composed, plans_of
from tests.precision import reference as ref

NUM_BLOCKS = 6
_M8 = SecondOperandConfig("mxfp8", "1x32")
RECIPES = {
    "bf16": RecipeConfig(),
    "mxfp8": RecipeConfig(
        "mxfp8", fprop=FpropConfig(_M8, _M8), dgrad=DgradConfig(_M8, _M8), wgrad=WgradConfig(_M8, _M8)
    ),
}
LAST = {
    **{f"4.{name}": ("bf16", "block 4 is one of the last 2") for name in ("in_proj", "out_proj")},
    **{f"5.{name}": ("bf16", "block 5 is one of the last 2") for name in ("up_proj", "down_proj")},
}


def shapes() -> list[LinearShape]:
    """Two linears in each of six blocks; the odd blocks are feed-forward."""
    mixer, ffn = (("in_proj", 64, 160), ("out_proj", 64, 64)), (("up_proj", 64, 256), ("down_proj", 256, 64))
    return [
        LinearShape(f"blocks.{block}.mixer.{name}", block, a, b, letter)
        for block, letter in enumerate("M-*-M-")
        for name, a, b in (ffn if block % 2 else mixer)
    ]


def plan_of(bf16: Bf16BlocksConfig | None = None, recipe=ref.NVFP4, exceptions=()) -> Plan:
    return build_plan(shapes(), recipe, bf16 or Bf16BlocksConfig(), NUM_BLOCKS, exceptions)


def excepted(names: list[str], precision: str, blocks: str = "") -> ComposedException:
    return ComposedException(names, blocks, precision, RECIPES[precision])


def given(plan: Plan) -> dict[str, tuple[str, str]]:
    """Name without its prefix -> recipe and reason, of what is not by the run's recipe."""
    rows = [row for row in plan.rows if row.reason != "the run's recipe"]
    return {
        row.linear.name.removeprefix("blocks.").replace(".mixer", ""): (row.recipe.name, row.reason) for row in rows
    }


def test_first_and_last_blocks_stay_in_bf16_with_both_linears():
    plan = plan_of(Bf16BlocksConfig(first=1, last=2))
    first = {f"0.{name}": ("bf16", "block 0 is the first") for name in ("in_proj", "out_proj")}
    assert given(plan) == first | LAST
    assert plan.num_quantized == 6


def test_exceptions_have_recipes_of_their_own():
    attention, mamba = excepted(["*"], "bf16", "*"), excepted(["*.out_proj"], "mxfp8", "M")
    plan = plan_of(Bf16BlocksConfig(last=2), exceptions=[attention, mamba])
    assert given(plan) == LAST | {
        "0.out_proj": ("mxfp8", "its name matches *.out_proj in blocks M"),
        "2.in_proj": ("bf16", "its name matches * in blocks *"),
        "2.out_proj": ("bf16", "its name matches * in blocks *"),
    }
    assert [row.recipe for row in plan.rows if row.recipe.name == "mxfp8"] == [ref.MXFP8]
    written = plan.as_dict()
    assert written["recipes"] == {"nvfp4": ref.NVFP4.describe(), "mxfp8": ref.MXFP8.describe(), "bf16": BF16.describe()}
    assert "blocks.0.mixer.out_proj" not in written["bf16"] and "blocks.2.mixer.in_proj" in written["bf16"]


def test_an_exception_after_others_that_leave_it_nothing_is_refused():
    front, ffn, all_of_it = (excepted([names], "mxfp8") for names in ("blocks.[024].*", "*.mixer.*_proj", "*"))
    with pytest.raises(ValueError, match=r"exceptions\[2\].names=\['\*'\] has no effect: .*\[0\] and .*\[1\] before"):
        plan_of(exceptions=[front, ffn, all_of_it])
    assert plan_of(exceptions=[front, all_of_it]).num_quantized == 12  # something is left
    assert plan_of(exceptions=[excepted(["*"], "bf16", "E"), excepted(["*"], "mxfp8", "E")]).num_quantized == 12
    # BF16 blocks come before exceptions and may take all that one matches: they follow the model, not the exception.
    assert plan_of(Bf16BlocksConfig(first=1), exceptions=[excepted(["blocks.0.*"], "mxfp8")]).num_quantized == 10


@pytest.mark.parametrize("scope", ["both", "forward", "backward"])
def test_a_switch_goes_linear_by_linear(scope):
    before = plan_of(exceptions=[excepted(["*"], "bf16", "*"), excepted(["*.out_proj"], "mxfp8", "M")])
    after = {row.linear.name: row for row in before.switched(plan_of(recipe=ref.MXFP8), scope).rows}
    assert after["blocks.0.mixer.out_proj"].recipe == ref.MXFP8  # it was there already
    assert after["blocks.0.mixer.out_proj"].reason == "its name matches *.out_proj in blocks M"
    changed, was_bf16 = after["blocks.0.mixer.in_proj"].recipe, after["blocks.2.mixer.in_proj"].recipe
    forward, backward = scope != "backward", scope != "forward"
    assert (changed.fprop.left == ref.MX8) is forward and (changed.wgrad.left == ref.MX8) is backward
    assert (was_bf16.fprop.right == ref.MX8) is forward and (was_bf16.dgrad.right == ref.MX8) is backward


def test_a_plan_takes_effect_on_existing_layers(monkeypatch):
    """A recipe that changes during a run must not be ignored: counted by what is quantized, and seen in the results."""
    passed: list[str] = []
    original = emulated.quantize_operand

    def counting(x, request, **settings):
        if request.operand.quantized:
            passed.append(str(request.operand))
        return original(x, request, **settings)

    monkeypatch.setattr(emulated, "quantize_operand", counting)
    linears, step_state = {shape.name: LinearContext() for shape in shapes()}, StepState(seed=3)
    name, operands = "blocks.2.mixer.in_proj", ref.tensors(32, 64, 160)
    plain, quantized = plan_of(recipe=BF16), plan_of()

    def results(plan: Plan, of_fprop: int, of_all: int):
        PrecisionController(linears, plan, step_state)
        assert linears[name].name == name and linears[name].step_state is step_state
        passed.clear()
        found = ref.run(*operands, linears[name])
        assert (passed.count("nvfp4 16x16"), len(passed)) == (of_fprop, of_all)
        return found

    first = results(quantized, 1, 5)
    # The weight's blocks change, and the kept codes go with them.
    assert not torch.equal(results(quantized.switched(plain, "backward"), 0, 2)[0], first[0])
    forward = results(quantized.switched(plain, "forward"), 1, 4)
    assert torch.equal(forward[1], first[1]) and torch.equal(forward[2], first[2])
    assert torch.equal(results(plain, 0, 0)[0], forward[0])
    results(plan_of(Bf16BlocksConfig(names=[name])), 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, results(quantized, 1, 5), strict=True))


def test_a_plan_says_which_share_of_the_weights_is_in_4_bits():
    """Exceptions made for hybrids take half of a Transformer; the preset for Transformers keeps what its name says."""
    for name, few in (("nvfp4_best", True), ("nvfp4_4over6_1x16_qkv_bf16", False)):
        plan, _ = plans_of(composed("model=transformer_1_2b", f"precision={name}"))
        in_4_bits = sum(row.linear.parameters for row in plan.rows if row.recipe[FPROP_WEIGHT].format == "nvfp4")
        share = in_4_bits / sum(row.linear.parameters for row in plan.rows)
        assert plan.share_in_4_bits == pytest.approx(share) and (share < 0.6) == few
        assert bool(plan.warning(name)) == few
        assert f"{share:.1%} of all in 4 bits" in str(plan_table(plan, name).caption)
    assert not plan_of(recipe=ref.MXFP8).warning("mxfp8")
