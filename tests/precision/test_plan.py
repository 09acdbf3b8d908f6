import pytest
import torch
import yaml

import megatron_fp4.precision.emulated as emulated
from megatron_fp4.config.precision_schema import (
    Bf16BlocksConfig,
    ComposedException,
    DgradConfig,
    FpropConfig,
    RecipeConfig,
    SecondOperandConfig,
    SwitchConfig,
    WgradConfig,
)
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.logging.console import plan_table
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.plan import (
    LinearShape,
    Plan,
    PrecisionController,
    PrecisionSwitch,
    build_plan,
    same_parts,
    switch_step,
)
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT
from megatron_fp4.precision.rng import StepState
from tests.composing import composed, plans_of
from tests.precision import reference as ref

NUM_BLOCKS = 6
PACKED = {"in_proj": (("z", 32), ("x", 32), ("dt", 16))}  # rows in each of two groups
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
    """Two linears in each of six blocks; the odd blocks are feed-forward, in the others in_proj is packed."""
    mixer, ffn = (("in_proj", 64, 160), ("out_proj", 64, 64)), (("up_proj", 64, 256), ("down_proj", 256, 64))
    return [
        LinearShape(f"blocks.{block}.mixer.{name}", block, a, b, letter, groups=2, sections=PACKED.get(name, ()))
        for block, letter in enumerate("M-*-M-")
        for name, a, b in (ffn if block % 2 else mixer)
    ]


def plan_of(bf16: Bf16BlocksConfig | None = None, recipe=ref.NVFP4, exceptions=()) -> Plan:
    return build_plan(shapes(), recipe, bf16 or Bf16BlocksConfig(), NUM_BLOCKS, exceptions)


def exception(names: list[str], precision: str, blocks: str = "", sections: str = "") -> ComposedException:
    return ComposedException(names, blocks, sections.split(), precision, RECIPES[precision])


def not_by_the_run(plan: Plan) -> dict[str, tuple[str, str]]:
    """Name without its prefix -> recipe and reason, for linears without the run's recipe."""
    rows = [row for row in plan.rows if row.reason != "the run's recipe"]
    names = [row.linear.name.removeprefix("blocks.").replace(".mixer", "") for row in rows]
    return {name: (row.recipe.name, row.reason) for name, row in zip(names, rows, strict=True)}


def test_first_and_last_blocks_stay_in_bf16_with_both_linears():
    plan = plan_of(Bf16BlocksConfig(first=1, last=2))
    first = {f"0.{name}": ("bf16", "block 0 is the first") for name in ("in_proj", "out_proj")}
    assert not_by_the_run(plan) == first | LAST
    assert plan.num_quantized == 6


def test_an_own_model_keeps_its_last_blocks_in_bf16():
    """15% of them, rounded up, unless its file says otherwise."""
    model = composed("model.nvfp4_bf16_blocks={first: 0, last: null}", "precision=nvfp4").precision.bf16_blocks
    assert model.last is None and [model.num_last(n) for n in (1, 6, 20, 52, 62)] == [1, 1, 3, 8, 10]
    assert ModelConfig().nvfp4_bf16_blocks.last is None
    reasons = {name: reason for name, (_, reason) in not_by_the_run(plan_of(Bf16BlocksConfig(last=None))).items()}
    assert reasons == {"5.up_proj": "block 5 is the last", "5.down_proj": "block 5 is the last"}


def test_exceptions_have_recipes_of_their_own():
    attention, mamba = exception(["*"], "bf16", "*"), exception(["*.out_proj"], "mxfp8", "M")
    plan = plan_of(Bf16BlocksConfig(last=2), exceptions=[attention, mamba])
    assert not_by_the_run(plan) == LAST | {
        "0.out_proj": ("mxfp8", "its name matches *.out_proj in blocks M"),
        "2.in_proj": ("bf16", "its name matches * in blocks *"),
        "2.out_proj": ("bf16", "its name matches * in blocks *"),
    }
    assert [row.recipe for row in plan.rows if row.recipe.name == "mxfp8"] == [ref.MXFP8]
    written = plan.as_dict()
    assert written["recipes"] == {"nvfp4": ref.NVFP4.describe(), "mxfp8": ref.MXFP8.describe(), "bf16": BF16.describe()}
    assert "blocks.0.mixer.out_proj" not in written["bf16"] and "blocks.2.mixer.in_proj" in written["bf16"]


