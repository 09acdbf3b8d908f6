"""What a run measures, written where it can be read back: `metrics.jsonl`, TensorBoard, wandb.

`metrics.jsonl` is the record; the other two are views of it. One JSON object a line, told apart by `kind`:

    run         once per start: the step it starts from, and whatever facts about the run the caller gives (total
                steps, where the decay starts, ...), for those who read the file without the configuration
    step        one training step: the fields of `StepMetrics`
    validation  `losses`, one per source (nats per token), and `loss`, their mean
    diagnostics, gradient_noise
                measurements of what quantization does, see measure/diagnostics.py and measure/gradient_noise.py
    event       `event` (switch, checkpoint, skip, spike, stop) and its details; a switch belongs to the first step that
                it changes

`step` counts the steps that are done: the first update writes step 1, and a checkpoint after N updates belongs to
step N. JSON has no NaN or infinity: a number that is not finite is written as `null`, and `skipped` or an event says
why. Every line is flushed, so that a killed run loses at most the line it was writing.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One training step.

    step: steps done, this one included. tokens: seen since the run began. loss: mean NLL in nats per token over the
    global batch. lr: what the update used. grad_norm: before clipping. tokens_per_second: over all ranks.
    model_tflops: model TFLOP/s per device. step_time: seconds. skipped: no update, because something was not finite or
    the step was a spike.
    phase: name of the data phase. plan: name of the precision plan in effect.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    model_tflops: float
    step_time: float
    skipped: bool
    phase: str
    plan: str

    @property
    def spike(self) -> bool:
        """Whether it was skipped although everything was finite."""
        return self.skipped and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class MetricsWriter:
    """Writes a run's metrics on one rank; on the others (`active=False`) every method does nothing.

    run_dir: created if missing. resume_step: steps done by the checkpoint that the run resumes from; lines of later
    steps are cut, so that the file has each step once. 0 is a fresh start, which moves records of an earlier run in
    the same folder aside (`metrics.jsonl.1`, ...) instead of mixing with them.
    wandb_mode: `online`, `offline` or `disabled`. wandb_run_id: as `wandb_run_id` was when the checkpoint was made, so
    that the run continues as one; None starts a new one. config: the resolved configuration, shown by wandb.

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
        self._tensorboard: SummaryWriter | None = None
        self._wandb: Any = None
        if not active:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if resume_step > 0:
            cut_after(self.path, resume_step)
        else:
            _move_aside(self.path)
            _move_aside(directory / "tensorboard")
        if tensorboard:
            self._tensorboard = _open_tensorboard(directory / "tensorboard", resume_step)
        if wandb_mode != "disabled":
            self._wandb = _open_wandb(directory, wandb_mode, wandb_project, wandb_run_id, config)
            self.wandb_run_id = self._wandb.id
        self._file = self.path.open("a", encoding="utf-8")

    def run(self, step: int, **facts: Any) -> None:
        """Record a start from `step` steps done, with facts about the run (JSON values)."""
        self._write({"kind": "run", "step": step, **facts})

    def step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        record = asdict(metrics)
        self._write({"kind": "step", **record})
        names = ("loss", "lr", "grad_norm", "tokens_per_second", "model_tflops", "step_time", "tokens")
        self._show({f"train/{name}": record[name] for name in names}, metrics.step)

    def validation(self, step: int, tokens: int, losses: dict[str, float]) -> None:
        """Record validation losses by source, in nats per token, after `step` steps and `tokens` training tokens."""
        mean = sum(losses.values()) / len(losses) if losses else math.nan
        self._write({"kind": "validation", "step": step, "tokens": tokens, "loss": mean, "losses": losses})
        self._show({f"validation/{source}": loss for source, loss in losses.items()}, step)

    def record(self, step: int, kind: str, values: dict[str, Any], scalars: dict[str, float]) -> None:
        """Record a measurement of another kind after `step` steps: `values` (JSON), and what of it makes curves."""
        self._write({"kind": kind, "step": step, **values})
        self._show(scalars, step)

    def event(self, step: int, event: str, **details: Any) -> None:
        """Record that `event` happened after `step` steps, with details (JSON values)."""
        self._write({"kind": "event", "step": step, "event": event, **details})
        if self._tensorboard is not None:
            self._tensorboard.add_text("events", f"{event} {_json(details)}", step)

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        if not self.active or self._file.closed:
            return
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self.active:
            self._file.write(_json(record) + "\n")
            self._file.flush()

    def _show(self, values: dict[str, float], step: int) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in order; a last line that a killed run did not finish is left out.

    Raises FileNotFoundError if there is no file and ValueError, with the line's number, if another line is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove that line") from error
    return records


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


def cut_after(path: str | Path, step: int) -> int:
    """Remove the records of steps after `step`, and an unfinished last line; returns how many records were removed.

    The file is replaced whole, so that a kill leaves the old or the new one. A missing file counts as empty. Raises
    ValueError if a line in the middle is damaged.
    """
    path = Path(path)
    if not path.exists():
        return 0
    records = read_metrics(path)
    kept = [record for record in records if record["step"] <= step]
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_json(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(records) - len(kept)


def _json(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _move_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)


def _open_tensorboard(directory: Path, resume_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "logging.tensorboard=true needs the package tensorboard; pip install tensorboard, or set it to false"
        ) from error
    # Points of steps after the checkpoint are hidden, as they are cut from metrics.jsonl.
    return SummaryWriter(str(directory), purge_step=resume_step + 1 if resume_step else None, flush_secs=10)


def _open_wandb(directory: Path, mode: str, project: str, run_id: str | None, config: dict[str, Any] | None) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"logging.wandb={mode} needs the package wandb; pip install wandb, or set disabled") from error
    if mode == "online":
        # wandb's own switch for machines without a network, which an explicit mode would overrule.
        mode = os.environ.get("WANDB_MODE", mode)
    # wandb wraps stdout by default, which garbles a live progress bar.
    settings = wandb.Settings(console="off", quiet=True)
    try:
        return wandb.init(
            project=project,
            name=directory.name,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type]
            id=run_id,
            resume="allow",
            config=config,
            settings=settings,
        )
    except wandb.Error as error:
        raise ValueError(f"logging.wandb={mode} did not start ({error}); run `wandb login`, or use offline") from error
