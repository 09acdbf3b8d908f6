"""The trainer of a run: build, resume, train, save, roll back.

Everything that a run does besides training steps is a callback. pretrain.py has the ordered list of callbacks; the
trainer does not know any of them. pretrain.py also has what lives longer than the trainer: process group, lock, signals
and state.json.
"""

from __future__ import annotations

import datetime
import random
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_fp4 import __version__
from megatron_fp4.checkpoint import config_diff
from megatron_fp4.checkpoint.checkpointer import Checkpointer, SaveReport
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.files import origin_state, well_formed
from megatron_fp4.checkpoint.find import Resumed, check_resume, refuse_to_overwrite
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import records_of
from megatron_fp4.logging.run_log import RunLog, TimeLedger
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.errors import ExitCode, printed_at_once
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.revision import changed_facts, made_by, revision
from megatron_fp4.runtime.signals import StopConditions
from megatron_fp4.training import build
from megatron_fp4.training.optimizer import WSDSchedule, build_optimizer, optimizer_name
from megatron_fp4.training.providers import DataProvider, MicroBatch, ModelProvider
from megatron_fp4.training.step import StepRequests, StepResult, accumulate, update

# After this many failed saves in a row, the run ends.
_MAX_FAILED_SAVES = 3
# The record that a finished run may lack: that of its last save.
_LAST_SAVE = "its last checkpoint's event"


class Ending(NamedTuple):
    """How a start of the run ended, after `done` steps. reason: what asked it to stop."""

    code: ExitCode
    done: int
    reason: str = ""


@dataclass
class Step:
    """A training step. index: from 0. batch: this rank's micro-batches. began: `time.perf_counter()` when the wait for
    them began. save: whether to save a checkpoint after the step, the same on all ranks."""

    index: int
    batch: Sequence[MicroBatch]
    began: float
    result: StepResult = field(init=False)
    save: bool = False

    @property
    def done(self) -> int:
        """Number of steps done, this one included, as metrics.jsonl counts."""
        return self.index + 1