def test_sections_of_an_exception_are_a_linear_of_their_own(tmp_path):
    gates, rest = exception(["*.in_proj"], "mxfp8", "M", "z"), exception(["*"], "bf16", "M", "x dt")
    plan = plan_of(Bf16BlocksConfig(last=2), exceptions=[gates])
    name = "blocks.0.mixer.in_proj"
    rows = {row.linear.name: row for row in plan.rows if row.linear.block == 0}
    assert {row.linear.name: (row.linear.out_features, row.recipe.name) for row in rows.values()} == {
        f"{name}[z]": (64, "mxfp8"),
        f"{name}[x,dt]": (96, "nvfp4"),
        "blocks.0.mixer.out_proj": (64, "nvfp4"),
    }
    assert rows[f"{name}[z]"].reason == "its name matches *.in_proj in blocks M, sections z"
    assert len(plan.rows) == 13 and plan.linear_flops_per_token == plan_of().linear_flops_per_token  # block 4: in BF16
    assert plan_of(exceptions=[exception(["*.in_proj"], "mxfp8", "", "z x dt")]).rows[0].linear.name == name
    # Before and after a switch the same rows share a maximum: parts are those that either plan tells apart.
    before, after = same_parts([plan, plan_of(recipe=BF16, exceptions=[exception(["*.in_proj"], "mxfp8", "M", "x")])])
    assert [row.recipe.name for row in before.rows[:3]] == ["mxfp8", "nvfp4", "nvfp4"]
    assert [row.linear.name.removeprefix(name) for row in after.rows[:3]] == ["[z]", "[x]", "[dt]"]
    assert [row.recipe.name for row in before.switched(after, "both").rows[:3]] == ["bf16", "mxfp8", "bf16"]
    # The plan that was written lists parts, and can be read.
    (file := tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan_of(exceptions=[rest]).as_dict()))
    listed = {row.linear.name: row.recipe.name for row in plan_of(Bf16BlocksConfig(file=str(file))).rows}
    assert listed[f"{name}[x,dt]"] == "bf16" and listed[f"{name}[z]"] == "nvfp4"


def test_an_exception_without_effect_is_refused():
    even, projections, everything = (exception([names], "mxfp8") for names in ("blocks.[024].*", "*.mixer.*_proj", "*"))
    with pytest.raises(ValueError, match=r"exceptions\[2\].names=\['\*'\] has no effect: .*\[0\] and .*\[1\] before"):
        plan_of(exceptions=[even, projections, everything])
    assert plan_of(exceptions=[even, everything]).num_quantized == 12  # `everything` still matches some alone
    assert plan_of(exceptions=[exception(["*"], "bf16", "E"), exception(["*"], "mxfp8", "E")]).num_quantized == 12
    first, again = exception(["*"], "mxfp8", "M", "z x"), exception(["*.in_proj"], "bf16", "M", "z")
    with pytest.raises(ValueError, match=r"exceptions\[1\].names=\['\*.in_proj'\] has no effect"):
        plan_of(exceptions=[first, again])
    # BF16 blocks come before exceptions, and may include all linears of one: their number follows the model.
    assert plan_of(Bf16BlocksConfig(first=1), exceptions=[exception(["blocks.0.*"], "mxfp8")]).num_quantized == 10


@pytest.mark.parametrize("scope", ["both", "forward", "backward"])
def test_a_switch_changes_each_linear_from_its_own_recipe(scope):
    before = plan_of(exceptions=[exception(["*"], "bf16", "*"), exception(["*.out_proj"], "mxfp8", "M")])
    after = {row.linear.name: row for row in before.switched(plan_of(recipe=ref.MXFP8), scope).rows}
    assert after["blocks.0.mixer.out_proj"].recipe == ref.MXFP8  # as before
    assert after["blocks.0.mixer.out_proj"].reason == "its name matches *.out_proj in blocks M"
    changed, was_bf16 = after["blocks.0.mixer.in_proj"].recipe, after["blocks.2.mixer.in_proj"].recipe
    forward, backward = scope != "backward", scope != "forward"
    assert (changed.fprop.left == ref.MX8) is forward and (changed.wgrad.left == ref.MX8) is backward
    assert (was_bf16.fprop.right == ref.MX8) is forward and (was_bf16.dgrad.right == ref.MX8) is backward


