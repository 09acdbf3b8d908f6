"""Spikes of the loss or the gradient norm: skipped, or answered by a rollback to the last checkpoint (spikes.py)."""

from __future__ import annotations

from typing import Any

from megatron_fp4.checkpoint.checkpointer import CheckpointGoneError
from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.measure.spike_diagnosis import diagnose_spike
from megatron_fp4.training.spikes import Spike, SpikeGuard
from megatron_fp4.training.trainer import Callback, Step


class Spikes(Callback):
    """Refuses updates far beyond what came before, in the same data phase and precision."""

    name = "spikes"

    def __init__(self, config: SpikesConfig) -> None:
        self.guard = SpikeGuard(config)
        self.accept = self.guard.accept

    def before_step(self, step: Step) -> None:
        """Steps of another phase or precision are no measure."""
        self.guard.enter(f"{self.trainer.phase(step.index)}, {self.trainer.plan_name}")

    def after_step(self, step: Step) -> None:
        """Answer a spike. Raises SpikeError on all ranks if there were too many in a row."""
        trainer, result = self.trainer, step.result
        if spike := self.guard.observe(result, step.done, trainer.checkpointer.last_step):
            self.answer(spike)
            self.guard.give_up(spike, lambda: trainer.compute_again(diagnose_spike, step.batch, result))

    def answer(self, spike: Spike) -> None:
        """Go back to the last checkpoint if the configuration says so and there is one, and record what was done."""
        trainer, config = self.trainer, self.guard.config
        restored = None
        action: str = config.action
        if spike.in_row >= config.max_in_row:
            answer, action = "the run ends", "end"
        elif action == "skip":
            answer = "skipped"
        elif trainer.checkpointer.last_step() is None:
            answer = "skipped, because there is no checkpoint yet to go back to"
        else:
            try:
                restored = trainer.roll_back(spike.step)
                answer = f"went back to the checkpoint of step {restored}, and on with the next batch"
            except CheckpointGoneError as error:
                answer = f"skipped, because going back failed: {error}"
        first = spike.step - 1 if restored is None else restored
        samples = trainer.samples(first), trainer.samples(spike.step)
        trainer.log.spike(
            spike,
            answer,
            action=action if restored is not None or action == "end" else "skip",
            checkpoint=restored,
            steps=[first + 1, spike.step],
            samples=[samples[0], samples[1] - 1],
            sources=[
                {"phase": found.phase, "source": found.source, "first": found.start, "last": found.end - 1}
                for found in trainer.data.phases.source_ranges(*samples)
            ],
        )

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """The measure is that of the checkpoint, the counts stay."""
        self.guard.rolled_back(state)

    def state_dict(self) -> Any:
        """Counts and history."""
        return self.guard.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Those of a checkpoint."""
        self.guard.load_state_dict(state)
