"""Exports of a run while it trains: `checkpoint.export_interval`.

    run.dir/exports/
      step_00000400/       complete; `made_from.json` in it names its checkpoint
      step_00000600.tmp/   being written, or aborted
      step_00000400.1/     an older export of this step, from another checkpoint or in another format

When the save of a checkpoint is complete, rank 0 starts `scripts/convert.py export-hf` as a separate process and
continues training. The process has the lowest priority and no GPU, and reads the checkpoint from the disk. One export
runs at a time and one waits; if a third becomes due, the waiting one is dropped. `checkpoint.keep` does not remove a
checkpoint before its export is done. An export that fails never ends the run.

A finished run waits for its exports. A run that is stopped or killed aborts them; the next start makes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from exchange.architectures import architecture_of
from exchange.nvfp4 import TrainedPlan, refusal
from exchange.tokenizer import KEPT, keep_tokenizer
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import SaveReport
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import attempt, move_aside
from megatron_fp4.precision.plan import Plan
from megatron_fp4.runtime.progress import Section, run_time_of, state_of_process
from megatron_fp4.training.callbacks.reporting import as_typed, script, start_script
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.trainer import Callback, Step

logger = logging.getLogger(__name__)

RECORD = "made_from.json"
SCRIPT = script("convert")
OPTIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("--dtype", "bfloat16"),
    "fp32": ("--dtype", "float32"),
    "nvfp4": ("--format", "nvfp4"),
    "nvfp4-compressed-tensors": ("--format", "nvfp4-compressed-tensors"),
}
"""`checkpoint.export_format` -> options of scripts/convert.py."""


def last_exportable(config: Config, plans: tuple[Plan, Plan | None]) -> int | None:
    """The last step of a run whose checkpoint can be exported in `checkpoint.export_format`. None if every checkpoint
    can, or if a measurement decides the precision switch. Raises ConfigError for exports that the run cannot make.

    plans: of the run, before and after the precision switch.
    """
    interval, chosen, steps = config.checkpoint.export_interval, config.checkpoint.export_format, config.train.steps
    key = f"checkpoint.export_interval={interval}"
    if interval > steps:
        raise ConfigError(f"{key} has no effect in a run of train.steps={steps}; give {steps} or less")
    if any(importlib.util.find_spec(package) is None for package in ("safetensors", "transformers")):
        raise ConfigError(f"{key} needs packages of an extra: pip install -e '.[hf]', or leave it out")
    try:
        architecture_of(config.model)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; leave it out, or change the model") from error
    if not chosen.startswith("nvfp4"):
        return None
    dtype, tensor, (before, after) = getattr(torch, config.precision.compute_dtype), config.parallel.tensor, plans
    layout = chosen.removeprefix("nvfp4-") if "-" in chosen else "modelopt"
    if problem := refusal(TrainedPlan(before, dtype, tensor), layout):
        raise ConfigError(f"checkpoint.export_format={chosen}: {problem}; give checkpoint.export_format=bf16")
    last = WSDSchedule.of(config).switch_step(config.precision.switch.when)
    if after is None or TrainedPlan(after, dtype).nvfp4_linears() or last is None or last >= steps:
        return None
    if interval > last:
        raise ConfigError(
            f"checkpoint.export_format={chosen}: the first export, at step {interval}, comes after the precision "
            f"switch (before step {last + 1}), which ends NVFP4 in the forward pass; give "
            f"checkpoint.export_format=bf16, or an interval of at most {last}"
        )
    return last


class _Running(NamedTuple):
    """An export that is being written. output: stdout and stderr of the process."""

    step: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float


class KeptTokenizer(Callback):
    """Keeps the files of the run's tokenizer in run.dir/tokenizer, from which commands read it without other paths."""

    def start(self, done: int) -> None:
        run_dir, tokenizer = Path(self.trainer.config.run.dir), self.trainer.data.bundle.tokenizer
        if self.trainer.mesh.rank == 0 and self.trainer.config.data.tokenizer is not None:
            attempt(f"{run_dir}/{KEPT}", lambda: keep_tokenizer(run_dir, tokenizer))


