"""What a value alone can have wrong, refused by the schema in one line."""

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError, ModelConfig, OptimizerConfig, TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
NUMBERS = [
    ("train.steps=0", "give 1 or more"),
    ("train.global_batch_size=-4", "give 1 or more"),
    ("train.micro_batch_size=0", "give 1 or more"),
    ("train.sequence_length=0", "give 1 or more"),
    ("train.max_skipped_steps=0", "give 1 or more"),
    ("logging.interval=0", "give 1 or more"),
    ("validation.num_samples=0", "give 1 or more"),
    ("parallel.tensor=0", "give 1 or more"),
    ("parallel.timeout_seconds=0", "give 1 or more"),
    ("checkpoint.keep=-1", "give 0 or more"),
    ("checkpoint.interval=-1", "give 0 or more"),
    ("validation.interval=-1", "give 0 or more"),
    ("data.num_workers=-1", "give 0 or more"),
    ("data.prefetch=0", "give 1 or more"),
    ("optimizer.clip_norm=-1.0", "give 0 or more"),
    ("optimizer.weight_decay=nan", "give 0 or more"),
    ("optimizer.lr=0.0", "above 0"),
    ("optimizer.lr=inf", "above 0"),
    ("optimizer.eps=0.0", "above 0"),
    ("optimizer.beta2=1.0", "0.95"),
    ("optimizer.beta1=-0.1", "0 or more and below 1"),
    ("run.seed=-1", "give 0 or more"),
    ("data.seed=-1", "give 0 or more"),
    ("run.dry_mfu=1.5", "above 0 and at most 1, such as 0.5"),
    ("model.hidden_dim=0", "give 1 or more"),
    ("schedule.warmup_fraction=1.5", "between 0 and 1"),
    ("schedule.warmup_fraction=-0.1", "between 0 and 1"),
    ("schedule.decay_fraction=1.1", "between 0 and 1"),
    ("schedule.min_lr_ratio=2.0", "between 0 and 1"),
    ("precision.bf16_blocks.first=-1", "0 or more"),
    ("precision.switch.interval=0", "1 or more"),
    ("precision.switch.patience=0", "1 or more"),
    ("precision.switch.rewarm_steps=-1", "0 or more"),
    ("precision.switch.threshold=0.0", "1.732"),
    ("precision.diagnostics.interval=-1", "0 or more"),
    ("precision.recheck_interval=-1", "0 or more"),
]
CHOICES = [
    ("logging.wandb=on", "online, offline, disabled"),
    ("run.device=tpu", "auto, cuda, cpu"),
    ("schedule.decay=step", "linear, cosine, 1-sqrt, exponential"),
    ("train.kernels=fast", "auto, torch, fused"),
    ("train.cuda_graphs=yes_please", "auto, true, false"),
    ("train.activation_checkpointing=all", "none, block, selective"),
    ("precision.backend=te", "auto, emulated, transformer_engine, torch"),
    ("precision.amax=local", "global, shard"),
    ("precision.rht_signs=random", "fixed, none, fresh"),
    ("precision.compute_dtype=fp16", "bfloat16, float32"),
    ("precision.switch.scope=all", "both, forward, backward"),
    ("precision.dgrad.gradient.rounding=up", "nearest, stochastic"),
    ("precision.wgrad.rht=12", "0, 2, 4, 8, 16, 32, 64, 128"),
    ("precision.wgrad.rht=256", "0, 2, 4, 8, 16, 32, 64, 128"),
    ("precision.recheck_action=stop", "end, warn"),
]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose_config(list(overrides), CONFIGS)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("override", "remedy"), NUMBERS)
def test_numbers_out_of_range(override: str, remedy: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{override} is out of range; give ") and remedy in message


@pytest.mark.parametrize(("override", "choices"), CHOICES)
def test_unknown_choices(override: str, choices: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{override} is not known; ") and choices in message


@pytest.mark.parametrize(
    ("phase", "value", "remedy"),
    [
        ("fraction: 1.5", "fraction=1.5", "above 0 and at most 1"),
        ("blend: {web: -1.0}", "blend.web=-1.0", "0 or more"),
        ("blend: {web: inf}", "blend.web=inf", "0 or more"),
    ],
)
def test_numbers_inside_lists_and_mappings(phase: str, value: str, remedy: str) -> None:
    message = refusal(f"data.phases=[{{{phase}}}]")
    assert message.startswith(f"data.phases[0].{value} is out of range; give ") and remedy in message


@pytest.mark.parametrize("override", ["train.steps=true", "train.steps=1.5e-3", "optimizer.lr=true", "train.steps=[1]"])
def test_truth_values_and_fractions_are_no_numbers(override: str) -> None:
    assert ": expected a" in refusal(override)


def test_an_integer_is_a_number_and_a_number_may_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "17")
    config = compose_config(["optimizer.lr=1", "train.steps=${oc.env:STEPS}", "run.dir=5"], CONFIGS)
    assert (config.optimizer.lr, config.train.steps, config.run.dir) == (1.0, 17, "5")
    assert isinstance(config.optimizer.lr, float)


def test_parts_check_themselves_where_code_makes_them() -> None:
    assert asdict(TrainConfig(steps=7))["steps"] == 7
    for make in (
        lambda: TrainConfig(steps=0),
        lambda: OptimizerConfig(implementation="torch"),  # type: ignore[call-arg]
        lambda: ModelConfig(hiden_dim=64),  # type: ignore[call-arg]
    ):
        with pytest.raises(ValidationError):
            make()


def test_defaults_are_valid() -> None:
    """pydantic does not check defaults."""

    def again(node: Any) -> Any:
        return type(node)(**{field.name: getattr(node, field.name) for field in fields(node)})

    nodes: list[Any] = [Config()]
    while nodes:
        node = nodes.pop()
        assert again(node) == node
        nodes += [child for child in vars(node).values() if is_dataclass(child)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", "auto"), ("true", "true"), ("false", "false"), ("'true'", "true"), ("False", "false")],
)
def test_a_switch_that_may_be_auto(given: str, expected: str) -> None:
    """Hydra makes booleans of true and false."""
    assert compose_config([f"train.cuda_graphs={given}"], CONFIGS).train.cuda_graphs == expected
