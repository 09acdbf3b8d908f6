"""The spine of a run: build, resume, train, save, roll back.

    trainer = Trainer(config, models, data, callbacks, mesh)
    ending = trainer.train(stops)

What a run can do besides training steps is in its callbacks, one ordered list in pretrain.py; the trainer knows none of
them. What lives longer than a run's parts (process group, lock, signals, state.json) is pretrain.py's.
"""

from __future__ import annotations

import datetime
import random
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
from megatron_fp4.checkpoint.files import origin_state
from megatron_fp4.checkpoint.find import Resumed, check_resume, refuse_to_overwrite
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.removed_keys import refuse_removed
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.files import records_of
from megatron_fp4.logging.run_folder import check_baseline
from megatron_fp4.logging.run_log import RunLog, TimeLedger
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import agreed_backend
from megatron_fp4.runtime.errors import ExitCode, printed_at_once
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.revision import revision
from megatron_fp4.runtime.signals import StopConditions
from megatron_fp4.training.build import (
    backend_of,
    check,
    check_samples,
    configuration_errors,
    execution_of,
    graphs_for,
    initialize,
    is_refusal,
    sharded_model,
    why_eager,
)
from megatron_fp4.training.optimizer import OPTIMIZER, WSDSchedule, build_optimizer
from megatron_fp4.training.providers import DataProvider, MicroBatch, ModelProvider
from megatron_fp4.training.step import StepRequests, StepResult, accumulate, update

# So many failed saves in a row end the run.
_MAX_FAILED_SAVES = 3
# What a finished run may lack: the record of its last save.
_LAST_SAVE = "its last checkpoint's event"


class Ending(NamedTuple):
    """How a start ended after `done` steps. reason: what asked it to stop."""

    code: ExitCode
    done: int
    reason: str = ""


@dataclass
class Step:
    """A training step. index: from 0. batch: this rank's micro-batches. began: `time.perf_counter()` of when it began
    to wait for them. save: a checkpoint is wanted after it, on all ranks alike."""

    index: int
    batch: Sequence[MicroBatch]
    began: float
    result: StepResult = field(init=False)
    save: bool = False

    @property
    def done(self) -> int:
        """Steps done with it, as metrics.jsonl counts."""
        return self.index + 1