class Exports(Callback):
    """The exports, which rank 0 makes. last: the last step whose checkpoint can be exported; None: all can."""

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self._wanted: set[int] = set()
        self._waiting: list[int] = []
        self._running: _Running | None = None

    def lacking(self, done: int) -> list[str]:
        return [f"its export of step {step}" for step in self._missing(done)]

    def start(self, done: int) -> None:
        """Export the checkpoints of up to `done` steps whose export is missing."""
        self.trainer.checkpointer.needed = self.protected
        self._waiting = self._missing(done)
        self._wanted.update(self._waiting)
        self._poll()

    def after_step(self, step: Step) -> None:
        step.save = step.save or self.due(step.done)

    def on_checkpoint(self, done: int) -> None:
        """Keep the checkpoint until its export is done, if one is due."""
        if self.trainer.mesh.rank == 0 and self.due(done):
            self._wanted.add(done)

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Start the exports that are due, without waiting."""
        for report in reports:
            if report.step not in self._wanted:
                continue
            if report.error is not None:
                self._wanted.discard(report.step)
                continue
            for step in self._waiting:
                self._failed(step, "dropped, because exports take longer than checkpoint.export_interval allows")
            self._waiting = [report.step]
            self._poll()  # here too: two reports may come at once
        self._poll()

    def finish(self, done: int, stop: Callable[[], bool]) -> bool:
        """Wait for the exports of a finished run; abort them if the run was stopped. A collective in training's own
        group, so that all ranks wait for rank 0. It is progress only while the export's process moves."""
        self.trainer.progress.at(done, "export")
        with self.trainer.progress.beside(Section(done, "export", self._moved, self._where)):
            return self._wait(done, stop)

    def _wait(self, done: int, stop: Callable[[], bool]) -> bool:
        trainer, pause, is_announced, before = self.trainer, 0.02, False, -1.0
        while True:
            self._poll()
            left = [*([self._running.step] if self._running else []), *self._waiting]
            mine = [bool(left), done < trainer.config.train.steps or stop(), self._moved() or 0]
            agreed = torch.tensor(mine, dtype=torch.float64, device=trainer.mesh.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            working, stopping, moved = agreed.tolist()
            if not working:
                self._prune()
                return True
            if stopping:
                self.close()
                return False
            if left and not is_announced:
                steps = ", ".join(map(str, left))
                trainer.log.console.text(f"waiting for exports of steps {steps}; a request to stop aborts them")
                is_announced = True
            if moved != before:
                trainer.progress.alive()
            before = moved
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def close(self) -> None:
        """Abort all exports; the next start makes them."""
        aborted, self._waiting = self._waiting, []
        if self._running is not None:
            step, process, output, _ = self._running
            self._running = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.close()
            self._remove_incomplete(step)
            aborted = [step, *aborted]
        for step in aborted:
            self._failed(step, "aborted because this start ends; the next start makes it")

    def _moved(self) -> float | None:
        return None if self._running is None else run_time_of(self._running.process.pid)

    def _where(self) -> str:
        if self._running is None:
            return "between two exports"
        pid = self._running.process.pid
        return f"process {pid} (scripts/convert.py) is {state_of_process(pid) or 'waiting'}"

    def due(self, step: int) -> bool:
        """Whether an export of the checkpoint after `step` steps is due; the same on all ranks."""
        exportable = step > 0 and (self._last is None or step <= self._last)
        return exportable and step % self.trainer.config.checkpoint.export_interval == 0

    def protected(self) -> set[str]:
        """The names of checkpoints whose export is not done. Any thread may call it."""
        return {files.folder_name(step) for step in self._wanted.copy()}

    @property
    def _checkpoints(self) -> Path:
        return Path(self.trainer.config.run.dir).absolute() / "checkpoints"

    def _folder(self, step: int) -> Path:
        return self._checkpoints.with_name("exports") / files.folder_name(step)

    def _missing(self, start: int) -> list[int]:
        """Steps up to `start` whose due export is missing. A folder without a record was made by hand and counts."""
        steps = map(files.step_of, files.list_checkpoints(self._checkpoints)) if self.trainer.mesh.rank == 0 else ()
        missing = []
        for step in sorted(step for step in steps if step <= start and self.due(step)):
            record, made = self._record(step), self._folder(step)
            with contextlib.suppress(OSError, ValueError):
                if made.is_dir() and not (made / RECORD).exists():
                    continue
                if record is None or json.loads((made / RECORD).read_bytes()) == record:
                    continue
            missing.append(step)
        return missing

    def _record(self, step: int) -> dict[str, Any] | None:
        """The content of `made_from.json` for an export of this step; None without a checkpoint."""
        try:
            manifest = (self._checkpoints / files.folder_name(step) / files.MANIFEST).read_bytes()
        except OSError:
            return None
        digest = hashlib.sha256(manifest).hexdigest()
        return {"step": step, "manifest_sha256": digest, "format": self.trainer.config.checkpoint.export_format}

    def _poll(self) -> None:
        if self._running is not None and self._running.process.poll() is not None:
            (step, process, output, began), self._running = self._running, None
            with output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
                lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
            try:
                if process.returncode != 0:
                    raise OSError([f"it ended with code {process.returncode}", *lines][-1])
                files.write_file(self._folder(step) / RECORD, json.dumps(self._record(step), indent=1) + "\n")
            except OSError as error:
                self._failed(step, str(error))
            else:
                self._wanted.discard(step)
                form, seconds = self.trainer.config.checkpoint.export_format, time.monotonic() - began
                text = f"exported {self._folder(step)} ({form}, {seconds:.1f} s)"
                facts = {"path": str(self._folder(step)), "format": form, "seconds": round(seconds, 3)}
                self.trainer.log.event(step, "export", text, **facts)
        while self._running is None and self._waiting:
            step = self._waiting.pop(0)
            try:
                self._remove_incomplete(step)  # of a killed run
                move_aside(self._folder(step))
                output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
                process = start_script(SCRIPT, self._arguments(step), output)
                self._running = _Running(step, process, output, time.monotonic())
            except OSError as error:
                self._failed(step, str(error))

    def _remove_incomplete(self, step: int) -> None:
        folder = self._folder(step)
        shutil.rmtree(folder.with_name(f"{folder.name}.tmp"), ignore_errors=True)

    def _failed(self, step: int, error: str) -> None:
        self._wanted.discard(step)
        command = as_typed("convert", shlex.join(self._arguments(step)))
        text = f"NOT EXPORTED, training continues: {error}; by hand: {command}"
        self.trainer.log.event(step, "export_failed", text, error=error, command=command)

    def _arguments(self, step: int) -> list[str]:
        how = OPTIONS[self.trainer.config.checkpoint.export_format]
        places = str(self._checkpoints / files.folder_name(step)), str(self._folder(step))
        return ["export-hf", *places, *how, "--trust-config"]  # the run is the user's own

    def _prune(self) -> None:
        """Remove the checkpoints that were kept only for their exports. Call it when no save is running."""
        self._wanted.clear()
        if self.trainer.mesh.rank == 0:
            try:
                newest = self._checkpoints / (files.read_pointer(self._checkpoints) or "")
                files.prune(self._checkpoints, self.trainer.config.checkpoint.keep, just_made=newest)
            except OSError as error:
                logger.warning("old checkpoints under %s could not be removed: %s", self._checkpoints, error)
