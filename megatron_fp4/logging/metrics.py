"""What a run measures, written where it can be read back: `metrics.jsonl`, TensorBoard, wandb.

`metrics.jsonl` is the record; the other two are views of it. One JSON object a line, told apart by `kind`:

    run         once per start: the step it starts from, and whatever facts about the run the caller gives (total
                steps, where the decay starts, ...), for those who read the file without the configuration
    step        one training step: the fields of `StepMetrics`; `epochs` and `peak_memory_gib` every `logging.interval`
                steps, `mfu` where the device's peak is known
    validation  `losses`, one per source (nats per token), and `loss`, their mean; `bits_per_byte`, one per source
                whose bytes of text are known
    diagnostics, gradient_noise
                measurements of what quantization does, see measure/diagnostics.py and measure/gradient_noise.py
    event       `event` (switch, checkpoint, skip, stop, text, ...) and its details; a switch belongs to the first step
                that it changes

`step` counts the steps that are done: the first update writes step 1, and a checkpoint after N updates belongs to
step N. JSON has no NaN or infinity: a number that is not finite is written as `null`, and `skipped` or an event says
why. record_file.py says what becomes of lines when processes, disks and power fail; nothing of it ends a run.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_fp4.logging.curves import step_curves, validation_curves
from megatron_fp4.logging.record_file import (
    EMPTY,
    UNFINISHED,
    Cut,
    RecordFile,
    cut_after,
    lines_of,
    listed,
    move_aside,
    record_of,
)
from megatron_fp4.logging.step_metrics import StepMetrics as StepMetrics
from megatron_fp4.logging.tensorboard_view import TensorBoardView
from megatron_fp4.logging.wandb_view import ID_FILE, WandbSettings, WandbView

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes a run's metrics on one rank; on the others (`active=False`) every method does nothing.

    run_dir: created if missing. resume_step: steps done by the checkpoint that the run resumes from; lines of later
    steps are cut, so that the file has each step once, and lines that are no records are set aside. 0 is a fresh
    start, which moves records of an earlier run in the same folder aside (`metrics.jsonl.1`, ...) instead of mixing
    with them.
    wandb_mode: `online`, `offline` or `disabled`. wandb_run_id: as `wandb_run_id` was at an earlier start, so that
    the run continues as one; None starts a new one. config: the configuration as it is saved, shown by wandb.

    What fails while writing is said and tried again; no method raises for it. `sync` may be called from any thread,
    the others belong to one.

    Raises ValueError if a package that the settings ask for is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        resume_step: int = 0,
        tensorboard: bool = True,
        wandb_mode: str = "disabled",
        wandb_project: str = "megatron_fp4",
        wandb_run_id: str | None = None,
        config: dict[str, Any] | None = None,
        active: bool = True,
    ) -> None:
        self.active = active
        self.path = Path(run_dir) / METRICS_FILE
        self.wandb_run_id = wandb_run_id
        self._tensorboard: TensorBoardView | None = None
        self._wandb: WandbView | None = None
        self._closed, self._repaired, self._last_step = False, Cut(), resume_step
        if not active:
            return
        directory = Path(run_dir)

        def prepare() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            if resume_step > 0:
                self._repaired = cut_after(self.path, resume_step)
            else:
                move_aside(self.path)
                move_aside(directory / ID_FILE)

        self._file = RecordFile(self.path, prepare)
        if tensorboard:
            if resume_step == 0:
                try:
                    move_aside(directory / "tensorboard")
                except OSError as error:
                    logger.error("%s could not be moved aside (%s); curves mix there", directory / "tensorboard", error)
            self._tensorboard = TensorBoardView(directory / "tensorboard", resume_step)
        self._tell_repair(resume_step)
        if wandb_mode != "disabled":
            settings = WandbSettings(wandb_mode, wandb_project, wandb_run_id, config)
            self._wandb = WandbView(directory, settings)
            self.wandb_run_id = self._wandb.run_id

    def run(self, step: int, **facts: Any) -> None:
        """Record a start from `step` steps done, with facts about the run (JSON values)."""
        self._write({"kind": "run", "step": step, **facts})

    def step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        record = asdict(metrics)
        for name in ("epochs", "mfu", "peak_memory_gib"):
            if record[name] in (None, {}):
                del record[name]
        self._write({"kind": "step", **record})
        self._show(step_curves(metrics), metrics.step)

    def validation(
        self, step: int, tokens: int, losses: dict[str, float], bits_per_byte: dict[str, float] | None = None
    ) -> None:
        """Record validation losses by source, in nats per token, after `step` steps and `tokens` training tokens.

        bits_per_byte: the same for each byte of text, of sources whose bytes are known.
        """
        mean = sum(losses.values()) / len(losses) if losses else math.nan
        record = {"kind": "validation", "step": step, "tokens": tokens, "loss": mean, "losses": losses}
        self._write(record | ({"bits_per_byte": bits_per_byte} if bits_per_byte else {}))
        self._show(validation_curves(losses, bits_per_byte), step)

    def record(self, step: int, kind: str, values: dict[str, Any], scalars: dict[str, float]) -> None:
        """Record a measurement of another kind after `step` steps: `values` (JSON), and what of it makes curves."""
        self._write({"kind": kind, "step": step, **values})
        self._show(scalars, step)

    def event(self, step: int, event: str, **details: Any) -> None:
        """Record that `event` happened after `step` steps, with details (JSON values)."""
        self._write({"kind": "event", "step": step, "event": event, **details})
        if self._tensorboard is not None:
            self._tensorboard.event(f"{event} {_json(details)}", step)

    def texts(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record what the model says after `step` steps: an event `text`, its `samples` with `prompt`, `text` (null:
        not finite) and `ended`."""
        self._write({"kind": "event", "step": step, "event": "text", "samples": samples})
        if self._tensorboard is not None:
            self._tensorboard.texts(samples, step)
        if self._wandb is not None:
            self._wandb.texts(samples, step)

    def sync(self) -> None:
        """Return when every record so far is down on the disk (if the disk takes it; otherwise that has been said).

        To be called before a checkpoint is published, so that a checkpoint of step N on disk means that the records
        of all steps up to N are there too.
        """
        if self.active:
            self._file.sync()

    def close(self, hurry: bool = False) -> None:
        """Sync and close everything; a second call does nothing. hurry: do not wait long for wandb."""
        if not self.active or self._closed:
            return
        self._closed = True
        self._file.sync()  # before the wait for wandb, in which a scheduler may lose its patience
        if self._wandb is not None:
            self._wandb.close(hurry)
            self._tell_wandb(self._last_step)
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(hurry=error is not None)

    def _write(self, record: dict[str, Any]) -> None:
        if self.active:
            self._last_step = record["step"]
            self._file.write(_json(record))
            self._tell_repair(record["step"])

    def _tell_repair(self, step: int) -> None:
        """Say which lines were set aside when the file was opened, which may have been late."""
        repaired, self._repaired = self._repaired, Cut()
        if repaired.kept_as is None:
            return
        lines = listed(repaired.bad_lines)
        logger.warning(
            "%s: %s %s no record and set aside; the file as it was is %s",
            self.path, lines, "is" if len(repaired.bad_lines) == 1 else "are", repaired.kept_as,
        )  # fmt: skip
        self.event(step, "metrics_repaired", count=len(repaired.bad_lines), lines=lines, kept_as=repaired.kept_as.name)

    def _show(self, values: dict[str, float], step: int) -> None:
        if self._tensorboard is not None:
            self._tensorboard.show(values, step)
        if self._wandb is not None:
            self._wandb.show(values, step)
            self._tell_wandb(step)

    def _tell_wandb(self, step: int) -> None:
        """Record what wandb's thread has found out meanwhile."""
        for reason in self._wandb.news() if self._wandb is not None else []:
            self.event(step, "wandb_offline", reason=reason)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in order.

    A last line that a killed run did not finish is left out; so is, with a warning, every line that is no record: the
    next resume of the run will set it aside. Raises FileNotFoundError if there is no file.
    """
    records, wrong = [], {}
    with Path(path).open("rb") as file:
        for number, line, _ in lines_of(file):
            record = record_of(line)
            if isinstance(record, dict):
                records.append(record)
            elif record not in (EMPTY, UNFINISHED):
                wrong[number] = record
    if wrong:
        why = ", ".join(dict.fromkeys(wrong.values()))
        logger.warning("%s: %s left out: no record (%s)", path, listed(list(wrong)), why)
    return records


def last_validation(run_dir: str | Path, step: int) -> dict[str, Any] | None:
    """The last record `validation` of the run in `run_dir` up to `step` steps; None if it has none, or no records.

    Reads line by line: a long run has a record for each of its steps.
    """
    path, found = Path(run_dir) / METRICS_FILE, None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        for _, line, _ in lines_of(file):
            record = record_of(line)
            if isinstance(record, dict) and record["kind"] == "validation" and record["step"] <= step:
                found = record
    return found


def records_of_run(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of the run in `run_dir`. Raises FileNotFoundError if there is no metrics.jsonl."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the folder of a run (its run.dir)")
    return read_metrics(path)


def steps_of(records: list[dict[str, Any]], run_dir: str | Path) -> list[dict[str, Any]]:
    """Those of `records_of_run` that are training steps. Raises ValueError if there are none yet."""
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise ValueError(
            f"{Path(run_dir) / METRICS_FILE} has no training steps yet; come back once the run has made some"
        )
    return steps


def _json(value: Any) -> str:
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False)


def finite(value: Any) -> Any:
    """A JSON value with `None` for each number in it that is not finite: JSON has none for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
