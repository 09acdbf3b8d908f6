import re

import pytest
import torch
import yaml

from assembly import check as validate
from megatron_fp4.checks.precision import validate_precision
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.quantization.formats import FORMATS
from models.hybrid import build_model
from models.pattern import linear_shapes
from tests.checks.composed import changed, composed, refusal

EDEN = {"wgrad.gradient.rounding": "ms_eden", "wgrad.rht": 128, "rht_signs": "fresh"}

OPERANDS = [
    ({"fprop.activation.block": "1x32"}, "precision.fprop.activation.block=1x32", "1x16 or 16x16"),
    ({"fprop.weight.format": "mxfp4"}, "precision.fprop.weight.block=16x16", "1x32 or 32x32"),
    ({"wgrad.gradient.format": "fp8"}, "precision.wgrad.gradient.block=1x16", "1x128 or 128x128"),
    (
        {"fprop.weight.format": "mxfp4", "fprop.weight.block": "1x32", "fprop.weight.four_over_six": True},
        "precision.fprop.weight.four_over_six=true",
        "set it to false",
    ),
    (
        {"fprop.weight.format": "mxfp8", "fprop.weight.block": "1x32", "fprop.weight.power_of_two_scales": True},
        "does not go with format=mxfp8",
        "mxfp8 scales always are powers of two",
    ),
    (
        {"dgrad.gradient.format": "mxfp8", "dgrad.gradient.block": "1x32"},
        "precision.dgrad.gradient.rounding=stochastic does not go with format=mxfp8",
        "use nearest, or another format",
    ),
    ({"fprop.weight.format": "mxfp8"}, "precision.fprop.weight.block=16x16", "1x32 or 32x32"),
    (
        {"fprop.weight.power_of_two_scales": True},
        "precision.fprop.weight.power_of_two_scales=true does not go with format=nvfp4",
        "set it to false",
    ),
    ({"fprop.weight.reuse_fprop": True}, "precision.fprop.weight.reuse_fprop=true", "set it to false"),
    ({"dgrad.gradient.reuse_fprop": True}, "precision.dgrad.gradient.reuse_fprop=true", "never sees gradients"),
    ({"wgrad.activation.reuse_fprop": True}, "precision.wgrad.rht=16", "to false or 0"),
    (
        {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0, "fprop.activation.format": "bf16"},
        "precision.fprop.activation.format=bf16",
        "set it to false",
    ),
    (
        {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0, "wgrad.activation.rounding": "stochastic"},
        "precision.wgrad.activation (nvfp4 1x16 stochastic)",
        "make them equal",
    ),
    (
        {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0, "backend": "transformer_engine"},
        "precision.wgrad.activation.reuse_fprop=true",
        "precision.backend=emulated",
    ),
    ({"fprop.weight.four_over_six_error": "squared"}, "four_over_six_error=squared has no effect", "at absolute"),
    ({"fprop.weight.source": "forward"}, "precision.fprop.weight.source=forward", "set it to tensor"),
    ({"dgrad.gradient.source": "forward"}, "precision.dgrad.gradient.source=forward", "never sees gradients"),
    ({"wgrad.activation.source": "forward", "fprop.rht": 16}, "precision.fprop.rht=16", "to tensor or 0"),
    (
        {"wgrad.activation.source": "forward", "fprop.activation.format": "bf16"},
        "precision.fprop.activation.format=bf16 makes no codes",
        "set it to tensor",
    ),
    (
        {"wgrad.activation.source": "forward", "fprop.activation.format": "fp8", "fprop.activation.block": "1x128"},
        "precision.fprop.activation.format=fp8 has scales",
        "set it to tensor",
    ),
    (
        {"wgrad.activation.source": "forward", "wgrad.activation.reuse_fprop": True},
        "precision.wgrad.rht=16",
        "to false or 0",
    ),
    (
        {"wgrad.activation.source": "forward", "wgrad.activation.reuse_fprop": True, "wgrad.rht": 0},
        "differs from precision.fprop.activation",
        "set reuse_fprop to false",
    ),
    ({**EDEN, "rht_signs": "fixed"}, "precision.rht_signs=fixed", "set precision.rht_signs=fresh"),
    ({**EDEN, "wgrad.rht": 64}, "precision.wgrad.rht=64", "set precision.wgrad.rht=128"),
    ({**EDEN, "wgrad.gradient.four_over_six": True}, "four_over_six=true", "nearest or false"),
    ({**EDEN, "wgrad.gradient.block": "16x16"}, "block=16x16", "set block to 1x16"),
    ({**EDEN, "wgrad.gradient.format": "mxfp4", "wgrad.gradient.block": "1x32"}, "format=mxfp4", "it is for nvfp4"),
    ({**EDEN, "fprop.activation.rounding": "ms_eden"}, "fprop.activation.rounding=ms_eden is for dgrad", "use nearest"),
    ({"backend": "transformer_engine"}, "this run is on cpu", "precision.backend=emulated"),
    ({"backend": "torch"}, "this run is on cpu", "precision.backend=emulated"),
    ({"bf16_blocks.first": 4}, "precision.bf16_blocks.first=4 and last=2", "precision=bf16"),
    ({"switch.target": "nvfp4"}, "precision.switch.when=before_decay", "precision.switch.when=never"),
]


