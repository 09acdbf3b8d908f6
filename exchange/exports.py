"""Exports of a run while it trains: `checkpoint.export_interval`.

    run.dir/exports/
      step_00000400/       whole; `made_from.json` in it says of which checkpoint
      step_00000600.tmp/   being written, or broken off
      step_00000400.1/     was made of another checkpoint of that step, or in another format

An export is made of a checkpoint that is whole on the disk: after the save has been reported, the first rank starts
`scripts/convert.py export-hf` as a process of its own, with the lowest priority, without a GPU and streaming from the
disk, and trains on. One is written at a time, and one waits; if a third becomes due, the one that waits is left out. As
long as a checkpoint is to be exported `checkpoint.keep` does not remove it. Nothing that fails here ends a run.

A finished run waits for its exports; one that stops, or is killed, ends the process. A start makes what is due of the
checkpoints that it finds and has no export.
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from exchange.architectures import architecture_of
from exchange.nvfp4 import TrainedPlan, refusal
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import SaveReport
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import move_aside
from megatron_fp4.precision.plan import Plan
from megatron_fp4.training.callbacks.reporting import as_typed
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.trainer import Callback, Step

logger = logging.getLogger(__name__)

RECORD = "made_from.json"
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "convert.py"
OPTIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("--dtype", "bfloat16"),
    "fp32": ("--dtype", "float32"),
    "nvfp4": ("--format", "nvfp4"),
    "nvfp4-compressed-tensors": ("--format", "nvfp4-compressed-tensors"),
}
"""`checkpoint.export_format` -> what scripts/convert.py is told."""
# What a launcher tells a rank, which the export is not.
_OF_RANKS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|(ROLE|MASTER|TORCHELASTIC)_\w+")


def last_exportable(config: Config, plans: tuple[Plan, Plan | None]) -> int | None:
    """The last step whose checkpoint has what `checkpoint.export_format` wants, of a run with an export interval; None
    if all have, or if a measurement decides. Raises ConfigError for exports that the run cannot make.

    plans: of the run, before and after the precision switch.
    """
    interval, chosen, steps = config.checkpoint.export_interval, config.checkpoint.export_format, config.train.steps
    key = f"checkpoint.export_interval={interval}"
    if interval > steps:
        raise ConfigError(f"{key} does nothing in a run of train.steps={steps}; give {steps} or less")
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError(f'{key} needs packages of an extra: pip install "megatron_fp4[hf]", or leave it out')
    try:
        architecture_of(config.model)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; leave it out, or change the model") from error
    if not chosen.startswith("nvfp4"):
        return None
    dtype, tensor, (before, after) = getattr(torch, config.precision.compute_dtype), config.parallel.tensor, plans
    if problem := refusal(TrainedPlan(before, dtype, tensor)):
        raise ConfigError(f"checkpoint.export_format={chosen}: {problem}; give checkpoint.export_format=bf16")
    last = WSDSchedule.of(config).switch_step(config.precision.switch.when)
    if after is None or TrainedPlan(after, dtype).fp4() or last is None or last >= steps:
        return None
    if interval > last:
        raise ConfigError(
            f"checkpoint.export_format={chosen}: step {interval} is after the precision switch (before step "
            f"{last + 1}), which ends NVFP4 in the forward pass; give checkpoint.export_format=bf16, or an interval of "
            f"at most {last}"
        )
    return last


class _Running(NamedTuple):
    """An export that is being written. output: what it says."""

    step: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float


class Exports(Callback):
    """The exports of a run; the first rank makes them. last: the last step whose checkpoint can be exported
    (`last_exportable`); None: all can."""

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self._wanted: set[int] = set()
        self._waiting: list[int] = []
        self._running: _Running | None = None

    def lacking(self, done: int) -> list[str]:
        """Exports that are still to be made."""
        return [f"its export of step {step}" for step in self._missing(done)]

    def start(self, done: int) -> None:
        """Make what is missing of the checkpoints up to `done` steps."""
        self.trainer.checkpointer.needed = self.protected
        self._waiting = self._missing(done)
        self._wanted.update(self._waiting)
        self._poll()

    def after_step(self, step: Step) -> None:
        """What is to be exported is to be saved."""
        step.save = step.save or self.due(step.done)

    def on_checkpoint(self, done: int) -> None:
        """Keep it until it is exported, if that is due."""
        if self.trainer.mesh.rank == 0 and self.due(done):
            self._wanted.add(done)

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Export what is due of it; waits for nothing."""
        for report in reports:
            if report.step not in self._wanted:
                continue
            if report.error is not None:
                self._wanted.discard(report.step)
                continue
            for step in self._waiting:
                self._failed(step, "left out, because exports take longer than checkpoint.export_interval gives them")
            self._waiting = [report.step]
            self._poll()  # two reports may come at once
        self._poll()

    def finish(self, done: int, stop: Callable[[], bool]) -> bool:
        """Wait for all exports of a finished run; of one that has stopped, end what is being written. A collective of
        training's own group, by which ranks wait for the first one."""
        trainer, pause, said = self.trainer, 0.02, False
        trainer.progress.at(done, "export")
        while True:
            self._poll()
            left = [*([self._running.step] if self._running else []), *self._waiting]
            flags = [float(bool(left)), float(done < trainer.config.train.steps or stop())]
            agreed = torch.tensor(flags, device=trainer.mesh.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            working, stopping = agreed.tolist()
            if not working:
                self._prune()
                return True
            if stopping:
                self.close()
                return False
            if left and not said:
                steps = ", ".join(map(str, left))
                trainer.log.console.text(f"waiting for exports of steps: {steps}; a request to stop ends that")
                said = True
            trainer.progress.alive()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def close(self) -> None:
        """End what is being written, for the next start to make."""
        broken_off, self._waiting = self._waiting, []
        if self._running is not None:
            step, process, output, _ = self._running
            self._running = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.close()
            folder = self._folder(step)
            shutil.rmtree(folder.with_name(f"{folder.name}.tmp"), ignore_errors=True)
            broken_off = [step, *broken_off]
        for step in broken_off:
            self._failed(step, "broken off by the end of this start; the next one makes it")

    def due(self, step: int) -> bool:
        """Whether the checkpoint of `step` steps is to be exported; the same on all ranks."""
        exportable = step > 0 and (self._last is None or step <= self._last)
        return exportable and step % self.trainer.config.checkpoint.export_interval == 0

    def protected(self) -> set[str]:
        """The names of checkpoints that are still to be exported. Any thread may ask."""
        return {files.folder_name(step) for step in self._wanted.copy()}

    @property
    def _checkpoints(self) -> Path:
        return Path(self.trainer.config.run.dir).absolute() / "checkpoints"

    def _folder(self, step: int) -> Path:
        return self._checkpoints.with_name("exports") / files.folder_name(step)

    def _missing(self, start: int) -> list[int]:
        """Steps whose checkpoint is there and has no export made of it. A folder without a record of what it was made
        of was made by hand, and counts."""
        steps = map(files.step_of, files.list_checkpoints(self._checkpoints)) if self.trainer.mesh.rank == 0 else ()
        found = []
        for step in sorted(step for step in steps if step <= start and self.due(step)):
            record, made = self._record(step), self._folder(step)
            with contextlib.suppress(OSError, ValueError):
                if made.is_dir() and not (made / RECORD).exists():
                    continue
                if record is None or json.loads((made / RECORD).read_bytes()) == record:
                    continue
            found.append(step)
        return found

    def _record(self, step: int) -> dict[str, Any] | None:
        """What an export says of itself; None if there is no checkpoint to make it of."""
        try:
            manifest = (self._checkpoints / files.folder_name(step) / files.MANIFEST).read_bytes()
        except OSError:
            return None
        digest = hashlib.sha256(manifest).hexdigest()
        return {"step": step, "manifest_sha256": digest, "format": self.trainer.config.checkpoint.export_format}

    def _poll(self) -> None:
        """Take note of an export that has ended, and start one that waits."""
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
                form = self.trainer.config.checkpoint.export_format
                self.trainer.log.exported(step, self._folder(step), form, time.monotonic() - began)
        while self._running is None and self._waiting:
            step = self._waiting.pop(0)
            try:
                move_aside(self._folder(step))
                self._running = self._begun(step)
            except OSError as error:
                self._failed(step, str(error))

    def _begun(self, step: int) -> _Running:
        """scripts/convert.py with the lowest priority, without a GPU and without what a launcher tells ranks, in the
        run's own working directory, where the paths of its configuration are true. Raises OSError."""
        environment = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
        paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), *self._arguments(step), "--beside", str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal from the terminal is for the run to obey
        )
        return _Running(step, process, output, time.monotonic())

    def _failed(self, step: int, error: str) -> None:
        self._wanted.discard(step)
        self.trainer.log.export_failed(step, error, as_typed("convert", shlex.join(self._arguments(step))))

    def _arguments(self, step: int) -> list[str]:
        how = OPTIONS[self.trainer.config.checkpoint.export_format]
        places = str(self._checkpoints / files.folder_name(step)), str(self._folder(step))
        return ["export-hf", *places, *how, "--trust-config"]  # the run is the user's own

    def _prune(self) -> None:
        """Remove the checkpoints that were kept for their exports alone; no save is on its way."""
        self._wanted.clear()
        if self.trainer.mesh.rank == 0:
            try:
                newest = self._checkpoints / (files.read_pointer(self._checkpoints) or "")
                files.prune(self._checkpoints, self.trainer.config.checkpoint.keep, just_made=newest)
            except OSError as error:
                logger.warning("old checkpoints under %s could not be removed: %s", self._checkpoints, error)
