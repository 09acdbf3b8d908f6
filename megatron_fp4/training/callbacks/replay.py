"""Silent data corruption: a micro-batch is computed twice every `run.replay_interval` steps (measure/replay.py)."""

from __future__ import annotations

from megatron_fp4.measure.replay import Replay, ReplayError
from megatron_fp4.training.trainer import Callback, Step


class ReplayCheck(Callback):
    """Ends the run where two computations of the same micro-batch differ."""

    def start(self, done: int) -> None:
        """Nothing is computed yet."""
        trainer = self.trainer
        interval = trainer.config.run.replay_interval
        self._replay = Replay(interval, trainer.model, trainer.mesh, trainer.precision)

    def before_step(self, step: Step) -> None:
        """Raises ReplayError on all ranks if a rank's computations differ."""
        if not self._replay.due(step.index):
            return
        trainer = self.trainer
        trainer.make_room()
        trainer.progress.at(step.done, "replay")
        replayed = self._replay.before_step(step.index, step.batch)
        if replayed is None or not replayed.differences:
            return
        trainer.log.metrics.event(step.done, "replay", **replayed.as_event())
        raise ReplayError(f"{replayed}; test that machine, or set run.replay_interval=0 to train on")