class Callback:
    """An ability of a run. It overrides the hooks that it needs; they stand in the order in which a run calls them.

    Hooks are called on all ranks in the order of the list. So they may use collectives, where all ranks decide alike.
    trainer: set before any hook is called.
    """

    name = ""
    """The key of its state in checkpoints; "" for none. A callback that is not in the list keeps no state."""
    accept: Callable[[float, float], bool] | None = None
    """(loss, norm) -> whether to update, all ranks alike; None: it does not judge."""
    trainer: Trainer

    def load_state_dict(self, state: Any) -> None:
        """Take the `state_dict` of a checkpoint; None: it has none."""

    def lacking(self, done: int) -> list[str]:
        """Names of what a run that has done all its steps did not write; asked on the first rank."""
        return []

    def start(self, done: int) -> None:
        """The run is resumed after `done` steps, its records are open, no step and no kernel has run. Where all steps
        are done: write what is lacking."""

    def before_step(self, step: Step) -> None:
        """The micro-batches of `step` are loaded."""

    def around_step(self, step: Step) -> AbstractContextManager[object]:
        """A context for forward, backward and update."""
        return nullcontext()

    def after_step(self, step: Step) -> None:
        """`step.result` is known; set `step.save` for a checkpoint."""

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """After `done` steps weights, moments and generators are those of the checkpoint of step `checkpoint` again.
        state: this callback's in it, None if it has none."""

    def on_checkpoint(self, done: int) -> None:
        """A checkpoint of `done` steps is about to be saved."""

    def state_dict(self) -> Any:
        """For the checkpoint: JSON types, the same on all ranks."""
        return None

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Saves have ended; asked after every step and at the end. Reports differ between ranks: no collective here."""

    def finish(self, done: int, stop: Callable[[], bool]) -> bool:
        """Training is over after `done` steps, the last checkpoint is on the disk: finish work in the background. stop:
        whether this rank is asked to stop. Returns False if that came first."""
        return True

    def close(self) -> None:
        """Release resources, however the run ends, even if `start` failed; called in the reverse order."""

    def conclude(self) -> None:
        """The run has done all its steps, and its records are closed."""


class Trainer:
    """The parts of a run, built and wired. Raises ConfigError for data that cannot be opened or does not fit.

    models, data: providers (providers.py). callbacks: in their order. progress: is told what the run does. quiet:
    record and print nothing, for a caller that repeats some steps of a run. times: how long the start took until now.

    precision: plans, switch and StepState of the linears. graphs: None where micro-batches run eagerly. missing: names
    of what a run that has done all its steps did not write.
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
        random.seed(config.run.seed)
        np.random.seed(config.run.seed)
        torch.manual_seed(config.run.seed)
        self.progress.at(0, "open the data")  # first: what is wrong with it is said before minutes of initialization
        with configuration_errors():
            self.data = data.open_data(config, mesh, is_refusal)
            identity = run_identity(config, self.data.fingerprint)
        self.progress.at(0, "build the model")
        backend = agreed_backend(backend_of(config, models))
        execution = models.agreed_execution(execution_of(config, models))
        step_state = StepState(seed=config.run.seed)
        self.model, self.precision = sharded_model(config, models, mesh, step_state, execution, backend.open())
        self.progress.at(0, "initialize the weights")
        initialize(self.model, config, models, mesh)
        with configuration_errors():
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
        )
        self.graphs = graphs_for(config, models, mesh, self.model, self.precision.linears, self.log.console.text)
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.trainer = self

    def train(self, stops: StopConditions) -> Ending:
        """Resume, train to the last step or to a request to stop, and finish what is on its way."""
        start, steps = self.resume(), self.config.train.steps
        self.missing = self._find_missing() if start == steps else []
        if start == steps and not self.missing:
            self.log.console.text(
                f"{self.config.run.dir} is finished: the checkpoint it starts from is of step {start} of {steps}. "
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
                    stops.obeyed()
                if stop:
                    break
            if stop:
                self.log.stop(done, stops.why_stop)
            finished = self._finish(done, stops) and not stop
        self.progress.at(done, "end")
        if not finished:
            self.log.stopped(start, done, stops.why_stop)
            return Ending(ExitCode.STOPPED, done, stops.why_stop or "a request to another rank")
        for callback in self.callbacks:
            callback.conclude()
        return Ending(ExitCode.FINISHED, done)

    def steps(self, first: int, last: int, stops: StopConditions | None = None) -> Generator[Step]:
        """Train the steps [first, last), and yield each when it is done. stops: what this rank is asked to do."""
        config, mesh, state, progress = self.config, self.mesh, self.precision.step_state, self.progress
        accept = next((callback.accept for callback in self.callbacks if callback.accept is not None), None)
        for index, batch in enumerate(self._batches(first, last), start=first):
            step = Step(index, batch, began=time.perf_counter() - self.data.loader.data_wait)
            state.step = index
            progress.at(step.done, "before the step")
            for callback in self.callbacks:
                callback.before_step(step)
            with ExitStack() as around:
                for callback in self.callbacks:
                    around.enter_context(callback.around_step(step))
                reshard, graphs = config.parallel.reshard, self.graphs
                loss = accumulate(self.model, batch, mesh, state, reshard=reshard, progress=progress, graphs=graphs)
                # What this rank asks all to do, read as late as possible.
                requests = (stops.stop, stops.save, self.checkpointer.failed) if stops is not None else ()
                step.result = update(
                    self.optimizer,
                    loss,
                    mesh,
                    state,
                    lr=self.lr(index),
                    clip_norm=config.optimizer.clip_norm,
                    requests=StepRequests(*requests),
                    accept=accept,
                    progress=progress,
                )
            for callback in self.callbacks:
                callback.after_step(step)
            yield step

    def resume(self) -> int:
        """Load a checkpoint if the configuration says so; returns steps done.

        Raises ConfigError if the checkpoint is of another run or after a switch that this one does not have, or if
        resuming would overwrite checkpoints of run.dir.
        """
        self.progress.at(0, "load")
        settings, checkpointer, state = self.config.checkpoint, self.checkpointer, self.precision.step_state
        given, allow = settings.initialize_from, settings.allow_mismatch
        with configuration_errors():
            resumed = checkpointer.resume(settings.resume, self.model, self.optimizer, state, allow_mismatch=allow)
            start = resumed.step if resumed else 0
            if given is not None:
                again = resumed is not None
                begun = checkpointer.initialize(given, self.model, state, resumed=again, allow_mismatch=allow)
                if begun is not None:
                    self.log.console.text(f"begins with the weights of {begun.path} (its step {begun.step})")
            root = checkpointer.root
            checkpointer.sync.on_rank0("scan", lambda: refuse_to_overwrite(settings.resume, start, root))
        if resumed is not None:
            self.load_state_dict(resumed.trainer, start)
            self._report_changes(resumed)
        with configuration_errors():
            self.data.check_epochs(self.config.data.max_epochs)
        return start

    def begin_from(self, folder: Path, allow_mismatch: bool = False) -> None:
        """`begin` from the checkpoint in `folder`, whose run this need not be. Raises ConfigError if it does not fit,
        CheckpointError if it cannot be read."""
        parts = self.model, self.optimizer, self.precision.step_state
        with configuration_errors():
            resumed = self.checkpointer.load(folder, *parts, allow_mismatch=allow_mismatch)
            self.load_state_dict(resumed.trainer, resumed.step)
            self.data.check_epochs(self.config.data.max_epochs)
        self.begin(resumed.step)

    def begin(self, done: int) -> None:
        """Prepare a quiet trainer, which saves nothing, for a call of `steps` after `done` steps."""
        self.log.open(done)
        for callback in self.callbacks:
            callback.start(done)

    def save(self, done: int, last: bool = False) -> None:
        """Write the checkpoint of `done` steps, or begin to. last: of this start."""
        self.progress.at(done, "save")
        for callback in self.callbacks:
            callback.on_checkpoint(done)
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
        """After `done` steps: take weights, moments, generators and precision of the last checkpoint, or of the one in
        `folder`, and continue with the next step. Returns the checkpoint's step.

        What the steps since did to the run is undone; their data counts as seen. Raises CheckpointGoneError, and
        changes nothing, if the checkpoint is no longer whole.
        """
        self.progress.at(done, "go back to a checkpoint")
        parts = self.model, self.optimizer, self.precision.step_state
        resumed = self.checkpointer.load(folder, *parts, allow_mismatch=True)
        for callback in self.callbacks:
            callback.rolled_back(done, resumed.step, resumed.trainer.get(callback.name))
        return resumed.step

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides model and optimizer: JSON types, the same on all ranks."""
        return {
            "version": __version__,
            "commit": revision(),
            "loader": self.data.loader.state_dict(),
            **{callback.name: callback.state_dict() for callback in self.callbacks if callback.name},
            "plan": self.precision.plan.as_dict(),
            "config": as_saved(self.config),
            "origin": origin_state(self.checkpointer.origin),
            "initialized_from": origin_state(self.checkpointer.initialized_from),
        }

    def load_state_dict(self, state: Mapping[str, Any], start: int) -> None:
        """Resume after `start` steps from a checkpoint's `state_dict`. Raises ConfigError if it is of other data, after
        a switch that this run does not have, or of a run with an ability that is gone."""
        with configuration_errors(f"checkpoint.resume={self.config.checkpoint.resume} starts from step {start}: "):
            refuse_removed(state.get("config", {}))
            self.data.loader.load_state_dict(state["loader"])
            for callback in self.callbacks:
                if callback.name:
                    callback.load_state_dict(state.get(callback.name))
            check_samples(self.data.phases, start, self.data.loader.consumed_samples)

    def make_room(self) -> None:
        """Before a forward pass outside of a step: CUDA graphs leave it their memory."""
        if self.graphs is not None:
            self.graphs.make_room()

    def compute_again(self, diagnose: Callable[..., str], batch: Sequence[MicroBatch], *more: Any) -> str:
        """What `diagnose` (measure/diagnosis.py) finds by running the micro-batches `batch` once more."""
        self.make_room()
        return diagnose(self.model, batch, self.mesh, self.precision.step_state, *more)

    def samples(self, done: int) -> int:
        """Samples of the first `done` steps."""
        return int(self.data.phases.samples_before(done))

    def tokens(self, done: int) -> int:
        """Tokens of the first `done` steps."""
        return self.samples(done) * self.config.train.sequence_length

    def lr(self, step: int) -> float:
        """The learning rate of `step` (from 0)."""
        switch = self.precision.switch
        return WSDSchedule.of(self.config).lr(step, switch.switched_at, switch.config.rewarm_steps)

    def phase(self, step: int) -> str:
        """The data phase of `step` (from 0)."""
        return str(self.data.phases.span(step).name)

    @property
    def plan_name(self) -> str:
        """The precision in effect, as records call it."""
        switch, name = self.precision.switch, self.config.precision.name
        return name if switch.switched_at is None else f"after the switch to {switch.config.target}"

    def _find_missing(self) -> list[str]:
        """Names of what a run that has done all its steps was killed before it wrote. A collective."""
        steps = self.config.train.steps

        def look() -> list[str]:
            events = records_of(self.config.run.dir, "event")
            saved = any(event["step"] == steps and event.get("event") == "checkpoint" for event in events)
            lacking = [what for callback in self.callbacks for what in callback.lacking(steps)]
            return lacking if saved else [_LAST_SAVE, *lacking]

        missing = self.checkpointer.sync.on_rank0("look for what the run lacks", look)
        return missing if self.checkpointer.has(steps) else []

    @contextmanager
    def _opened(self, start: int) -> Iterator[None]:
        """Inside, records are open and callbacks have started. At an exception its traceback is printed, saves in the
        background are given up, callbacks close, and records close last."""
        log, plan = self.log, self.precision.plans[0].as_dict()
        forward = self.models.forward_flops_per_token(self.config.model, self.config.train.sequence_length)
        log.open(
            start,
            steps=self.config.train.steps,
            decay_start=WSDSchedule.of(self.config).decay_start_step + 1,
            unigram_entropy=self.data.unigram_entropy,
            world_size=self.mesh.world_size,
            optimizer=OPTIMIZER,
            plan=plan,
            parameters=self.models.parameter_count(self.config.model).total,
            quantized_flops=round(self.precision.plans[0].quantized_flops_per_token / forward, 4),
            resume=self.config.checkpoint.resume,
            origin=origin_state(self.checkpointer.origin),
            initialized_from=origin_state(self.checkpointer.initialized_from),
        )
        if self.missing:
            what = ", ".join(self.missing)
            log.console.text(f"{self.config.run.dir} is finished, but lacks {what}; writing that now")
        self.checkpointer.before_publish = log.metrics.sync
        self.checkpointer.alive = self.progress.alive
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

    def _report_changes(self, resumed: Resumed) -> None:
        """Print and record what was damaged, and what of configuration and data has changed since the checkpoint."""
        saved, switch, start = resumed.trainer.get("config", {}), self.precision.switch, resumed.step
        for damage in resumed.damaged:
            line = f"{damage.name} was damaged ({damage.problem}): kept as {damage.moved_to}, training again from step "
            self.log.found("damaged", [f"{line}{start}"], **asdict(damage))
        if saved and (changes := config_diff.configuration_changes(saved, self.config)):
            lines = config_diff.change_lines(changes)
            lines += config_diff.consequences(saved, self.config, switch, start)
            self.log.found("configuration", lines, changes=[change._asdict() for change in changes])
        if changed_data := self.data.loader.changes:
            self.log.found("data", changed_data, changes=changed_data)

    def _batches(self, first: int, last: int) -> Iterator[list[MicroBatch]]:
        if first < last:
            with closing(self.data.loader.steps(first, last)) as batches:
                yield from self.progress.loading(batches, first + 1)

    def _saves_ended(self, save_failed: bool = False) -> None:
        """Record which saves have ended. save_failed: of any rank."""
        reports = self.checkpointer.reports(save_failed)
        self.log.saves(reports)
        for callback in self.callbacks:
            callback.saved(reports)

    def _finish(self, done: int, stops: StopConditions) -> bool:
        """Wait for the last save and for callbacks; returns whether callbacks are finished."""
        self.progress.at(done, "save")
        self.checkpointer.finish()
        self._saves_ended()
        finished = all(callback.finish(done, lambda: stops.stop) for callback in self.callbacks)
        if done == self.config.train.steps and not finished:
            stops.obeyed()
            self.log.stop(done, stops.why_stop)
        return finished


def check_start(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Raise ConfigError for the first thing that forbids a start with `config`, or its dry run, as far as this process
    sees before any data is opened."""
    # A dry run plans for machines that are not here.
    device_type = "cuda" if torch.cuda.is_available() or config.run.dry else "cpu"
    check(config, models, data, place_in_run().world_size, device_type)
    check_resume(config)
    check_baseline(config)
    if not config.run.dry:
        execution_of(config, models)
        why_eager(config, models)


def any_rank(flag: bool, mesh: ParallelMesh) -> bool:
    """Whether any rank has it. A collective."""
    value = torch.tensor(float(flag), device=mesh.device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return bool(value.item())


def is_due(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens after `done` steps."""
    return interval > 0 and done % interval == 0
