"""Autotuned kernels use the same configurations on all ranks, after a resume, and in the next run (autotuning.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_fp4.training.autotuning import KernelChoices, rehearsal
from megatron_fp4.training.trainer import Callback


class Kernels(Callback):
    """Pins what autotuned kernels use, before the first of them runs. folder: of this machine, for what earlier runs
    chose. write: also write it into run.dir."""

    name = "autotuning"

    def __init__(self, folder: Path, write: bool = True) -> None:
        self._choices, self._folder, self._write = KernelChoices(), folder, write

    def start(self, done: int) -> None:
        """Tune what is not known yet, on the first rank."""
        trainer = self.trainer
        trainer.progress.at(0, "tune and test kernels")
        if not (mixers := trainer.model.autotuned_mixers()):
            return
        whole = trainer.config.train.sequence_length
        lengths = (span.sequence_length or whole for span in trainer.data.phases.spans)
        rehearse = rehearsal(mixers, trainer.config, lengths, trainer.mesh.device)
        for line in self._choices.pin(rehearse, self._folder, resumed=done > 0):
            trainer.log.console.text(line)
        self.on_checkpoint(done)

    def on_checkpoint(self, done: int) -> None:
        """Replace run.dir/autotuning.json."""
        if self._write and self.trainer.mesh.rank == 0:
            self._choices.write(Path(self.trainer.config.run.dir))

    def state_dict(self) -> Any:
        """The choices."""
        return self._choices.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Those of a checkpoint, for `start`."""
        self._choices.load_state_dict(state)
