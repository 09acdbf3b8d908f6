"""Write a run's metrics to `metrics.jsonl`, and to TensorBoard and wandb as views of it.

Each line is a JSON object with a `kind`:

    run         once per start: the step it starts from, and facts about the run
    step        one training step: the fields of `StepMetrics`; `epochs` and `peak_memory_gib` every `logging.interval`
                steps, `mfu` where the device's peak is known
    validation  `losses` by source (nats per token), and `loss`, their mean; `bits_per_byte` of sources with a known
                number of bytes of text
    diagnostics, gradient_noise
                errors of quantization, see measure/diagnostics.py and measure/gradient_noise.py
    time        the wall time so far by kind, see run_log.py
    event       `event` (switch, checkpoint, skip, stop, text, ...) and its details; the step of a switch is the first
                one that it changes

`step` counts the steps that are done: the first update writes step 1, and a checkpoint after N updates has step N.
Numbers that are not finite are written as `null`, because JSON has no others. files.py handles failing disks.

TensorBoard and wandb group curves by the part of their names before the first slash.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.errors import hidden
from megatron_fp4.config.schema import Config
from megatron_fp4.logging import files as log_files

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
# Time between attempts to write to a view that fails.
RETRY_SECONDS = 30.0
# How long wandb may take to reach its server before the run logs offline.
INIT_SECONDS = 60
# How long a run waits at its end for a view; and if the run was asked to stop, or failed.
FINISH_SECONDS, HURRY_SECONDS = 30.0, 5.0
# The most points that wait for a view that fails: a day of steps of two seconds, in about 100 MB.
_MOST_WAITING = 50_000


@dataclass(frozen=True)
class StepMetrics:
    """One training step.

    step: steps done, including this one. tokens: since the run began. loss: mean NLL in nats per token over the global
    batch. grad_norm: before clipping. tokens_per_second: of all ranks. model_tflops: model TFLOP/s per device.
    step_time: seconds, including the wait for data. skipped: there was no update, because loss or norm was not finite,
    or the step was a spike. phase, plan: names of the data phase and of the precision plan. data_wait: seconds that the
    first rank waited for its micro-batches. epochs: epochs of each source so far; empty in most steps. mfu:
    model_tflops over the device's peak in BF16; None if unknown. peak_memory_gib: of the first rank since it began;
    None in most steps. joules_per_token: of all ranks' GPUs since the step before, if each takes what the first one's
    counter says; None without such a counter.
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
    data_wait: float = 0.0
    epochs: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    peak_memory_gib: float | None = None
    joules_per_token: float | None = None

    @property
    def spike(self) -> bool:
        return self.skipped and math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def curves(self) -> dict[str, float]:
        curves = {
            "loss/train": self.loss,
            "optimizer/lr": self.lr,
            "optimizer/grad_norm": self.grad_norm,
            "optimizer/skipped": float(self.skipped),
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/tflops_per_device": self.model_tflops,
            "speed/mfu": self.mfu,
            "speed/step_seconds": self.step_time,
            "speed/data_wait_seconds": self.data_wait,
            "memory/peak_gib": self.peak_memory_gib,
            "energy/joules_per_token": self.joules_per_token,
            "data/tokens": float(self.tokens),
            **{f"data/epochs_{name}": epochs for name, epochs in self.epochs.items()},
        }
        return {name: value for name, value in curves.items() if value is not None}


