import re
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from assembly import check as validate
from megatron_fp4.checks.combinations import data_parallel_size
from megatron_fp4.checks.precision import validate_precision
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError, PhaseConfig
from megatron_fp4.precision import torch_scaled_mm
from models.hybrid import build_model
from models.pattern import linear_shapes

CONFIGS = Path(__file__).parents[2] / "configs"
DATA = ("data.sources={web: /d/web}", "data.blends={first: {web: 1.0}, second: {web: 1.0}, third: {web: 1.0}}")


@cache
def composed(*overrides: str) -> Config:
    return compose_config(list(overrides), CONFIGS)


def changed(node: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with values at dotted keys replaced; cheaper than composing again."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        child = getattr(node, name)
        node = replace(node, **{name: changed(child, {rest: value}) if rest and is_dataclass(child) else value})
    return node


def refusal(changes: dict[str, Any], *overrides: str, world_size: int = 1, device_type: str = "cpu") -> str:
    config = changed(composed(*overrides), changes)
    with pytest.raises(ConfigError) as error:
        validate(config, world_size, device_type)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "nvfp4_all_the_way"])
@pytest.mark.parametrize("model", ["tiny", "hybrid_60m", "transformer_60m"])
def test_every_small_model_goes_with_every_recipe(model, precision):
    config = composed(f"model={model}", f"precision={precision}")
    for world_size in (1, 2, 4):
        validate(changed(config, {"train.micro_batch_size": 8 // world_size}), world_size, "cpu")
    validate(changed(config, {"parallel.tensor": 2}), 4, "cuda")
    if config.after_switch is not None:
        validate_precision(config.after_switch, config, "cpu", key="target")


@pytest.mark.parametrize(
    ("experiment", "world_size", "tensor"),
    [("transformer_1_2b", 64, 8), ("nemotron_h_8b", 256, 4), ("nemotron_h_12b", 32, 8), ("nemotron_h_12b", 736, 1)],
)
def test_the_papers_runs_are_possible(experiment, world_size, tensor):
    for precision in ("nvfp4", "fp8_block", "mxfp4", "mxfp8", "bf16"):
        config = composed(f"experiment={experiment}", f"precision={precision}", *DATA)
        validate(changed(config, {"parallel.tensor": tensor}), world_size, "cuda")


def test_qaf_is_possible():
    validate(composed("experiment=qaf"), 1, "cpu")


NUMBERS = [
    ({"train.steps": 0}, "train.steps=0", "give 1 or more"),
    ({"train.global_batch_size": -4}, "train.global_batch_size=-4", "give 1 or more"),
    ({"train.micro_batch_size": 0}, "train.micro_batch_size=0", "give 1 or more"),
    ({"train.sequence_length": 0}, "train.sequence_length=0", "give 1 or more"),
    ({"train.max_skipped_steps": 0}, "train.max_skipped_steps=0", "give 1 or more"),
    ({"logging.interval": 0}, "logging.interval=0", "give 1 or more"),
    ({"validation.num_samples": 0}, "validation.num_samples=0", "give 1 or more"),
    ({"parallel.tensor": 0}, "parallel.tensor=0", "give 1 or more"),
    ({"parallel.timeout_seconds": 0}, "parallel.timeout_seconds=0", "give 1 or more"),
    ({"checkpoint.keep": -1}, "checkpoint.keep=-1", "give 0 or more"),
    ({"checkpoint.interval": -1}, "checkpoint.interval=-1", "give 0 or more"),
    ({"validation.interval": -1}, "validation.interval=-1", "give 0 or more"),
    ({"data.num_workers": -1}, "data.num_workers=-1", "give 0 or more"),
    ({"data.prefetch": 0}, "data.prefetch=0", "give 1 or more"),
    ({"optimizer.clip_norm": -1.0}, "optimizer.clip_norm=-1.0", "give 0 or more"),
    ({"optimizer.weight_decay": float("nan")}, "optimizer.weight_decay=nan", "give 0 or more"),
    ({"optimizer.lr": 0.0}, "optimizer.lr=0.0", "above 0"),
    ({"optimizer.eps": 0.0}, "optimizer.eps=0.0", "above 0"),
    ({"optimizer.beta2": 1.0}, "optimizer.beta2=1.0", "0.95"),
    ({"run.seed": -1}, "run.seed=-1", "give 0 or more"),
]
CHOICES = [
    ({"logging.wandb": "on"}, "logging.wandb=on", "online, offline, disabled"),
    ({"run.device": "tpu"}, "run.device=tpu", "auto, cuda, cpu"),
    ({"data.kind": "csv"}, "data.kind=csv", "builtin, indexed"),
    ({"schedule.decay": "step"}, "schedule.decay", "linear, cosine, 1-sqrt, exponential"),
    ({"precision.backend": "te"}, "precision.backend=te", "auto, emulated, transformer_engine, torch"),
    ({"precision.amax": "local"}, "precision.amax=local", "global, shard"),
    ({"precision.rht_signs": "random"}, "precision.rht_signs=random", "fixed, none, fresh"),
    ({"precision.compute_dtype": "fp16"}, "precision.compute_dtype=fp16", "bfloat16, float32"),
    ({"precision.switch.scope": "all"}, "precision.switch.scope=all", "both, forward, backward"),
    ({"precision.switch.when": "soon"}, "precision.switch.when=soon", "before_decay"),
    ({"precision.switch.when": "700"}, "precision.switch.when=700", "train.steps=300"),
]
MODEL = [
    ({"model.pattern": ""}, "model.pattern is empty", "M (Mamba-2)"),
    ({"model.pattern": "M-xM"}, "model.pattern=M-xM: 'x' at position 2", "- (FFN)"),
    ({"model.pattern": "M- M"}, "' ' at position 2", "without spaces"),
    ({"model.hidden_dim": 0}, "model.hidden_dim=0", "above 0"),
    ({"model.num_kv_heads": 3}, "model.num_query_heads=8", "KV heads that work: 1, 2, 4, 8"),
    ({"model.mamba_num_groups": 3}, "model.mamba_num_groups=3", "groups that work: 1, 2, 4, 8"),
    ({"model.rope": True, "model.head_dim": 33}, "model.head_dim=33", "use 34"),
    ({"model.ffn_dim": 1000}, "model.ffn_dim=1000", "992 or 1008"),
]
SCHEDULE = [
    ({"schedule.warmup_fraction": 1.5}, "schedule.warmup_fraction is 1.5", "between 0 and 1"),
    ({"schedule.decay_fraction": 0.99}, "schedule.decay_fraction 0.99", "must not exceed 1"),
    ({"schedule.min_lr_ratio": 2.0}, "schedule.min_lr_ratio is 2.0", "between 0 and 1"),
    ({"schedule.decay": "exponential", "schedule.min_lr_ratio": 0.0}, "schedule.decay=exponential", "above 0"),
    ({"schedule.decay_fraction": 0.0}, "precision.switch.when=before_decay", "give a fraction above 0"),
]
PATHS = [
    ({"run.dir": " "}, "run.dir is empty", "runs/first"),
    ({"run.device": "cuda"}, "run.device=cuda", "run.device=auto or cpu"),
    ({"checkpoint.resume": "/nowhere"}, "checkpoint.resume=/nowhere", "auto, never or the path"),
    ({"precision.bf16_blocks.file": "/nowhere"}, "precision.bf16_blocks.file=/nowhere", "correct the path"),
]


@pytest.mark.parametrize(("changes", "value", "remedy"), [*NUMBERS, *CHOICES, *MODEL, *SCHEDULE, *PATHS])
def test_refusals_name_the_value_and_the_remedy(changes, value, remedy):
    message = refusal(changes)
    assert value in message
    assert remedy in message


def test_unused_mixers_are_not_checked():
    validate(changed(composed(), {"model.pattern": "M-M-M-", "model.num_kv_heads": 3}), 1, "cpu")
    validate(changed(composed(), {"model.pattern": "*-*-*-", "model.mamba_num_groups": 3}), 1, "cpu")


def test_batch_that_does_not_divide_names_sizes_that_work():
    message = refusal({"train.global_batch_size": 6})
    assert "train.global_batch_size=6" in message
    assert "micro batch sizes that work: 1, 2, 3, 6" in message
    assert "global batch sizes that work: 4 or 8" in message
    message = refusal({}, world_size=3)
    assert "3 data-parallel ranks" in message
    assert "global batch sizes that work: 12" in message
    assert "micro batch" not in message.split("; ", 1)[1]  # 16 sequences never divide by 3 ranks
    for remedy in ({"train.micro_batch_size": 3}, {"train.global_batch_size": 8}):
        validate(changed(composed(), {"train.global_batch_size": 6, **remedy}), 1, "cpu")
    assert data_parallel_size(changed(composed(), {"parallel.tensor": 2}).parallel, 8) == 4


def test_sequence_length_in_tiles():
    assert "train.sequence_length=250 is not a multiple of 16; use 240 or 256" in refusal(
        {"train.sequence_length": 250}
    )
    assert "use 16" in refusal({"train.sequence_length": 9})
    validate(changed(composed(), {"train.sequence_length": 272}), 1, "cpu")


def test_mesh():
    assert refusal({"parallel.tensor": 3}, world_size=4).endswith("tensor sizes that work: 1, 2")  # 2 KV heads
    assert "tensor sizes that work: 1, 2" in refusal({"parallel.tensor": 4, "parallel.replicate": 2}, world_size=4)
    assert "replicate sizes that work: 1, 2, 4" in refusal({"parallel.replicate": 3}, world_size=4)
    message = refusal({"parallel.tensor": 2, "parallel.replicate": 4}, world_size=12)
    assert message.endswith("tensor sizes that work: 1; replicate sizes that work: 1, 2, 3, 6")
    message = refusal({"parallel.tensor": 4, "parallel.replicate": 5}, world_size=12)
    assert message.endswith("set parallel.replicate=1; tensor sizes that work then: 1, 2")
    assert "raise parallel.tensor" in refusal({"parallel.sequence": True})
    message = refusal({"parallel.tensor": 4}, world_size=8)
    assert "parallel.tensor=4 does not divide model.num_kv_heads=2" in message
    assert message.endswith("1, 2")
    message = refusal({"parallel.tensor": 8}, "experiment=nemotron_h_8b", *DATA, world_size=64, device_type="cuda")
    assert "model.num_kv_heads=4" in message
    assert message.endswith("1, 2, 4")
    assert "model.vocab_size=4097" in refusal({"parallel.tensor": 2, "model.vocab_size": 4097}, world_size=2)
    assert "the 65 tiles of 16 in model.ffn_dim=1040" in refusal(
        {"parallel.tensor": 2, "model.ffn_dim": 1040}, world_size=2
    )
    assert "model.mamba_num_groups=1" in refusal({"parallel.tensor": 2, "model.mamba_num_groups": 1}, world_size=2)


def test_sequence_parallel_slices():
    changes = {"parallel.tensor": 2, "train.micro_batch_size": 1, "train.sequence_length": 48}
    message = refusal(changes, world_size=2)
    assert "48 tokens" in message
    assert "train.sequence_length=64 or parallel.sequence=false" in message
    for remedy in ({"train.sequence_length": 64}, {"parallel.sequence": False}):
        validate(changed(composed(), {**changes, **remedy}), 2, "cpu")


def test_data():
    phases = [PhaseConfig("a", 0.5, {"web": 1.0}), PhaseConfig("b", 0.4, {"web": 1.0})]
    indexed = {"data.kind": "indexed", "data.sources": {"web": "/d/web"}}
    assert "data.sources={'web': '/d/web'} has no effect" in refusal({"data.sources": {"web": "/d/web"}})
    assert "choose data=indexed" in refusal({"data.eod_token": "</s>"})
    assert "'data.sources={web: /data/web}'" in refusal({"data.kind": "indexed"})
    assert "data.cache_dir=/c has no effect" in refusal({**indexed, "data.cache_dir": "/c"})
    assert "give at least one: 'data.phases=" in refusal({**indexed, "data.phases": []})
    message = refusal({**indexed, "data.phases": phases})
    assert "(0.5 + 0.4) sum to 0.9; they must sum to 1" in message
    assert "data.phases[1].name=a is taken" in refusal({**indexed, "data.phases": [phases[0], phases[0]]})
    one = PhaseConfig("a", 1.0, {"web": 1.0})
    for phase, expected in {
        "data.phases[0].fraction=1.5": replace(one, fraction=1.5),
        "data.phases[0].blend is empty; give source weights": replace(one, blend={}),
        "data.phases[0].blend.web=-1.0": replace(one, blend={"web": -1.0}),
        "data.phases[0].blend names code, which is not in data.sources; its sources: web": replace(
            one, blend={"code": 1.0}
        ),
        "has no weight above 0": replace(one, blend={"web": 0.0}),
    }.items():
        assert phase in refusal({**indexed, "data.phases": [expected]})
    assert "data.tokenizer=/nowhere" in refusal({**indexed, "data.phases": [one], "data.tokenizer": "/nowhere"})


OPERANDS = [
    ({"fprop.weight.format": "int4"}, "precision.fprop.weight.format=int4", "bf16, nvfp4, mxfp4, mxfp8, fp8"),
    ({"dgrad.gradient.rounding": "up"}, "precision.dgrad.gradient.rounding=up", "nearest or stochastic"),
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
    ({"wgrad.rht": 12}, "precision.wgrad.rht=12", "a power of two up to 128, or 0"),
    ({"wgrad.rht": 256}, "precision.wgrad.rht=256", "a power of two up to 128, or 0"),
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
    ({"backend": "transformer_engine"}, "this run is on cpu", "precision.backend=emulated"),
    ({"backend": "torch"}, "this run is on cpu", "precision.backend=emulated"),
    ({"bf16_blocks.first": -1}, "precision.bf16_blocks.first=-1", "0 or more"),
    ({"bf16_blocks.first": 4}, "precision.bf16_blocks.first=4 and last=2", "precision=bf16"),
    ({"switch.target": "nvfp4"}, "precision.switch.when=before_decay", "precision.switch.when=never"),
    ({"switch.interval": 0}, "precision.switch.interval=0", "1 or more"),
    ({"switch.patience": 0}, "precision.switch.patience=0", "1 or more"),
    ({"switch.rewarm_steps": -1}, "precision.switch.rewarm_steps=-1", "0 or more"),
    ({"switch.threshold": 0.0}, "precision.switch.threshold=0.0", "1.732"),
    ({"diagnostics.interval": -1}, "precision.diagnostics.interval=-1", "0 or more"),
    ({"recheck_interval": -1}, "precision.recheck_interval=-1", "0 for never"),
    ({"recheck_action": "stop"}, "precision.recheck_action=stop", "end, warn"),
]


@pytest.mark.parametrize(("changes", "value", "remedy"), OPERANDS)
def test_recipes_that_cannot_be_computed(changes, value, remedy):
    message = refusal({f"precision.{key}": change for key, change in changes.items()})
    assert value in message
    assert remedy in message


def test_a_recheck_of_nothing_is_refused():
    message = refusal({"precision.recheck_interval": 10}, "precision=bf16")
    assert "precision.recheck_interval=10, but precision=bf16 quantizes nothing" in message
    assert "set precision.recheck_interval=0" in message


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"compute_dtype": "float32"}, "precision.compute_dtype=float32", "use bfloat16"),
        ({"rht_signs": "fresh"}, "precision.rht_signs=fresh", "use fixed"),
        ({"wgrad.rht": 32}, "precision.wgrad.rht=32", "use 0 or 16"),
        ({"fprop.rht": 16}, "precision.fprop.rht=16", "use 0, or backend=emulated"),
        ({"fprop.weight.format": "bf16"}, "activation.format=nvfp4 and weight.format=bf16", "make them equal"),
        (
            {"fprop.weight.format": "mxfp4", "fprop.weight.block": "1x32"},
            "precision.fprop.weight.format=mxfp4",
            "backend=emulated",
        ),
        ({"fprop.activation.rounding": "stochastic"}, "fprop.activation.rounding=stochastic", "use nearest"),
        ({"wgrad.activation.rounding": "stochastic"}, "wgrad.activation.rounding=stochastic", "use nearest"),
        ({"wgrad.gradient.block": "16x16"}, "precision.wgrad.gradient.block=16x16", "use 1x16"),
        ({"wgrad.activation.four_over_six": True}, "wgrad.activation.four_over_six=true with rht=16", "set one of"),
        ({"dgrad.gradient.four_over_six": True}, "four_over_six=true with rounding=stochastic", "set one of"),
        (
            {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0},
            "wgrad.activation.reuse_fprop=true",
            "set it to false",
        ),
    ],
)
def test_what_transformer_engine_cannot_do(changes, value, remedy):
    keys = {f"precision.{key}": change for key, change in changes.items()}
    message = refusal({"precision.backend": "transformer_engine", **keys}, device_type="cuda")
    assert value in message
    assert remedy in message
    validate(changed(composed(), {"precision.backend": "transformer_engine"}), 1, "cuda")


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"compute_dtype": "float32"}, "precision.compute_dtype=float32", "use bfloat16"),
        ({"fprop.weight.format": "bf16"}, "activation.format=nvfp4 and weight.format=bf16", "make them equal"),
        (
            {"fprop.weight.format": "fp8", "fprop.weight.block": "128x128"},
            "precision.fprop.weight.format=fp8",
            "use one of them or bf16, or backend=emulated",
        ),
        (
            {"fprop.weight.format": "mxfp8", "fprop.weight.block": "32x32"},
            "activation.format=nvfp4 and weight.format=mxfp8 in one GEMM",
            "make them equal",
        ),
        (
            {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0},
            "wgrad.activation.reuse_fprop=true",
            "set it to false",
        ),
    ],
)
def test_what_scaled_mm_cannot_do(changes, value, remedy):
    keys = {f"precision.{key}": change for key, change in changes.items()}
    message = refusal({"precision.backend": "torch", **keys}, device_type="cuda")
    assert value in message
    assert remedy in message


