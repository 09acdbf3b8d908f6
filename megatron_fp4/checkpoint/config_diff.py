"""Compare a checkpoint's configuration with the run's: differences that forbid a resume, and those that are printed.

The identity of a run must be the same on a resume: model, batch, data, seed. Everything else may change (the mesh,
precision, optimizer and schedule, number of steps, intervals). A resume prints these changes, because they may not be
intended (a default of a newer version, a forgotten override).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.removed_keys import leaves, renewed
from megatron_fp4.config.schema import Config, ConfigError, ScheduleConfig
from megatron_fp4.precision.plan import PrecisionSwitch
from megatron_fp4.training.optimizer import WSDSchedule

NOT_OF_THE_MODEL = ("name", "nvfp4_bf16_blocks", "fp8_bf16_blocks")
"""Keys under `model` that do not change the model: a label, and settings of precision."""
# Keys under `model` that only training uses, like the learning rate.
_OF_TRAINING = ("moe_bias_rate", "moe_aux_loss", "moe_z_loss", "mtp_loss_scaling_factor", "mtp_use_repeated_layer")
_ABSENT = "(absent)"
# Keys, or beginnings of keys, about one start and not about the run.
_OF_A_START = ("run.dir", "run.dry", "checkpoint.resume", "checkpoint.initialize_from", "checkpoint.allow_mismatch")
# Keys, or beginnings of keys, that decide what a run learns. A finished run with other values is another run.
_OF_THE_RESULT = (
    *("model.", "train.", "precision.", "optimizer.", "schedule.", "spikes."),
    *("data.kind", "data.order", "data.phases", "data.documents", "data.boundary_loss"),
)
_SHOWN = 12


def run_identity(config: Config, data_fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run as a flat dict, dotted name -> JSON value.

    data_fingerprint: identifies data and tokenizer: JSON types, nested at will. Its names begin with `data.`.
    """
    model = dataclasses.asdict(config.model)
    for name in (*NOT_OF_THE_MODEL, *_OF_TRAINING):
        del model[name]
    # For how many depths training uses a set of weights is no part of the model either.
    model["pattern"] = "/".join((config.model.main_pattern, *config.model.mtp_sets))
    nested = {
        "model": model,
        "train": {key: getattr(config.train, key) for key in ("sequence_length", "global_batch_size")},
        "run": {"seed": config.run.seed},
        "data": json.loads(json.dumps(data_fingerprint)),  # as a checkpoint returns it
    }
    return dict(leaves(nested))


def identity_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """A line with both values for each field that differs, by field; empty for the same run."""
    pairs = {name: (saved.get(name, _ABSENT), current.get(name, _ABSENT)) for name in sorted({*saved, *current})}
    return {name: f"{name}: {a!r} in the checkpoint, {b!r} now" for name, (a, b) in pairs.items() if a != b}


class Change(NamedTuple):
    """A key of the configuration with its value in the checkpoint and now (JSON types)."""

    key: str
    before: Any
    now: Any


def configuration_changes(saved: Mapping[str, Any], config: Config) -> list[Change]:
    """The keys whose values differ. saved: a checkpoint's configuration, as read from JSON.

    Keys that the checkpoint's version did not have are left out. The keys of the precision after the switch are left
    out if the switch has another target, because that change explains them.
    """
    now = json.loads(json.dumps(as_saved(config)))
    changes = list(_differences("", config, renewed(saved), now))
    hidden: tuple[str, ...] = _OF_A_START
    if any(change.key == "precision.switch.target" for change in changes) or not saved.get("after_switch"):
        hidden += ("after_switch",)
    return [change for change in changes if not change.key.startswith(hidden)]


def change_lines(changes: list[Change]) -> list[str]:
    """A line for each change; of many, the first dozen."""
    lines = [f"changed since the checkpoint: {key} {_plain(before)} -> {_plain(now)}" for key, before, now in changes]
    rest = len(lines) - _SHOWN
    return lines if rest <= 1 else [*lines[:_SHOWN], f"and {rest} more, all in metrics.jsonl"]


def refuse_finished(saved: Mapping[str, Any], config: Config, start: int) -> None:
    """Raise ConfigError if the run in run.dir has made all its steps, `start`, with other settings than `config`: the
    command is meant for another run. saved: as in `configuration_changes`."""
    if start != config.train.steps or not saved:
        return
    changes = [change for change in configuration_changes(saved, config) if change.key.startswith(_OF_THE_RESULT)]
    if changes:
        shown = ", ".join(f"{key} {_plain(before)} -> {_plain(now)}" for key, before, now in changes[:3])
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ConfigError(
            f"run.dir={config.run.dir} has finished its {start} steps with other settings ({shown}{more}); give this "
            "run another run.dir, or raise train.steps to continue that one"
        )


def consequences(saved: Mapping[str, Any], config: Config, switch: PrecisionSwitch, start: int) -> list[str]:
    """Lines about the effects of a changed schedule on precision switch and learning rate, after `start` steps."""
    lines = []
    if switch.switched_at is not None and switch.at_step is not None and switch.at_step > start:
        lines.append(
            f"the precision switched before step {switch.switched_at + 1} and stays switched, although "
            f"precision.switch.when={config.precision.switch.when} now means step {switch.at_step + 1}; to switch "
            f"there, begin from a checkpoint before step {switch.switched_at + 1} in another "
            "run.dir (checkpoint.resume=PATH)"
        )
    try:
        schedule = ScheduleConfig(**saved["schedule"])
        before = WSDSchedule(schedule, saved["optimizer"]["lr"], saved["train"]["steps"])
        last = before.lr(start - 1)
    except (KeyError, TypeError, ValueError, AssertionError):  # a configuration of another version
        return lines
    now = WSDSchedule.of(config)
    if start > before.decay_start_step and start < now.num_steps and now.lr(start) > last:
        lines.append(
            f"WARNING: the learning rate had begun to decay and rises again, from {last:.2e} in step {start} to "
            f"{now.lr(start):.2e} in step {start + 1}; it now decays from step {now.decay_start_step + 1}"
        )
    return lines


def _differences(prefix: str, fields: Any, before: Any, now: Any) -> Iterator[Change]:
    if dataclasses.is_dataclass(fields) and isinstance(before, Mapping):
        for name in (field.name for field in dataclasses.fields(fields)):
            if name in before and name in now:
                yield from _differences(f"{prefix}.{name}", getattr(fields, name), before[name], now[name])
    elif _is_list_of_dataclasses(fields) and isinstance(before, list) and len(before) == len(fields):
        for index, (inner, one, other) in enumerate(zip(fields, before, now, strict=True)):
            yield from _differences(f"{prefix}[{index}]", inner, one, other)
    elif before != now:
        yield Change(prefix.removeprefix("."), before, now)


def _is_list_of_dataclasses(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(dataclasses.is_dataclass, value))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
