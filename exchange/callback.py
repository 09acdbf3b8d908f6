"""Exports while a run trains (in_run.py), as a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exchange.in_run import Exports
from megatron_fp4.checkpoint.saves import SaveReport
from megatron_fp4.training.trainer import Callback, Step


class ExportCallback(Callback):
    """last: the last step whose checkpoint can be exported (`last_exportable`); None: all can."""

    def __init__(self, last: int | None) -> None:
        self._last, self._made = last, None

    _made: Exports | None

    @property
    def _exports(self) -> Exports:
        trainer = self.trainer
        if self._made is None:
            self._made = Exports(trainer.config, trainer.log, active=trainer.mesh.rank == 0, last=self._last)
        return self._made

    def lacking(self, done: int) -> list[str]:
        """Exports that are still to be made."""
        return self._exports.lacking(done)

    def start(self, done: int) -> None:
        """Make what an earlier start owed."""
        self.trainer.checkpointer.saves.needed = self._exports.protected
        self._exports.begin(done)

    def after_step(self, step: Step) -> None:
        """What is to be exported is to be saved."""
        step.save = step.save or self._exports.due(step.done)

    def on_checkpoint(self, done: int) -> None:
        """Keep it until it is exported."""
        self._exports.want(done)

    def saved(self, reports: Sequence[SaveReport]) -> None:
        """Begin the exports of what was saved."""
        self._exports.saved(reports)

    def finish(self, done: int, stop: Callable[[], bool]) -> bool:
        """Wait for all exports of a finished run, unless a request to stop comes first. A collective."""
        return self._exports.finish(done, stop, self.trainer.mesh.device, self.trainer.progress)

    def close(self) -> None:
        """End the export that is being written."""
        self._exports.end()