class MetricsWriter:
    """Writes a run's metrics on one rank; on the others (`active=False`) every method does nothing.

    start: steps done in the checkpoint that the run resumes from. Records of later steps are removed, so that the file
    has each step once, and the run continues at wandb. 0: a new run; earlier ones are moved aside.

    A failure to write is logged and tried again, never raised. Any thread may call `sync` and `event`; one thread calls
    the others.
    """

    def __init__(self, config: Config, start: int, active: bool) -> None:
        run_dir, settings = Path(config.run.dir), config.logging
        self.active = active
        self._views: list[TensorBoardView | WandbView] = []
        self._last_step = start
        if not active:
            return

        def prepare() -> None:
            run_dir.mkdir(parents=True, exist_ok=True)
            if start > 0:
                log_files.cut_after(run_dir / log_files.METRICS_FILE, start)
            else:
                for name in (log_files.METRICS_FILE, ID_FILE, "tensorboard"):
                    log_files.move_aside(run_dir / name)

        self._file = log_files.RecordFile(run_dir / log_files.METRICS_FILE, prepare)
        if settings.tensorboard:
            self._views.append(TensorBoardView(run_dir / "tensorboard", start))
        if settings.wandb != "disabled":
            run_id = known_run_id(run_dir) if start else None
            self._views.append(WandbView(config, run_id, self._wandb_is_offline))

    def record(
        self, step: int, kind: str, values: Mapping[str, Any], curves: Mapping[str, float] | None = None
    ) -> None:
        """Record `values` (JSON) of a `kind` after `step` steps, and show `curves`."""
        self._write({"kind": kind, "step": step, **values})
        if curves:
            for view in self._views:
                view.show(curves, step)

    def step(self, metrics: StepMetrics) -> None:
        values = {name: value for name, value in asdict(metrics).items() if value not in (None, {})}
        self.record(metrics.step, "step", values, metrics.curves())

    def event(self, step: int, event: str, **details: Any) -> None:
        """Record that `event` happened after `step` steps, with details (JSON values)."""
        self._write({"kind": "event", "step": step, "event": event, **details})
        for view in self._views:
            view.event(f"{event} {_json(details)}", step)

    def texts(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Record texts of the model after `step` steps. samples: with `prompt`, `text` (null: not finite), `ended`."""
        self._write({"kind": "event", "step": step, "event": "text", "samples": samples})
        for view in self._views:
            view.texts(samples, step)

    def sync(self) -> None:
        """Return when every record so far is on the disk, or a failure is logged.

        Called before a checkpoint is published, so that the records of a checkpoint's steps are on the disk too.
        """
        if self.active:
            self._file.sync()

    def close(self, hurry: bool = False) -> None:
        """Sync and close everything, once. hurry: do not wait long for views."""
        if not self.active:
            return
        self._file.sync()  # before the wait for views, during which a scheduler may kill the run
        for view in reversed(self._views):  # wandb first: that it is offline is an event, which TensorBoard shows
            view.close(HURRY_SECONDS if hurry else FINISH_SECONDS)
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self.active:
            self._last_step = record["step"]
            self._file.write(_json(record))

    def _wandb_is_offline(self, reason: str) -> None:
        self.event(self._last_step, "wandb_offline", reason=reason)


def last_validation(run_dir: str | Path, step: int) -> dict[str, Any] | None:
    """The last `validation` record of the run in `run_dir` up to `step` steps; None if there is none."""
    return next(reversed([each for each in log_files.records_of(run_dir, "validation") if each["step"] <= step]), None)


def finite(value: Any) -> Any:
    """A JSON value, with `None` instead of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _json(value: Any) -> str:
    return hidden(json.dumps(finite(value), allow_nan=False, ensure_ascii=False))


class View:
    """A destination of curves and texts besides metrics.jsonl. It never stops or delays the run.

    A thread opens it and writes what the run queues. If that fails, it is opened again later, and the data waits.
    """

    name: str

    def __init__(self) -> None:
        self._outage = log_files.Outage(self.name, f"up to {_MOST_WAITING:,} points wait for it")
        self._writer: Any = None
        self._waiting: deque[Callable[[Any], object]] = deque(maxlen=_MOST_WAITING)
        self._changed = threading.Condition()
        self._closing = self._finished = False
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def event(self, text: str, step: int) -> None:
        """Show an event. By default, views do not show events."""

    def close(self, patience: float) -> None:
        """Wait at most `patience` seconds until everything is written, and log what is not."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)
        if not self._finished:
            left = f"{len(self._waiting)} points were not written" if self._waiting else "not everything was sent"
            logger.error("%s: %s within %.0f s; metrics.jsonl has all%s", self.name, left, patience, self._remedy())

    def _open(self) -> Any:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        self._writer = None

    def _remedy(self) -> str:
        return ""

    def _queue(self, action: Callable[[Any], object]) -> None:
        with self._changed:
            self._waiting.append(action)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                action = self._waiting[0]
            try:
                if self._writer is None:
                    self._writer = self._open()
                action(self._writer)
            except Exception as error:
                self._give_up()
                self._outage.failed(error)
                with self._changed:
                    if self._closing:
                        return
                    self._changed.wait_for(lambda: self._closing, RETRY_SECONDS)
            else:
                self._outage.worked()
                with self._changed:
                    if self._waiting[0] is action:  # otherwise a full queue has dropped it meanwhile
                        self._waiting.popleft()
        try:
            if self._writer is not None:
                self._finish()
            self._finished = True
        except Exception as error:
            logger.error("%s: %s: %s", self.name, type(error).__name__, error)


class TensorBoardView(View):
    """Curves and texts in `directory`. After a failure it begins a new file there.

    resume_step: points of later steps are hidden, because they are removed from metrics.jsonl too.
    """

    name = "tensorboard"

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._directory = directory
        self._purge_step = resume_step + 1 if resume_step else None
        super().__init__()

    def show(self, values: Mapping[str, float], step: int) -> None:
        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._queue(add)

    def texts(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        for number, sample in enumerate(samples, start=1):
            self._text(f"text/{number}", textwrap.indent(f"{sample['prompt']}|{sample['text']}", " " * 4), step)

    def event(self, text: str, step: int) -> None:
        self._text("events", text, step)

    def _text(self, name: str, text: str, step: int) -> None:
        """Show text, which is Markdown: indented lines are shown as they are."""
        self._queue(lambda writer: writer.add_text(name, text, step))

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # imports boto3, so that no start waits for it

        writer = SummaryWriter(str(self._directory), purge_step=self._purge_step, flush_secs=10)
        self._purge_step = None  # a later file hides nothing
        return writer

    def _finish(self) -> None:
        self._writer.close()


class WandbView(View):
    """Curves and texts at wandb. Without its server, they go to files that `wandb sync` sends later, under the same id.

    run_id: of an earlier start; None: a new id. It is written to wandb_run_id in the run's folder. is_offline: its
    thread calls it with the reason, if a run in the mode `online` logs offline.
    """

    name = "wandb"

    def __init__(self, config: Config, run_id: str | None, is_offline: Callable[[str], object]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._directory, self._config, self._is_offline = Path(config.run.dir), as_saved(config), is_offline
        self.run_id = run_id or secrets.token_hex(4)
        path = self._directory / ID_FILE
        log_files.attempt(str(path), lambda: log_files.replace_text(path, self.run_id + "\n"))
        mode = config.logging.wandb
        # WANDB_MODE is wandb's own setting for machines without a network; an explicit mode would overrule it.
        self._mode = os.environ.get("WANDB_MODE", mode) if mode == "online" else mode
        super().__init__()

    def show(self, values: Mapping[str, float], step: int) -> None:
        self._queue(lambda run: run.log(values, step=step))

    def texts(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        columns = ["prompt", "text", "ended"]
        rows = [[sample[name] for name in columns] for sample in samples]
        self._queue(lambda run: run.log({"text/samples": self._wandb.Table(columns=columns, data=rows)}, step=step))

    def _open(self) -> Any:
        """A run at wandb; offline if the mode is `online` and that fails."""
        try:
            # Without a login, `init` would ask for a key on the terminal.
            if self._mode == "online" and not self._wandb.login(prompt=False):
                raise PermissionError("there is no API key; set one with `wandb login` or WANDB_API_KEY")
            return self._init(self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._give_up()  # wandb's service still has the id of the run that did not start
        run = self._init("offline")
        why = f"{reason}; send it later: wandb sync {Path(run.dir).parent}"
        logger.warning("wandb does not answer, so this run logs offline (%s)", why)
        self._is_offline(why)
        return run

    def _init(self, mode: str) -> Any:
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron_fp4"),
            name=self._directory.resolve().name,
            dir=str(self._directory),
            mode=mode,
            id=self.run_id,
            resume="allow",
            config=self._config,
            # By default wandb wraps stdout, which garbles a live progress bar.
            settings=self._wandb.Settings(console="off", quiet=True, init_timeout=INIT_SECONDS),
        )

    def _finish(self) -> None:
        self._writer.finish()

    def _give_up(self) -> None:
        super()._give_up()
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def _remedy(self) -> str:
        files = getattr(self._writer, "dir", None)
        return f"; send the rest later: wandb sync {Path(str(files)).parent}" if files else ""


def known_run_id(directory: Path) -> str | None:
    """The wandb id that an earlier start wrote in `directory`; None if there is none, or if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (directory / ID_FILE).read_text(encoding="utf-8").strip() or None
    return None