@pytest.mark.parametrize(("changes", "value", "remedy"), OPERANDS)
def test_recipes_that_cannot_be_computed(changes, value, remedy):
    message = refusal({f"precision.{key}": change for key, change in changes.items()})
    assert value in message
    assert remedy in message


def test_unknown_formats_are_refused_wherever_a_recipe_is():
    change = {"fprop.weight.format": "nvfp5"}
    known = ", ".join(["bf16", *FORMATS])
    message = f"precision.fprop.weight.format=nvfp5 is not known; choose one of {known}"
    assert refusal({"precision.fprop.weight.format": "nvfp5"}) == message
    config = composed("precision.exceptions=[{precision: mxfp8}]")
    (exception,) = config.precision.exceptions
    exceptions = [changed(exception, {"recipe": changed(exception.recipe, change)})]
    where = "precision.exceptions[0].precision=mxfp8: "
    assert refusal({"precision.exceptions": exceptions}) == where + message
    target = changed(composed("precision=mxfp8").precision, change)
    assert refusal({"after_switch": target}) == "precision.switch.target=bf16: " + message


def test_a_recheck_of_nothing_is_refused():
    message = refusal({"precision.recheck_interval": 10}, "precision=bf16")
    assert "precision.recheck_interval=10, but precision=bf16 quantizes nothing" in message
    assert "set precision.recheck_interval=0" in message


@pytest.mark.parametrize(
    ("changes", "given", "parts"),
    [
        ({}, "{blocks: X}", ("exceptions[0].blocks=X has 'X'", "M, *, -")),
        ({}, "{names: []}", ("exceptions[0].names=[]", "drop the exception")),
        (
            {"model.mamba_head_dim": 66},
            "{names: ['*.out_proj'], precision: fp8_block}",
            (
                "model.mamba_num_heads x model.mamba_head_dim=528",
                "exceptions[0].precision=fp8_block: precision.",
                "512",
            ),
        ),
    ],
)
def test_exceptions_that_cannot_be(changes, given, parts):
    message = refusal(changes, f"precision.exceptions=[{given}]")
    assert all(part in message for part in parts), message


def test_sizes_are_asked_of_the_linears_that_a_recipe_is_for():
    narrow = {"model.mamba_head_dim": 66}  # 528 = 33 * 16
    for given in ("{names: ['*.in_proj'], precision: fp8_block}", "{blocks: '*', precision: fp8_block}"):
        validate(changed(composed(f"precision.exceptions=[{given}]"), narrow), 1, "cpu")
    # What is in BF16 need not divide at all; linears that the exception leaves to the run's recipe must.
    odd = {"model.mamba_head_dim": 65}
    validate(changed(composed("precision.exceptions=[{blocks: M, precision: bf16}]"), odd), 1, "cpu")
    assert "=520" in refusal(odd, "precision.exceptions=[{names: ['*.in_proj'], precision: bf16}]")


def test_projections_are_those_of_the_models(mesh):
    model = composed().model
    with torch.device("meta"):
        names = [name for name, _ in build_model(model, mesh, torch.bfloat16).linears()]
    assert names == [shape.name for shape in linear_shapes(model)]


def test_bf16_blocks_of_a_run_in_bf16_count_for_its_exceptions():
    blocks = {"precision.bf16_blocks.last": 2}
    validate(changed(composed("precision=bf16", "precision.exceptions=[{precision: mxfp8}]"), blocks), 1, "cpu")
    assert "has no effect" in refusal(blocks, "precision=bf16", "precision.exceptions=[{precision: bf16}]")


@pytest.mark.parametrize(
    ("changes", "overrides", "value", "remedy"),
    [
        ({"model.hidden_dim": 200}, (), "model.hidden_dim=200", "192 or 208"),
        ({"model.head_dim": 33}, (), "model.num_query_heads x model.head_dim=264", "256 or 272"),
        ({"model.mamba_head_dim": 65}, (), "model.mamba_num_heads x model.mamba_head_dim=520", "512 or 528"),
        ({"model.ffn_dim": 1040}, ("precision=mxfp4",), "model.ffn_dim=1040", "1024 or 1056"),
        ({"model.ffn_dim": 1040}, ("precision=mxfp8",), "model.ffn_dim=1040", "1024 or 1056"),
        ({"model.hidden_dim": 64}, ("precision=fp8_block",), "model.hidden_dim=64", "128 work"),
        ({"precision.fprop.rht": 128, "model.hidden_dim": 320}, (), "precision.fprop.rht", "256 or 384"),
    ],
)
def test_blocks_that_do_not_tile(changes, overrides, value, remedy):
    message = refusal(changes, *overrides)
    assert value in message
    assert remedy in message


