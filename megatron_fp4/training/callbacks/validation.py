"""Held-out losses, every `validation.interval` steps and after the last one."""

from __future__ import annotations

from megatron_fp4.training.evaluate import evaluate
from megatron_fp4.training.trainer import Callback, Step, Trainer


def validation_is_due(interval: int, done: int, steps: int) -> bool:
    """Whether held-out losses and texts come after `done` of `steps` steps."""
    return done == steps or (interval > 0 and done % interval == 0)


class Validation(Callback):
    """Measures and records the loss of each held-out set."""

    def start(self, done: int) -> None:
        """A run that was killed after its last step lacks its last validation."""
        missing = self.trainer.missing
        if missing is not None and missing.validation:
            self._record(done)

    def after_step(self, step: Step) -> None:
        """If it is due."""
        config = self.trainer.config
        if validation_is_due(config.validation.interval, step.done, config.train.steps):
            self._record(step.done)

    def _record(self, done: int) -> None:
        trainer = self.trainer
        if losses := held_out_losses(trainer):
            trainer.log.validation(done, trainer.tokens(done), losses, trainer.data.bits_per_byte(losses))


def held_out_losses(trainer: Trainer) -> dict[str, float]:
    """By held-out set, in nats per token that counts; the same on all ranks. A collective."""
    data, mesh, clock = trainer.data, trainer.mesh, trainer.precision.clock
    if not data.validation:
        return {}
    trainer.make_room()
    trainer.progress.at(clock.step + 1, "validation")
    size = trainer.config.train.micro_batch_size
    batches = {held_out.name: held_out.batches(size, mesh.dp_rank, mesh.dp_size) for held_out in data.validation}
    return evaluate(trainer.model, batches, mesh, clock, trainer.progress)