class Callback:
    """A feature of a run. It overrides the hooks that it needs; they are defined here in the order of their calls.

    The trainer calls each hook on all ranks, for all callbacks in the order of the list. So a hook may use collectives,
    if all ranks decide alike. trainer: set before any hook is called.
    """

    name = ""
    """The key of its state in checkpoints; "": no state. A callback that is not in the list loses its state."""
    accept: Callable[[float, float], bool] | None = None
    """(loss, norm) -> whether to update, the same on all ranks. None: this callback does not decide. Only one callback
    of a run may decide; the trainer reads this when it is built."""
    trainer: Trainer

    def load_state_dict(self, state: Any) -> None:
        """Take its state from a checkpoint; None: the checkpoint has none."""

    def lacking(self, done: int) -> list[str]:
        """Names of the records and files that a run of `done` steps lacks. Called on the first rank alone."""
        return []

    def start(self, done: int) -> None:
        """The run has resumed after `done` steps and its records are open; no step and no kernel has run yet. If all
        steps are done: write what `lacking` named."""

    def before_step(self, step: Step) -> None:
        """The micro-batches of `step` are loaded."""

    def around_step(self, step: Step) -> AbstractContextManager[object]:
        """A context for forward, backward and update."""
        return nullcontext()

    def after_step(self, step: Step) -> None:
        """`step.result` is known; set `step.save` for a checkpoint."""

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """After `done` steps, weights, moments and generators were restored from the checkpoint of step `checkpoint`.
        state: this callback's state in the checkpoint; None: it has none."""

    def on_checkpoint(self, done: int) -> None:
        """A checkpoint of `done` steps is about to be saved."""

    def state_dict(self) -> Any:
        """Its state for the checkpoint: JSON types, the same on all ranks."""
        return None

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Called after every step and at the end, with the saves that have ended since. Reports differ between ranks,
        so use no collective here."""

    def finish(self, done: int, stop: Callable[[], bool]) -> bool:
        """Training has ended after `done` steps and the last checkpoint is on disk: wait for work in the background.
        stop: returns whether this rank is asked to stop. Returns False if it was, before the work was finished."""
        return True

    def close(self) -> None:
        """Release resources. Called however the run ends, even if `start` failed, and in the reverse order."""

    def conclude(self) -> None:
        """The run has done all its steps, and its records are closed."""


class Trainer:
    """Builds the parts of a run and connects them. Raises ConfigError for data that cannot be opened or does not fit.

    models, data: providers (providers.py). callbacks: in their order. progress: learns what the run does. quiet: write
    no records and print nothing, for callers that repeat some steps of a run. times: the time that the start has taken.

    precision: plans, switch and StepState of the linears. graphs: None if micro-batches run eagerly. missing: names of
    the records and files that a run with all steps done has not written.
    """

    def __init__(
        self,
        config: Config,
        models: ModelProvider,
        data: DataProvider,
        callbacks: Sequence[Callback],
        mesh: ParallelMesh,
        progress: Progress | None = None,
        quiet: bool = False,
        times: TimeLedger | None = None,
    ) -> None:
        self.config, self.models, self.mesh, self.progress = config, models, mesh, progress or Progress()
        self.missing: list[str] = []
        self._changes: list[tuple[str, Sequence[str], dict[str, Any]]] = []
        deciding = [callback for callback in callbacks if callback.accept is not None]
        if len(deciding) > 1:
            first, second = (type(callback).__name__ for callback in deciding[:2])
            raise ConfigError(f"the callbacks {first} and {second} both decide whether a step updates; switch one off")
        self.accept = deciding[0].accept if deciding else None
        random.seed(config.run.seed)
        np.random.seed(config.run.seed)
        torch.manual_seed(config.run.seed)
        self.progress.at(0, "open the data")  # first, so that its errors come before minutes of initialization
        with build.configuration_errors():
            self.data = data.open_data(config, mesh, build.open_alike)
            identity = run_identity(config, self.data.fingerprint)
        self.progress.at(0, "build the model")
        execution, backend = build.execution_of(config, models), build.backend_of(config, models).open()
        step_state = StepState(seed=config.run.seed)
        self.model, self.precision = build.sharded_model(config, models, mesh, step_state, execution, backend)
        self.model.to_empty(device=mesh.device)
        with build.configuration_errors():
            self.optimizer = build_optimizer(self.model, config.optimizer, mesh.reproducible)
        on_gpu = mesh.device.type == "cuda"
        memory = torch.cuda.get_device_properties(mesh.device).total_memory / 2**30 if on_gpu else None
        self.log = RunLog(config, mesh.rank == 0 and not quiet, times or TimeLedger(), memory)
        self.progress.observer = self.log.times.at
        self.checkpointer = Checkpointer(
            Path(config.run.dir) / "checkpoints",
            mesh,
            keep=config.checkpoint.keep,
            identity=identity,
            asynchronous=config.checkpoint.asynchronous,
            max_failed_saves=_MAX_FAILED_SAVES,
            timeout=datetime.timedelta(seconds=config.parallel.timeout_seconds),
            progress=self.progress,
        )
        self.graphs = build.graphs_for(config, models, mesh, self.model, self.precision.linears, self.log.console.text)
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.trainer = self

    def train(self, stops: StopConditions) -> Ending:
        """Resume, train to the last step or until a request to stop, and finish work in the background."""
        start, steps = self.resume(), self.config.train.steps
        self.missing = self._find_missing() if start == steps else []
        if start == steps and not self.missing:
            self.log.console.text(
                f"{self.config.run.dir} is finished: its checkpoint is of step {start} of {steps}. "
                "Raise train.steps to continue, or choose another run.dir."
            )
            return Ending(ExitCode.FINISHED, start)
        self.progress.at(0, "open the records")
        with self._opened(start):
            done, stop = start, start < steps and any_rank(stops.stop, self.mesh)
            for step in self.steps(start, start if stop else steps, stops):
                done, requests = step.done, step.result.requests
                self._saves_ended(requests.save_failed)
                stop = requests.stop and done < steps
                last = stop or done == steps
                if last or requests.save or step.save or is_due(self.config.checkpoint.interval, done):
                    self.save(done, last)
                    stops.saved()
                if stop:
                    break
            finished = self._finish(done, stops) and not stop
            why = stops.why_stop or "a signal to another rank"
            if not finished:
                stops.saved()
                self.log.stop(done, why)
        self.progress.at(done, "end")
        if not finished:
            saved = f"saved step {done}" if done > start else "there is nothing new to save"
            self.log.console.text(f"stopped after step {done} of {steps} on {why}: {saved}; the same command resumes")
            return Ending(ExitCode.STOPPED, done, why)
        for callback in self.callbacks:
            callback.conclude()
        return Ending(ExitCode.FINISHED, done)

    def steps(self, first: int, last: int, stops: StopConditions | None = None) -> Generator[Step]:
        """Train the steps [first, last), and yield each one when it is done. stops: the requests to this rank."""
        config, mesh, state, progress = self.config, self.mesh, self.precision.step_state, self.progress
        for index, batch in enumerate(self._batches(first, last), start=first):
            step = Step(index, batch, began=time.perf_counter() - self.data.loader.data_wait)
            state.step = index
            progress.at(step.done, "before the step")
            for callback in self.callbacks:
                callback.before_step(step)
            with ExitStack() as around:
                for callback in self.callbacks:
                    around.enter_context(callback.around_step(step))
                loss = accumulate(self.model, batch, mesh, state, progress=progress, graphs=self.graphs)
                # This rank's requests to all ranks, read as late as possible.
                requests = (stops.stop, stops.save, self.checkpointer.failed) if stops is not None else ()
                step.result = update(
                    self.optimizer,
                    loss,
                    mesh,
                    state,
                    lr=self.lr(index),
                    clip_norm=config.optimizer.clip_norm,
                    requests=StepRequests(*requests),
                    accept=self.accept,
                    progress=progress,
                    model=self.model,
                )
            for callback in self.callbacks:
                callback.after_step(step)
            yield step

    def resume(self) -> int:
        """Load a checkpoint as the configuration says; returns the number of steps done.

        Raises ConfigError if the checkpoint is of another run or after a precision switch that this run does not have,
        or if the run would overwrite checkpoints in run.dir.
        """
        self.progress.at(0, "load")
        settings, checkpointer, state = self.config.checkpoint, self.checkpointer, self.precision.step_state
        given, allow = settings.initialize_from, settings.allow_mismatch
        with build.configuration_errors():
            resumed = checkpointer.resume(settings.resume, self.model, self.optimizer, state, allow_mismatch=allow)
            start = resumed.step if resumed else 0
            if given is not None:
                again = resumed is not None
                begun = checkpointer.initialize(given, self.model, state, resumed=again, allow_mismatch=allow)
                if begun is not None:
                    self.log.console.text(f"begins with the weights of {begun.path} (its step {begun.step})")
            root = checkpointer.root
            checkpointer.sync.on_rank0("scan", lambda: refuse_to_overwrite(settings.resume, start, root))
        if resumed is None and given is None:
            self.initialize()
        if resumed is not None:
            self.load_state_dict(resumed.trainer, start)
            config_diff.refuse_finished(resumed.trainer.get("config", {}), self.config, start)
            self._changes = [*self._changes_since(resumed)]
            for _, lines, _ in self._changes:
                self.log.console.text("\n".join(lines))
        with build.configuration_errors():
            self.data.check_epochs(self.config.data.max_epochs)
        return start

    def initialize(self) -> None:
        """Give the weights their initial values. What a checkpoint overwrites does not need them."""
        self.progress.at(0, "initialize the weights")
        self.models.initialize(self.model, self.config.model, self.config.run.seed)

    def begin_from(self, folder: Path, allow_mismatch: bool = False) -> None:
        """`begin` from the checkpoint in `folder`, which may be of another run. Raises ConfigError if it does not fit,
        CheckpointError if it cannot be read."""
        parts = self.model, self.optimizer, self.precision.step_state
        with build.configuration_errors():
            resumed = self.checkpointer.load(folder, *parts, allow_mismatch=allow_mismatch)
            self.load_state_dict(resumed.trainer, resumed.step)
            self.data.check_epochs(self.config.data.max_epochs)
        self.begin(resumed.step)

    def begin(self, done: int) -> None:
        """Prepare a quiet trainer whose weights have values to call `steps` after `done` steps."""
        self.log.open(done)
        for callback in self.callbacks:
            callback.start(done)

    def save(self, done: int, last: bool = False) -> None:
        """Save the checkpoint of `done` steps, or start to. last: it is the last one of this start."""
        for callback in self.callbacks:
            callback.on_checkpoint(done)
        self.progress.at(done, "save")  # after callbacks with phases of their own
        self.checkpointer.save(
            done,
            self.model,
            self.optimizer,
            self.state_dict(),
            consumed_samples=self.samples(done),
            consumed_tokens=self.tokens(done),
            last=last,
        )

    def roll_back(self, done: int, folder: Path | None = None) -> int:
        """After `done` steps, restore weights, moments, generators and precision from the last checkpoint, or from the
        one in `folder`; training continues with the next step. Returns the checkpoint's step.

        This undoes the updates since the checkpoint; their data counts as used. If the checkpoint is gone or damaged,
        raises CheckpointGoneError and changes nothing.
        """
        self.progress.at(done, "roll back")
        parts = self.model, self.optimizer, self.precision.step_state
        resumed = self.checkpointer.load(folder, *parts, allow_mismatch=True)
        for callback in self.callbacks:
            callback.rolled_back(done, resumed.step, resumed.trainer.get(callback.name))
        return resumed.step

    def state_dict(self) -> dict[str, Any]:
        """The state of the run besides model and optimizer: JSON types, the same on all ranks."""
        return {
            "version": __version__,
            "commit": revision(),
            "made_by": made_by(self.mesh.device),
            "loader": self.data.loader.state_dict(),
            "data_facts": self.data.facts,
            **{callback.name: callback.state_dict() for callback in self.callbacks if callback.name},
            "plan": self.precision.plan.as_dict(),
            "config": as_saved(self.config),
            "origin": origin_state(self.checkpointer.origin),
            "initialized_from": origin_state(self.checkpointer.initialized_from),
        }

    def load_state_dict(self, state: Mapping[str, Any], start: int) -> None:
        """Resume after `start` steps from the `state_dict` of a checkpoint. Raises ConfigError if the checkpoint is of
        other data, or after a precision switch that this run does not have."""
        where = f"checkpoint.resume={self.config.checkpoint.resume} starts from step {start}: "
        with build.configuration_errors(where), well_formed("its trainer.json"):
            build.load_data(self.data, state, start)
            for callback in self.callbacks:
                if callback.name:
                    callback.load_state_dict(state.get(callback.name))

    def make_room(self) -> None:
        """Call it before a forward pass outside a step: CUDA graphs then free memory for it."""
        if self.graphs is not None:
            self.graphs.make_room()

    def compute_again(self, diagnose: Callable[..., str], batch: Sequence[MicroBatch], *more: Any) -> str:
        """Run the micro-batches `batch` again; returns what `diagnose` (measure/diagnosis.py) finds."""
        self.make_room()
        return diagnose(self.model, batch, self.mesh, self.precision.step_state, *more)

    def samples(self, done: int) -> int:
        return int(self.data.phases.samples_before(done))

    def tokens(self, done: int) -> int:
        return self.samples(done) * self.config.train.sequence_length

    def lr(self, step: int) -> float:
        """The learning rate of `step` (from 0)."""
        switch = self.precision.switch
        return WSDSchedule.of(self.config).lr(step, switch.switched_at, switch.config.rewarm_steps)

    def phase(self, step: int) -> str:
        return str(self.data.phases.span(step).name)

    @property
    def plan_name(self) -> str:
        switch, name = self.precision.switch, self.config.precision.name
        return name if switch.switched_at is None else f"after the switch to {switch.config.target}"

    def _find_missing(self) -> list[str]:
        """Names of the records and files that a run with all steps done has not written. A collective."""
        steps = self.config.train.steps

        def look() -> list[str]:
            events = records_of(self.config.run.dir, "event")
            saved = any(event["step"] == steps and event.get("event") == "checkpoint" for event in events)
            lacking = [what for callback in self.callbacks for what in callback.lacking(steps)]
            return lacking if saved else [_LAST_SAVE, *lacking]

        missing = self.checkpointer.sync.on_rank0("look for missing records", look)
        return missing if self.checkpointer.has(steps) else []

    @contextmanager
    def _opened(self, start: int) -> Iterator[None]:
        """Inside, records are open and callbacks have started. After an exception its traceback is printed, saves in
        the background are given up, callbacks close, and records close last."""
        log, plan = self.log, self.precision.plans[0].as_dict()
        forward = self.models.forward_flops_per_token(self.config.model, self.config.train.sequence_length)
        log.open(
            start,
            steps=self.config.train.steps,
            decay_start=WSDSchedule.of(self.config).decay_start_step + 1,
            unigram_entropy=self.data.unigram_entropy,
            world_size=self.mesh.world_size,
            optimizer=optimizer_name(self.optimizer),
            plan=plan,
            parameters=self.models.parameter_count(self.config.model).total,
            quantized_flops=round(self.precision.plans[0].quantized_flops_per_token / forward, 4),
            resume=self.config.checkpoint.resume,
            origin=origin_state(self.checkpointer.origin),
            initialized_from=origin_state(self.checkpointer.initialized_from),
            source_tokens=self.data.source_tokens,
            host=socket.gethostname(),
            made_by=made_by(self.mesh.device),
        )
        for event, _, details in self._changes:
            log.metrics.event(start, event, **details)
        if self.missing:
            what = ", ".join(self.missing)
            log.console.text(f"{self.config.run.dir} is finished, but lacks {what}; writing it now")
        self.checkpointer.before_publish = log.metrics.sync
        log.settings(plan)
        with log, ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.close)
            with self.checkpointer, printed_at_once():
                self.progress.at(0, "memory for saves")
                self.checkpointer.prepare(self.model, self.optimizer)
                for callback in self.callbacks:
                    callback.start(start)
                if _LAST_SAVE in self.missing:
                    log.metrics.event(start, "checkpoint", path=str(self.checkpointer.folder(start)))
                yield

    def _changes_since(self, resumed: Resumed) -> Iterator[tuple[str, Sequence[str], dict[str, Any]]]:
        """Damaged checkpoints, and changes of configuration and data since the checkpoint: an event, the lines to print
        and the details to record."""
        saved, switch, start = resumed.trainer.get("config", {}), self.precision.switch, resumed.step
        for damage in resumed.damaged:
            line = f"{damage.name} was damaged ({damage.problem}): kept as {damage.moved_to}, training again from step "
            yield "damaged", [f"{line}{start}"], asdict(damage)
        for name in resumed.returned:
            line = (
                f"{name.partition('.')[0]} was away and has come back: the run has since continued from an earlier "
                f"step, so it is kept as {name}, and training resumes from step {start}, which was saved last"
            )
            yield "returned", [line], {"moved_to": name}
        if saved and (changes := config_diff.configuration_changes(saved, self.config)):
            lines = config_diff.change_lines(changes)
            lines += config_diff.consequences(saved, self.config, switch, start)
            yield "configuration", lines, {"changes": [change._asdict() for change in changes]}
        if made_with := resumed.trainer.get("made_by"):
            facts = [config_diff.Change(*change) for change in changed_facts(made_with, made_by(self.mesh.device))]
            if facts:
                yield "made_by", config_diff.change_lines(facts), {"changes": [fact._asdict() for fact in facts]}
        if changed_data := self.data.loader.changes:
            yield "data", changed_data, {"changes": changed_data}

    def _batches(self, first: int, last: int) -> Iterator[list[MicroBatch]]:
        if first < last:
            with closing(self.data.loader.steps(first, last)) as batches:
                try:
                    yield from self.progress.loading(batches, first + 1)
                except self.data.refusal as error:
                    raise ConfigError(str(error)) from error

    def _saves_ended(self, save_failed: bool = False) -> None:
        reports = self.checkpointer.reports(save_failed)
        for report in reports:
            times = {"seconds": round(report.seconds, 3), "stall": round(report.stall, 3)}
            if report.error is None:
                saved = {"path": str(report.folder), **times}
                self.log.event(report.step, "checkpoint", f"saved {report.folder}", **saved)
            else:
                text = f"NOT SAVED, training continues: {report.error}"
                self.log.event(report.step, "save_failed", text, error=report.error, **times)
        for callback in self.callbacks:
            callback.saved(reports)

    def _finish(self, done: int, stops: StopConditions) -> bool:
        """Wait for the last save and for callbacks; returns whether the callbacks have finished their work."""
        self.progress.at(done, "save")
        self.checkpointer.finish()
        self._saves_ended()
        return all(callback.finish(done, lambda: stops.stop) for callback in self.callbacks)


def check_start(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Raise ConfigError for the first reason not to start a run that this process can find before data is opened."""
    # A dry run may plan for another machine.
    device_type = "cuda" if torch.cuda.is_available() or config.run.dry else "cpu"
    build.check(config, models, data, place_in_run().world_size, device_type)
    check_resume(config)
    if not config.run.dry:
        build.execution_of(config, models)
        build.why_eager(config, models)


def any_rank(flag: bool, mesh: ParallelMesh) -> bool:
    """Whether `flag` is true on any rank. A collective."""
    value = torch.tensor(float(flag), device=mesh.device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return bool(value.item())


def is_due(interval: int, done: int) -> bool:
    """Whether something that is due every `interval` steps (0: never) is due after `done` steps."""
    return interval > 0 and done % interval == 0
