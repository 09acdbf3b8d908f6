"""A run: its parts, and what it says of its steps by what several of them know. `assembly.py` builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.loader import MicroBatchLoader
from data.schedule import PhaseSchedule, check_epochs
from data.token_source import DataBundle
from data.validation import ValidationSet, Yardstick
from exchange.in_run import Exports
from megatron_fp4 import __version__
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.files import origin_state
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.removed_keys import refuse_removed
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.logging.run_log import RunLog
from megatron_fp4.measure.machine import peak_memory, peak_tflops
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.backend_support import BackendChoice
from megatron_fp4.precision.switch import PrecisionController
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.autotuning import KernelChoices
from megatron_fp4.training.cuda_graphs import GraphsChoice, MicroBatchGraphs
from megatron_fp4.training.micro_batch import MicroBatch
from megatron_fp4.training.nonfinite_guard import NonFiniteGuard
from megatron_fp4.training.optimizer import BuiltOptimizer
from megatron_fp4.training.schedule import WSDSchedule
from megatron_fp4.training.spikes import SpikeGuard
from megatron_fp4.training.step import StepResult
from models.hybrid import HybridModel
from models.pattern import training_flops_per_token


@dataclass
class Run:
    """The parts of a run, built and wired. plans, recipes and the clock are the controller's."""

    config: Config
    mesh: ParallelMesh
    model: HybridModel
    controller: PrecisionController
    backend: BackendChoice
    schedule: WSDSchedule
    optimizer: BuiltOptimizer
    bundle: DataBundle
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    yardsticks: dict[str, Yardstick]
    checkpointer: Checkpointer
    exports: Exports
    guard: NonFiniteGuard
    spikes: SpikeGuard
    kernels: KernelChoices
    graphs_choice: GraphsChoice
    graphs: MicroBatchGraphs | None
    log: RunLog
    progress: Progress

    @property
    def phases(self) -> PhaseSchedule:
        """The data phases; behind a resume, with those that have been."""
        return self.loader.schedule

    def samples(self, step: int) -> int:
        """Of the steps [0, step)."""
        return self.phases.samples_before(step)

    def tokens(self, step: int) -> int:
        """Of the steps [0, step)."""
        return self.samples(step) * self.config.train.sequence_length

    def flops_per_token(self, step: int) -> int:
        """Model FLOPs of forward and backward in `step` (from 0)."""
        length = self.phases.span(step).sequence_length or self.config.train.sequence_length
        return training_flops_per_token(self.config.model, length)

    def lr(self, step: int) -> float:
        """The learning rate of `step` (from 0)."""
        switch = self.controller.switch
        return self.schedule.lr(step, switch.switched_at, switch.config.rewarm_steps)

    def phase(self, step: int) -> str:
        """The data phase of `step` (from 0)."""
        return self.phases.span(step).name

    def epochs(self, step: int) -> dict[str, float]:
        """How often the steps [0, step) have gone through each source that gave any of their samples; of more than 64
        sources, those gone through most."""
        taken = self.phases.counts(self.samples(step))
        sources = self.loader.sources  # with other data allowed, one may be gone
        epochs = {name: sources[name].epochs(count) for name, count in taken.items() if name in sources}
        return dict(sorted(epochs.items(), key=lambda item: -item[1])[:64]) if len(epochs) > 64 else epochs

    def bits_per_byte(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Held-out losses in nats per token, by set, as bits for each byte of text, where its bytes are known."""
        bits = {name: self.yardsticks[name].bits_per_byte(loss) for name, loss in losses.items()}
        return {name: value for name, value in bits.items() if value is not None}

    def check_epochs(self) -> None:
        """Raise ValueError if the run would go through a source too often, what has been included."""
        check_epochs(self.phases, self.loader.sources, self.config.data.max_epochs)

    @property
    def plan_name(self) -> str:
        """The precision in effect, as records call it."""
        switch = self.controller.switch
        return (
            self.config.precision.name if switch.switched_at is None else f"after the switch to {switch.config.target}"
        )

    def roll_back(self, step: int, folder: Path | None = None) -> int:
        """After `step` steps done: take up weights, moments, generators and precision of the last checkpoint, or of the
        one in `folder`, and go on with the next step. Returns the checkpoint's step.

        What the steps since did to the run is undone; their data counts as seen. Raises CheckpointGoneError, and
        changes nothing, if the checkpoint is no longer whole.
        """
        self.progress.at(step, "go back to a checkpoint")
        parts = self.model, self.optimizer.optimizer, self.controller.clock
        if folder is None:
            resumed = self.checkpointer.reload(*parts)
        else:
            resumed = self.checkpointer.load(folder, *parts, allow_mismatch=True)
        self.controller.load_state_dict(resumed.trainer["switch"])
        self.spikes.rolled_back(resumed.trainer.get("spikes"))
        self.guard.rolled_back(step, resumed.step)
        return resumed.step

    def beside_graphs(self, diagnose: Callable[..., str], micro_batches: Sequence[MicroBatch], *more: Any) -> str:
        """What `diagnose` finds by running `micro_batches` once more, with room for that."""
        if self.graphs is not None:
            self.graphs.make_room()
        return diagnose(self.model, micro_batches, self.mesh, self.controller.clock, *more)

    def step_settings(self, step: int) -> dict[str, Any]:
        """What the configuration gives `train_step` for `step` (from 0)."""
        return {
            "lr": self.lr(step),
            "clip_norm": self.config.optimizer.clip_norm,
            "reshard": self.config.parallel.reshard,
            "accept": self.spikes.accept,
            "progress": self.progress,
            "graphs": self.graphs,
        }

    def step_metrics(self, step: int, result: StepResult, seconds: float) -> StepMetrics:
        """The record of `step` (from 0), which took `seconds`."""
        rate = (self.tokens(step + 1) - self.tokens(step)) / seconds
        tflops, peak = self.flops_per_token(step) * rate / self.mesh.world_size / 1e12, peak_tflops(self.mesh.device)
        now_and_then = self.log.active and (step + 1) % self.config.logging.interval == 0
        first = self.log.active and step == self.log.console.start_step
        return StepMetrics(
            step=step + 1,
            tokens=self.tokens(step + 1),
            loss=result.loss,
            lr=self.lr(step),
            grad_norm=result.grad_norm,
            tokens_per_second=rate,
            model_tflops=tflops,
            step_time=seconds,
            skipped=result.skipped,
            phase=self.phase(step),
            plan=self.plan_name,
            data_wait=self.loader.data_wait,
            epochs=self.epochs(step + 1) if now_and_then else {},
            mfu=None if peak is None else tflops / peak,
            peak_memory_gib=peak_memory(self.mesh.device) if now_and_then or first else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes on after a resume besides model and optimizer: JSON types, the same on all ranks."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        plan = self.controller.plan.as_dict()
        origins = {
            "origin": origin_state(self.checkpointer.origin),
            "initialized_from": origin_state(self.checkpointer.initialized_from),
        }
        return {"version": __version__, **state, "plan": plan, "config": as_saved(self.config), **origins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `state_dict`. Raises ValueError if it is of other data, after a switch that this
        run does not have, or of a run with an ability that is gone."""
        refuse_removed(state.get("config", {}))
        for name, part in self._parts().items():
            part.load_state_dict(state.get(name))

    def _parts(self) -> dict[str, Any]:
        return {
            "loader": self.loader,
            "switch": self.controller,
            "skipped": self.guard,
            "spikes": self.spikes,
            "wandb_run_id": self.log,
            "autotuning": self.kernels,
        }
