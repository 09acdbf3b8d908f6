"""The loss of each depth of multi-token prediction, every `logging.interval` steps: the mean over its targets that
count, in nats. Depth k predicts the token k + 1 places ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.training.trainer import Callback, Step, is_due


class FurtherLosses(Callback):
    """Adds up the losses of the step alone: not those of a replay, a measurement or a validation."""

    _sums: Tensor | None = None  # at the same address in all steps, for CUDA graphs

    @contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        model, trainer = self.trainer.model, self.trainer
        if model.mtp and self._sums is None:
            depths = len(trainer.config.model.mtp_patterns)
            self._sums = torch.empty(depths, 2, dtype=torch.float64, device=trainer.mesh.device)
        model.mtp_losses = None if self._sums is None else self._sums.zero_()
        yield
        model.mtp_losses = None

    def after_step(self, step: Step) -> None:
        interval = self.trainer.config.logging.interval
        if self._sums is None or step.result.skipped or not is_due(interval, step.done):
            return
        dist.all_reduce(self._sums, group=self.trainer.mesh.batch.group)
        sums = enumerate(self._sums.tolist(), start=1)
        losses = {f"{depth}": round(loss / count, 6) for depth, (loss, count) in sums if count}
        curves = {f"mtp/loss/{depth}": loss for depth, loss in losses.items()}
        self.trainer.log.metrics.record(step.done, "mtp", {"depths": losses}, curves)