def test_a_plan_takes_effect_on_existing_layers(monkeypatch):
    """Linears use a recipe that changes during a run: seen in the operands that are quantized, and in the results."""
    quantized_operands: list[str] = []
    original = emulated.quantize_operand

    def counting(rows, place, request):
        if request.operand.quantized:
            quantized_operands.append(str(request.operand))
        return original(rows, place, request)

    monkeypatch.setattr(emulated, "quantize_operand", counting)
    linears, step_state = {shape.name: LinearContext() for shape in shapes()}, StepState(seed=3)
    name, operands = "blocks.2.mixer.in_proj", ref.tensors(32, 64, 160)
    plain, quantized = plan_of(recipe=BF16), plan_of()

    def results(plan: Plan, num_square: int, num_quantized: int):
        PrecisionController(linears, plan, step_state)
        assert linears[name].name == name and linears[name].step_state is step_state
        quantized_operands.clear()
        found = ref.run(*operands, linears[name])
        assert (quantized_operands.count("nvfp4 16x16"), len(quantized_operands)) == (num_square, num_quantized)
        return found

    first = results(quantized, 1, 5)
    # The weight's blocks change, so its kept codes are dropped.
    assert not torch.equal(results(quantized.switched(plain, "backward"), 0, 2)[0], first[0])
    forward = results(quantized.switched(plain, "forward"), 1, 4)
    assert torch.equal(forward[1], first[1]) and torch.equal(forward[2], first[2])
    assert torch.equal(results(plain, 0, 0)[0], forward[0])
    results(plan_of(Bf16BlocksConfig(names=[name])), 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, results(quantized, 1, 5), strict=True))


def test_a_plan_knows_the_share_of_weights_in_4_bits():
    """Exceptions for hybrids keep half of a Transformer in other formats; the preset for Transformers does not."""
    for name, few in (("nvfp4_best", True), ("nvfp4_4over6_1x16_qkv_bf16", False)):
        plan, _ = plans_of(composed("model=transformer_1_2b", f"precision={name}"))
        in_4_bits = sum(row.linear.parameters for row in plan.rows if row.recipe[FPROP_WEIGHT].format == "nvfp4")
        share = in_4_bits / sum(row.linear.parameters for row in plan.rows)
        assert plan.share_in_4_bits == pytest.approx(share) and (share < 0.6) == few
        assert bool(plan.warning(name)) == few
        assert f"{share:.1%} in 4 bits" in str(plan_table(plan, name, {}).caption)
    assert not plan_of(recipe=ref.MXFP8).warning("mxfp8")
    for pattern, few in (("*-*-", True), ("*GMG", False)):  # an exception for the head, which is in no block
        given = "precision.bf16_blocks.last=3", "precision.exceptions=[{names: [head], precision: nvfp4}]"
        plan, _ = plans_of(composed("precision=nvfp4", f"model.pattern={pattern}", *given))
        assert ("use precision=nvfp4_4over6" in plan.warning("nvfp4")) == few


def test_the_step_of_a_switch():
    given = {"never": None, "gradient_noise": None, "before_decay": 850, "0.8": 800, "0.0001": 0, "1e-1": 100}
    given |= {"0": 0, "1": 1, "1000": 1000}
    assert {when: switch_step(when, 1000, 850) for when in given} == given
    for when in ("", "soon", "1001", "1.0", "0.0", "-5", "nan", "inf", "0,8"):
        with pytest.raises(ValueError, match="a step between 0 and train"):
            switch_step(when, 1000, 850)


def refuse() -> float:
    raise AssertionError("nothing must be measured")


def test_a_switch_happens_once_at_its_step_or_at_the_first_later_step():
    switch = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert [switch.before_step(step, refuse) for step in range(6)] == [False, False, False, True, False, False]
    assert switch.switched_at == 3
    late = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert late.before_step(10, refuse) and late.switched_at == 10


def test_gradient_noise_is_measured_at_intervals_and_switches_after_consecutive_measurements():
    """Also across a checkpoint."""

    def controller() -> PrecisionController:
        switch = PrecisionSwitch(SwitchConfig(when="gradient_noise", threshold=2.0, interval=5))
        return PrecisionController({}, Plan(()), StepState(seed=0), switch=switch, plan_after_switch=Plan(()))

    first, resumed = controller(), controller()
    # Neither the threshold itself nor NaN is below the threshold.
    for step, ratio in enumerate((1.0, 1.9, 2.0, 1.0, float("nan"), 1.0, 1.0)):
        assert not first.before_step(5 * step, lambda ratio=ratio: ratio)
        assert not any(first.before_step(5 * step + between, refuse) for between in range(1, 5))
    resumed.load_state_dict(first.state_dict())
    assert resumed.before_step(35, lambda: 1.0) and resumed.switch.switched_at == 35
    after = controller()
    after.load_state_dict(resumed.state_dict())
    for one in (resumed, after):
        assert one.switch.switched_at == 35 and not any(one.before_step(step, refuse) for step in range(36, 50))
