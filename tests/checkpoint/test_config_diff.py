"""How a configuration differs from a checkpoint's: what is refused, and what is reported."""

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import torch

from megatron_fp4.checkpoint.config_diff import (
    Change,
    change_lines,
    configuration_changes,
    consequences,
    identity_differences,
    run_identity,
)
from megatron_fp4.checkpoint.find import _differs
from megatron_fp4.config.precision_schema import PrecisionConfig, SwitchConfig
from megatron_fp4.config.schema import Config, DataConfig, ParallelConfig, PhaseConfig, RunConfig, TrainConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import PrecisionSwitch
from models.hybrid import build_model
from tests.composing import saved_of

PHASES = [PhaseConfig("a", 0.5, blend={"web": 1.0}), PhaseConfig("b", 0.5, blend={"web": 2.0, "code": 1.0})]
DATA = {"tokenizer": "abc", "train": {"web": {"sha256": "1", "num_tokens": 10}}, "validation": {}}


def config(**changes: Any) -> Config:
    """changes: `optimizer__lr=1.0` for optimizer.lr."""
    made = Config(data=DataConfig(phases=PHASES, sources={"web": "/w"}), after_switch=PrecisionConfig(name="bf16"))
    for key, value in changes.items():
        group, _, name = key.partition("__")
        made = replace(made, **{group: replace(getattr(made, group), **{name: value}) if name else value})
    return made


def saved(**changes: Any) -> dict[str, Any]:
    return saved_of(config(**changes))


def test_another_run_differs_in_fields_that_are_named_with_both_values() -> None:
    same = Config(parallel=ParallelConfig(tensor=4), train=TrainConfig(steps=7), run=RunConfig(dir="elsewhere"))
    assert identity_differences(run_identity(Config(), DATA), run_identity(same, DATA)) == {}  # longer, another mesh
    other = Config(train=TrainConfig(sequence_length=512), run=RunConfig(seed=5))
    other = replace(other, model=replace(other.model, hidden_dim=64))
    data = {"tokenizer": "abd", "train": {"web": {"sha256": "2", "num_tokens": 10}, "code": {"sha256": "3"}}}
    lines = identity_differences(run_identity(Config(), DATA), run_identity(other, data))
    keys = "data.tokenizer data.train.code.sha256 data.train.web.sha256 data.validation model.hidden_dim run.seed"
    assert [*lines] == [*keys.split(), "train.sequence_length"]
    assert lines["train.sequence_length"] == "train.sequence_length: 256 in the checkpoint, 512 now"
    assert lines["data.train.code.sha256"] == "data.train.code.sha256: '(absent)' in the checkpoint, '3' now"


def test_other_values_may_be_allowed_for_the_keys_of_the_model_that_change_no_shape(mesh: ParallelMesh) -> None:
    def shapes(model: Any) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: tensor.shape for name, tensor in build_model(model, mesh, torch.float32).state_dict().items()}

    model = replace(Config().model, pattern="M*-GE", moe_num_groups=2)
    hints = get_type_hints(type(model))
    for key in (key for key in run_identity(Config(), {}) if key.startswith("model.")):
        name = key.removeprefix("model.")
        value = getattr(model, name)
        words = [word for word in get_args(hints[name]) if word != value]  # if it is a Literal
        other = next(iter(words), not value if isinstance(value, bool) else value * 2 or 64)
        allowed = "allow_mismatch" in str(_differs("", {key: ""}, "", "", ""))
        assert allowed == (shapes(replace(model, **{name: other})) == shapes(model)), key


def test_changes_are_listed_by_key_with_both_values() -> None:
    phases = [PHASES[0], replace(PHASES[1], blend={"web": 1.0})]
    now = config(
        optimizer__lr=0.5, parallel__sequence=False, data__phases=phases, data__sources={"web": "/w", "new": "/n"}
    )
    assert configuration_changes(saved(), now) == [
        Change("data.sources", {"web": "/w"}, {"web": "/w", "new": "/n"}),
        Change("data.phases[1].blend", {"web": 2.0, "code": 1.0}, {"web": 1.0}),
        Change("optimizer.lr", 0.002, 0.5),
        Change("parallel.sequence", None, False),
    ]
    assert change_lines([Change("optimizer.lr", 0.002, 0.5)]) == [
        "changed since the checkpoint: optimizer.lr 0.002 -> 0.5"
    ]
    fewer = configuration_changes(saved(), config(data__phases=PHASES[:1]))
    assert [change.key for change in fewer] == ["data.phases"]
    many = change_lines([Change(f"k{i}", i, i + 1) for i in range(20)])
    assert len(many) == 13 and many[-1] == "and 8 more, all in metrics.jsonl"


def test_what_does_not_count_as_a_change() -> None:
    assert configuration_changes(saved(), config()) == []
    of_this_start = config(run__dir="elsewhere", run__dry=True, checkpoint__resume="never")
    assert configuration_changes(saved(), of_this_start) == []
    before = saved()  # keys that only one of the two versions has
    del before["optimizer"]["eps"], before["logging"]
    before["optimizer"]["forgotten"] = 3
    before["checkpoint"]["local_interval"] = 50
    assert configuration_changes(before, config(optimizer__eps=1.0)) == []


def test_changes_of_the_switch_and_of_the_precision_after_it() -> None:
    other = config(after_switch=PrecisionConfig(name="bf16", compute_dtype="float32"))
    assert configuration_changes(saved(), other) == [Change("after_switch.compute_dtype", "bfloat16", "float32")]
    switch = replace(PrecisionConfig().switch, target="mxfp8")
    other = replace(other, precision=replace(other.precision, switch=switch))
    assert [change.key for change in configuration_changes(saved(), other)] == ["precision.switch.target"]


def test_a_lengthened_run_that_has_not_begun_to_decay_is_told_nothing() -> None:
    """test_resume.py lengthens one that has."""
    switch = PrecisionSwitch(SwitchConfig(when="before_decay"), at_step=170, switched_at=None)
    now = config(train__steps=200)
    assert consequences(saved(train__steps=100), now, switch, start=80) == []
    assert consequences({}, now, PrecisionSwitch(), start=3) == []  # a configuration of another version
