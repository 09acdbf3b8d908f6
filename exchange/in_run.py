"""Exports of a run while it trains: `checkpoint.export_interval`, `checkpoint.export_at_end`.

    run.dir/exports/
      step_00000400/             whole: renamed into place; `made_from.json` in it says of which checkpoint
      step_00000600.tmp/         due: waiting, being written, or broken off; the next start makes it
      step_00000400.1/           was made of another checkpoint of that step, or in another format

An export is made of a checkpoint that is whole on the disk: after the save has been reported, the first rank starts
`scripts/export_hf.py` as a process of its own, with the lowest priority, without a GPU and streaming from the disk, and
trains on. One is written at a time, and one waits; if a third becomes due, the one that waits is left out, and said.
As long as a checkpoint is to be exported `checkpoint.keep` does not remove it. Nothing that fails here ends a run.

A finished run waits for its exports; one that stops does not: it ends the process, leaves the `.tmp` folder as a mark,
and the next start makes the export. If the run is killed the kernel ends the process (as_child.py), with the same mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from exchange.export_process import ExportProcess, export_command
from exchange.hf.architectures import architecture_of
from exchange.nvfp4 import TrainedPlan, refusal
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.saves import SaveReport
from megatron_fp4.config.schema import CheckpointConfig, Config, ConfigError
from megatron_fp4.logging.files import move_aside
from megatron_fp4.logging.run_log import RunLog
from megatron_fp4.precision.plan import Plan
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.schedule import WSDSchedule

logger = logging.getLogger(__name__)

FOLDER, RECORD = "exports", "made_from.json"
PACKAGE = "safetensors"
_STEP = re.compile(r"step_(\d{8,})")


def check_exports(config: Config, plans: tuple[Plan, Plan | None]) -> None:
    """Raise ConfigError for exports that a run cannot make, or settings of exports that do nothing.

    plans: of the run, before and after the precision switch.
    """
    settings, steps = config.checkpoint, config.train.steps
    interval, default = settings.export_interval, CheckpointConfig().export_format
    if interval > steps:
        raise ConfigError(
            f"checkpoint.export_interval={interval} does nothing in a run of train.steps={steps}; give {steps} or "
            "less, or checkpoint.export_at_end=true"
        )
    if not interval and not settings.export_at_end:
        if settings.export_format != default:
            raise ConfigError(
                f"checkpoint.export_format={settings.export_format} does nothing without exports; give "
                "checkpoint.export_interval or checkpoint.export_at_end=true"
            )
        return
    key = f"checkpoint.export_interval={interval}" if interval else "checkpoint.export_at_end=true"
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f'{key} needs the package {PACKAGE}; pip install "megatron_fp4[hf]", or set {key.split("=")[0]}='
            f"{0 if interval else 'false'}"
        )
    try:
        architecture_of(config.model)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if settings.export_format.startswith("nvfp4"):
        _check_nvfp4(config, plans)


def _check_nvfp4(config: Config, plans: tuple[Plan, Plan | None]) -> None:
    settings, steps = config.checkpoint, config.train.steps
    key = f"checkpoint.export_format={settings.export_format}"
    if problem := refusal(_trained(config, plans[0])):
        raise ConfigError(f"{key}: {problem.replace('--format hf', 'checkpoint.export_format=bf16')}")
    last = last_exportable(config, plans)
    if last is not None and (settings.export_at_end or settings.export_interval > last):
        first = steps if settings.export_at_end else settings.export_interval
        raise ConfigError(
            f"{key}: step {first} is behind the precision switch (before step {last + 1}), which ends NVFP4 in the "
            f"forward pass; give checkpoint.export_format=bf16, or an interval of at most {last} without export_at_end"
        )


def last_exportable(config: Config, plans: tuple[Plan, Plan | None]) -> int | None:
    """The last step whose checkpoint has what `checkpoint.export_format` wants; None if all have, or if a measurement
    decides."""
    after, switch = plans[1], config.precision.switch
    if not config.checkpoint.export_format.startswith("nvfp4") or after is None or _trained(config, after).fp4():
        return None
    step = WSDSchedule.of(config).switch_step(switch.when)
    return None if step is None or step >= config.train.steps else step


def _trained(config: Config, plan: Plan) -> TrainedPlan:
    return TrainedPlan(plan, getattr(torch, config.precision.compute_dtype), config.parallel.tensor)


class Exports:
    """The exports of one run. All but `due`, `finish` and `folder` is for the first rank (`active`); on the others it
    does nothing.

    last: the last step whose checkpoint can be exported (`last_exportable`); None: all can. command: what exports a
    checkpoint, of its folder, the output and the format.
    """

    def __init__(
        self,
        config: Config,
        log: RunLog,
        active: bool,
        last: int | None = None,
        command: Callable[[Path, Path, str], Sequence[str]] = export_command,
    ) -> None:
        self._settings, self._steps, self._last = config.checkpoint, config.train.steps, last
        run_dir = Path(config.run.dir).absolute()
        self._checkpoints, self._root = run_dir / "checkpoints", run_dir / FOLDER
        self._log, self._active, self._command = log, active, command
        self._wanted: set[int] = set()
        self._waiting: list[int] = []
        self._running: tuple[int, ExportProcess] | None = None

    @property
    def enabled(self) -> bool:
        """Whether the run makes exports; the same on all ranks."""
        return self._settings.export_interval > 0 or self._settings.export_at_end

    def due(self, step: int) -> bool:
        """Whether the checkpoint of `step` steps is to be exported, and so to be made; the same on all ranks."""
        interval = self._settings.export_interval
        at_end = self._settings.export_at_end and step == self._steps
        if self._last is not None and step > self._last:
            return False
        return step > 0 and (at_end or (interval > 0 and step % interval == 0))

    def folder(self, step: int) -> Path:
        """Where the export of `step` steps is, there or not."""
        return self._root / files.folder_name(step)

    def last(self) -> Path | None:
        """The export of the run's last step, if that was asked for and is there."""
        folder = self.folder(self._steps)
        return folder if self.due(self._steps) and folder.is_dir() else None

    def protected(self) -> set[str]:
        """The names of checkpoints that are still to be exported. Any thread may ask."""
        return {files.folder_name(step) for step in self._wanted.copy()}

    def lacking(self, start: int) -> list[str]:
        """Which exports a start behind `start` steps makes, for a line that says what is missing."""
        return [f"its export of step {step}" for step in self._to_make(start)]

    def begin(self, start: int) -> None:
        """Clear what an earlier start has left behind, and make what it owed: what was broken off, and what is due of
        the checkpoint behind `start` steps. Call it when records are open."""
        if not self._active:
            return
        steps = self._to_make(start)
        self._wanted |= set(steps)
        for mark in self._marks():
            if _step_of(mark) not in steps:
                with _said(f"{mark} could not be removed"):
                    shutil.rmtree(mark)
        for step in steps:
            self._enqueue(step)

    def want(self, step: int) -> None:
        """The checkpoint of `step` steps is about to be saved: keep it until it is exported, if that is due."""
        if self._active and self.due(step):
            self._wanted.add(step)

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Saves have ended: export what is due. Call it after every step; it waits for nothing."""
        for report in reports:
            if report.step not in self._wanted:
                continue
            if report.error is not None:
                self._wanted.discard(report.step)
                continue
            for step in self._waiting:
                self._failed(step, "left out, because exports take longer than checkpoint.export_interval gives them")
                self._clear(step)
            self._waiting.clear()
            self._enqueue(report.step)
        self._poll()

    def finish(self, step: int, stop: Callable[[], bool], device: torch.device, progress: Progress) -> bool:
        """Wait for all exports of a finished run; of one that stopped after `step` steps, end what is being written.
        Returns False if a request to stop (`stop` on any rank) came first. A collective.

        device: for the collectives of training's own group, by which ranks wait for the first one.
        """
        if not self.enabled:
            return True
        pause, said, flag = 0.02, False, float(step < self._steps)
        progress.at(step, "export")
        while True:
            self._poll()
            busy = self._running is not None or bool(self._waiting)
            flags = torch.tensor([float(busy), max(flag, float(stop()))], device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            working, stopping = flags.tolist()
            if not working:
                self._prune()
                return True
            if stopping:
                self.end()
                return False
            if busy and not said:
                self._log.console.text(f"waiting for exports of steps: {self._current()}; a request to stop ends that")
                said = True
            progress.alive()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def end(self) -> None:
        """End what is being written, with a mark for the next start; every end of a run comes here."""
        running, self._running = self._running, None
        if running is not None:
            step, process = running
            process.kill()
            self._broken_off(step)
        for step in self._waiting:
            self._broken_off(step)
        self._waiting.clear()

    def __enter__(self) -> Exports:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _to_make(self, start: int) -> list[int]:
        if not (self._active and self.enabled):
            return []
        owed = {_step_of(mark) for mark in self._marks()}
        owed |= {start} if self.due(start) else set()
        return sorted(step for step in owed if step <= start and self._is_missing(step))

    def _marks(self) -> list[Path]:
        with _said(f"{self._root} cannot be read, and what is owed there is not made"):
            if self._root.is_dir():
                marks = (p for p in self._root.iterdir() if p.suffix == ".tmp" and _STEP.fullmatch(p.stem))
                return sorted(p for p in marks if p.is_dir())
        return []

    def _is_missing(self, step: int) -> bool:
        """Whether there is a checkpoint of that step and no export of it. A folder without a record of what it was made
        of is somebody's own, and counts."""
        wanted, made = self._record(step), self.folder(step) / RECORD
        if wanted is None:
            return False
        try:
            return bool(json.loads(made.read_bytes()) != wanted)
        except FileNotFoundError:
            return not made.parent.is_dir()
        except (OSError, ValueError):
            return True

    def _record(self, step: int) -> dict[str, Any] | None:
        """What an export says of itself; None if there is no checkpoint to make it of."""
        try:
            manifest = (self._checkpoints / files.folder_name(step) / files.MANIFEST).read_bytes()
        except OSError:
            return None
        digest = hashlib.sha256(manifest).hexdigest()
        return {"step": step, "manifest_sha256": digest, "format": self._settings.export_format}

    def _enqueue(self, step: int) -> None:
        self._waiting.append(step)
        with _said(f"the export of step {step} leaves no mark for the next start"):
            self._mark(step).mkdir(parents=True, exist_ok=True)
        self._poll()

    def _poll(self) -> None:
        """Take note of an export that has ended, and start one that waits."""
        if self._running is not None and self._running[1].ended:
            ended, self._running = self._running, None
            self._take_note(*ended)
        while self._running is None and self._waiting:
            step = self._waiting.pop(0)
            try:
                self._running = step, self._start(step)
            except OSError as error:
                self._failed(step, str(error))
                self._clear(step)

    def _start(self, step: int) -> ExportProcess:
        output = self._mark(step) / "model"
        shutil.rmtree(self._mark(step), ignore_errors=True)
        output.parent.mkdir(parents=True)
        return ExportProcess(self._words(step, output))

    def _take_note(self, step: int, process: ExportProcess) -> None:
        error, seconds = process.close(), process.seconds
        if error is None:
            try:
                self._publish(step)
            except OSError as failure:
                error = str(failure)
        if error is None:
            self._log.exported(step, self.folder(step), self._settings.export_format, seconds)
            self._wanted.discard(step)
        else:
            self._failed(step, error)
        self._clear(step)

    def _publish(self, step: int) -> None:
        """Give what was written its name; something else that has it gets a number behind."""
        written, final = self._mark(step) / "model", self.folder(step)
        record = json.dumps(self._record(step), indent=1) + "\n"
        files.write_file(written / RECORD, record)
        files.sync_folder(written)
        move_aside(final)
        os.rename(written, final)
        files.sync_folder(self._root)

    def _failed(self, step: int, error: str) -> None:
        self._wanted.discard(step)
        self._log.export_failed(step, error, self._by_hand(step))

    def _broken_off(self, step: int) -> None:
        """The mark stays, so that the next start makes it, if its checkpoint is still there."""
        with _said(f"{self._mark(step)} is not as it should be"):
            shutil.rmtree(self._mark(step) / "model", ignore_errors=True)
            shutil.rmtree(self._mark(step) / "model.tmp", ignore_errors=True)
        self._log.export_failed(step, "broken off by the end of this start; the next one makes it", self._by_hand(step))

    def _clear(self, step: int) -> None:
        with _said(f"{self._mark(step)} could not be removed"):
            shutil.rmtree(self._mark(step))

    def _prune(self) -> None:
        """Remove the checkpoints that were kept for their exports alone; no save is on its way."""
        self._wanted.clear()
        if self._active:
            with _said(f"old checkpoints under {self._checkpoints} could not be removed"):
                newest = self._checkpoints / (files.read_pointer(self._checkpoints) or "")
                files.prune(self._checkpoints, self._settings.keep, just_made=newest)

    def _current(self) -> str:
        running = [] if self._running is None else [self._running[0]]
        return ", ".join(map(str, [*running, *self._waiting]))

    def _mark(self, step: int) -> Path:
        return self._root / f"{files.folder_name(step)}.tmp"

    def _words(self, step: int, output: Path) -> list[str]:
        checkpoint = self._checkpoints / files.folder_name(step)
        return list(self._command(checkpoint, output, self._settings.export_format))

    def _by_hand(self, step: int) -> str:
        return shlex.join(self._words(step, self.folder(step)))


def _step_of(mark: Path) -> int:
    return files.step_of(mark.with_suffix(""))


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """A disk that refuses something is no reason to end a run."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)
