"""Options that would change nothing are refused; what an override leaves behind is not."""

from __future__ import annotations

import pytest

from assembly import check as validate
from megatron_fp4.checks.precision import validate_precision
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ConfigError
from tests.checks.composed import CONFIGS, changed, composed

REFUSED = [
    (
        ["precision=bf16", "precision.dgrad.gradient.rounding=stochastic"],
        "precision.dgrad.gradient.rounding=stochastic has no effect",
        "leave it out",
    ),
    (
        ["precision=bf16", "precision.fprop.weight.block=16x16"],
        "precision.fprop.weight.block=16x16 has no effect",
        "precision=nvfp4",
    ),
    (
        ["precision=bf16", "precision.fprop.weight.four_over_six=true"],
        "precision.fprop.weight.four_over_six=true",
        "set it to false",
    ),
    (["precision=bf16", "precision.wgrad.rht=16"], "precision.wgrad.rht=16 has no effect", "leave it out"),
    (
        ["precision.recheck_action=warn"],
        "precision.recheck_action=warn has no effect",
        "precision.recheck_interval=100",
    ),
    (["precision.wgrad.rht=0", "precision.rht_signs=fresh"], "precision.rht_signs=fresh", "precision.wgrad.rht=16"),
    (["precision=nvfp4_all_the_way", "precision.rht_signs=none"], "precision.rht_signs=none", "at fixed"),
    (["precision=mxfp4", "precision.amax=shard"], "precision.amax=shard has no effect: only nvfp4", "at global"),
    (["precision=bf16", "precision.bf16_blocks.last=2"], "precision.bf16_blocks.last=2", "precision=nvfp4"),
    (["precision=bf16", "precision.bf16_blocks.names=[blocks.0.*]"], "precision.bf16_blocks.names", "leave it out"),
    (["precision=bf16", "precision.diagnostics.interval=5"], "precision.diagnostics.interval=5", "set it to 0"),
    (["precision.switch.threshold=2.0"], "precision.switch.threshold=2.0 has no effect", "when=gradient_noise"),
    (["precision.switch.when=0.5", "precision.switch.interval=5"], "precision.switch.interval=5", "leave it out"),
    (["precision.switch.when=100", "precision.switch.patience=1"], "precision.switch.patience=1", "leave it out"),
    (
        ["precision=bf16", "precision.switch.when=gradient_noise", "precision.switch.target=nvfp4"],
        "precision.switch.when=gradient_noise never switches",
        "a fraction",
    ),
    (
        [
            "precision=bf16",
            "precision.exceptions=[{blocks: '*', precision: bf16}]",
            "precision.switch.when=gradient_noise",
            "precision.switch.target=nvfp4",
        ],
        "precision.switch.when=gradient_noise never switches",
        "a fraction",
    ),
    (["run.replay_action=warn"], "run.replay_action=warn has no effect", "run.replay_interval=100"),
    (
        ["run.replay_interval=50", "run.deterministic=false"],
        "run.replay_interval=50 compares bits, which run.deterministic=false",
        "run.deterministic=true",
    ),
    (["spikes.threshold=5"], "spikes.threshold=5.0 has no effect with spikes.action=none", "spikes.action=skip"),
    (["spikes.window=64"], "spikes.window=64 has no effect", "leave it out"),
    (["spikes.min_history=9"], "spikes.min_history=9 has no effect", "leave it out"),
    (["spikes.max_in_row=2"], "spikes.max_in_row=2 has no effect", "leave it out"),
    (["spikes.action=skip", "spikes.window=63"], "spikes.min_history=64 is more than spikes.window=63", "at most 63"),
    (["spikes.action=skip", "train.steps=64"], "spikes.min_history=64 is not reached in train.steps=64", "a smaller"),
    (
        ["spikes.action=rollback", "checkpoint.interval=0"],
        "spikes.action=rollback has no checkpoint to go back to with checkpoint.interval=0",
        "spikes.action=skip",
    ),
    (
        [
            "data=indexed",
            "data.sources={web: /data/web}",
            "data.phases=[{name: main, blend: {web: 1.0}}]",
            "validation.prompts=[Once]",
        ],
        "validation.prompts=['Once'] needs the tokenizer that made the data",
        "data.tokenizer",
    ),
    (
        ["validation.prompt_tokens=10"],
        "validation.prompt_tokens=10 has no effect without validation.prompts",
        "leave it out",
    ),
    (["validation.prompts=[a,'b\udcff']"], "validation.prompts[1]='b\\udcff' is not UTF-8", "in that encoding"),
]
ACCEPTED = [
    ["validation.prompts=['def main(', '']", "validation.prompt_tokens=10"],
    ["precision.fprop.weight.format=bf16"],  # leaves its block of 16x16
    ["precision=mxfp4", "precision.fprop.activation.format=bf16"],
    ["precision.wgrad.gradient.format=bf16"],  # leaves its stochastic rounding
    ["precision.wgrad.gradient.format=bf16", "precision.wgrad.activation.format=bf16"],  # leaves the transform, too
    ["precision.recheck_action=warn", "precision.recheck_interval=5"],
    [
        "precision=bf16",
        "precision.exceptions=[{blocks: '*', precision: nvfp4}]",
        "precision.switch.when=gradient_noise",
        "precision.switch.target=mxfp8",
    ],
    ["precision.amax=shard"],
    ["precision.fprop.rht=16", "precision.rht_signs=none", "precision.wgrad.rht=0"],
    ["precision.fprop.activation.format=bf16", "precision.fprop.rht=16"],
    ["precision.switch.when=never", "precision.switch.target=fp8_block", "precision.switch.scope=forward"],
    ["precision.switch.when=never", "precision.switch.threshold=2.0", "precision.switch.rewarm_steps=10"],
    ["precision.switch.when=gradient_noise", "precision.switch.threshold=2.0", "precision.switch.patience=1"],
    [
        "precision=bf16",
        "precision.switch.when=0.5",
        "precision.switch.target=nvfp4",
        "precision.diagnostics.interval=5",
    ],
    ["precision=bf16", "precision.compute_dtype=float32"],
    ["run.replay_interval=50", "run.replay_action=warn"],
    ["spikes.action=skip", "checkpoint.interval=0", "spikes.threshold=5", "spikes.window=64"],
    ["spikes.action=rollback", "spikes.min_history=9", "train.steps=10", "spikes.max_in_row=1"],
]


@pytest.mark.parametrize(("overrides", "value", "remedy"), REFUSED)
def test_what_has_no_effect_is_refused(overrides: list[str], value: str, remedy: str) -> None:
    config = compose_config(overrides, CONFIGS)
    with pytest.raises(ConfigError) as error:
        validate(config, 1, "cpu")
    message = str(error.value)
    assert "\n" not in message
    assert value in message
    assert remedy in message


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_what_an_override_leaves_behind_is_accepted(overrides: list[str]) -> None:
    validate(compose_config(overrides, CONFIGS), 1, "cpu")


def test_a_targets_options_are_named_by_its_key() -> None:
    target = changed(composed("precision=bf16").precision, {"wgrad.rht": 16})
    with pytest.raises(ConfigError, match=r"^target\.wgrad\.rht=16 has no effect"):
        validate_precision(target, composed(), "cpu", key="target")