def test_shards_must_hold_whole_blocks():
    changes = {"parallel.tensor": 2, "model.ffn_dim": 1152}
    message = refusal(changes, "precision=fp8_block", world_size=2)
    assert "model.ffn_dim=1152 / parallel.tensor=2" in message
    assert "1024 or 1280 work, or parallel.tensor=1," in message
    validate(changed(composed("precision=fp8_block"), {**changes, "model.ffn_dim": 1280}), 2, "cpu")


def test_sizes_are_free_in_bf16_and_in_bf16_blocks():
    validate(changed(composed("precision=bf16"), {"model.hidden_dim": 200}), 1, "cpu")
    # The only attention block is the third from the left.
    odd = {"model.head_dim": 33, "precision.bf16_blocks.first": 3}
    validate(changed(composed(), odd), 1, "cpu")


def test_reuse_of_fprops_codes_is_possible_without_a_transform():
    changes = {
        "precision.wgrad.activation.reuse_fprop": True,
        "precision.dgrad.weight.reuse_fprop": True,
        "precision.wgrad.rht": 0,
    }
    validate(changed(composed(), changes), 1, "cpu")


def test_a_target_is_named_by_its_own_key():
    config = composed()
    target = changed(composed("precision=fp8_block").precision, {"fprop.weight.block": "1x16"})
    with pytest.raises(ConfigError, match=re.escape("target.fprop.weight.block=1x16")):
        validate_precision(target, config, "cpu", key="target")


@pytest.mark.parametrize(
    ("precision", "instead"),
    [
        ("nvfp4_all_the_way", "precision.switch.target=bf16"),
        ("bf16", "precision.switch.when=never"),
    ],
)
def test_a_target_that_quantizes_nothing_has_remedies_that_can_be_typed(precision, instead):
    target = "precision.switch.target=nvfp4"
    switch = (target, "precision.switch.when=3")
    run = (f"precision={precision}", *switch, "model.pattern=MM")
    message = refusal({}, *run)
    assert message.startswith("precision.switch.target=nvfp4: precision.bf16_blocks.first=0 and last=2 leave none")
    assert message.endswith(
        f"lower them to less than 2 together, by model.nvfp4_bf16_blocks or in its file, or set {instead}"
    )
    for remedy in ("model.nvfp4_bf16_blocks.last=1", instead):
        validate(composed(*run, remedy), 1, "cpu")
    of_its_own = {"model.nvfp4_bf16_blocks.last": 1}  # as if the file had its 2 itself
    assert refusal(of_its_own, *run).endswith(f"together, in its file, or set {instead}")
    assert refusal({"after_switch.bf16_blocks.last": 0, "after_switch.bf16_blocks.names": ["*"]}, *run) == (
        f"{target}: precision=nvfp4 leaves none of the 4 linears quantized (blocks.0.mixer.in_proj: its name matches "
        f"*); take some out of bf16_blocks or exceptions, in its file, or set {instead}"
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["precision.bf16_blocks.names=['*.in_proj','*']"], "its name matches *.in_proj"),
        (["precision.bf16_blocks.file=FILE"], "listed in all.yaml"),
        (["precision.exceptions=[{names: ['*'], precision: bf16}]"], "its name matches *"),
    ],
)
def test_a_plan_that_leaves_nothing_quantized_is_refused(overrides, reason, tmp_path):
    run = ("model.pattern=MM", "model.nvfp4_bf16_blocks.last=0")
    overrides = [override.replace("FILE", str(tmp_path / "all.yaml")) for override in overrides]
    names = [shape.name for shape in linear_shapes(composed(*run).model)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"bf16": names}))
    assert refusal({}, *run, *overrides) == (
        f"precision=nvfp4 leaves none of the 4 linears quantized (blocks.0.mixer.in_proj: {reason}); take some out of "
        "bf16_blocks or exceptions, or choose precision=bf16"
    )


def test_a_plan_that_leaves_something_quantized_is_not_refused():
    run = ("model.pattern=MM", "model.nvfp4_bf16_blocks.last=0")
    validate(composed(*run, "precision.bf16_blocks.names=['blocks.1.*']"), 1, "cpu")
    validate(composed(*run, "precision=bf16"), 1, "cpu")
    validate(composed(*run, "precision=bf16", "precision.exceptions=[{names: ['*'], precision: mxfp8}]"), 1, "cpu")