def test_what_only_our_quantizers_can_do():
    """Transformer Engine refuses each of these."""
    for changes in (
        {"rht_signs": "fresh"},
        {"wgrad.rht": 128},
        {"fprop.activation.rounding": "stochastic"},
        {"wgrad.gradient.block": "16x16"},
        {"wgrad.activation.four_over_six": True},
    ):
        keys = {f"precision.{key}": change for key, change in {"backend": "torch", **changes}.items()}
        validate(changed(composed(), keys), 1, "cuda")
    validate(changed(composed(), {"precision.backend": "torch", "model.hidden_dim": 272}), 1, "cuda")


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"model.hidden_dim": 272}, "model.hidden_dim=272"),
        ({"model.ffn_dim": 1040, "parallel.tensor": 1}, "model.ffn_dim=1040"),
    ],
)
def test_sizes_that_an_fp4_gemm_cannot_take(changes, value):
    message = refusal({"precision.backend": "transformer_engine", **changes}, device_type="cuda")
    assert value in message
    assert "multiple of 32" in message
    assert "backend=emulated" in message
    validate(changed(composed(), changes), 1, "cuda")


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


def test_transformer_engine_is_asked_about_exceptions():
    native = {"precision.backend": "transformer_engine"}
    exceptions = "precision.exceptions=[{names: ['*.out_proj'], precision: mxfp4}]"
    message = refusal(native, exceptions, device_type="cuda")
    assert "precision.exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in message
    for name in ("nvfp4_nemotron_3", "mxfp8"):
        validate(changed(composed(f"precision={name}"), native), 1, "cuda")


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
    target = changed(composed("precision=fp8_block").precision, {"wgrad.rht": 3})
    with pytest.raises(ConfigError, match=re.escape("target.wgrad.rht=3")):
        validate_precision(target, config, "cpu", key="target")


def test_the_backend_torch_takes_the_formats_that_it_has(monkeypatch):
    changes = {"precision.backend": "torch"}
    assert "it multiplies nvfp4 and mxfp8;" in refusal(changes, "precision=mxfp4", device_type="cuda")
    monkeypatch.setitem(torch_scaled_mm.FORMATS, "mxfp4", torch_scaled_mm.FORMATS["mxfp8"])
    validate(changed(composed("precision=mxfp4"), changes), 1, "cuda")
    assert "it multiplies nvfp4 and mxfp8 and mxfp4;" in refusal(changes, "precision=fp8_block", device_type="cuda")
