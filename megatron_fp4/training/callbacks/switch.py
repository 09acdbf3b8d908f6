"""The precision switch, and the measurement of gradient noise that may decide it."""

from __future__ import annotations

from typing import Any

from megatron_fp4.measure.gradient_noise import GradientNoise, gradient_noise
from megatron_fp4.training.trainer import Callback, Step


class Switch(Callback):
    """Puts the plan after the switch into effect, when the configuration or a measurement says so."""

    name = "switch"

    def before_step(self, step: Step) -> None:
        """Measure if that is due, and switch if it is time."""
        trainer = self.trainer
        if trainer.precision.switch.measures(step.index):
            trainer.make_room()
        if trainer.precision.before_step(step.index, lambda: self._measure(step).ratio):
            trainer.log.switch(step.index)

    def _measure(self, step: Step) -> GradientNoise:
        trainer = self.trainer
        noise = gradient_noise(
            trainer.model,
            step.batch,
            trainer.mesh,
            trainer.precision,
            step=step.index,
            reshard=trainer.config.parallel.reshard,
        )
        trainer.log.metrics.record(step.done, "gradient_noise", noise.as_record(), noise.scalars())
        threshold = trainer.config.precision.switch.threshold
        trainer.log.console.event(
            step.index, f"gradient over quantization noise {noise.ratio:.3f}, switch below {threshold:.3f}"
        )
        return noise

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """The plan is again that of the checkpoint."""
        self.load_state_dict(state)

    def state_dict(self) -> Any:
        """Whether and when it switched."""
        return self.trainer.precision.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Raises ValueError if the checkpoint is after a switch that this run does not have."""
        self.trainer.precision.load_state_dict(state)
