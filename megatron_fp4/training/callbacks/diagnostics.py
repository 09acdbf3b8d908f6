"""What quantization does to operands and products, every `precision.diagnostics.interval` steps
(measure/diagnostics.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron_fp4.measure.diagnostics import Diagnostics, diagnostics_scalars
from megatron_fp4.training.trainer import Callback, Step


class QuantizationDiagnostics(Callback):
    """Probes the linears of a due step; gradient noise and replays, which are outside of it, are not probed."""

    def start(self, done: int) -> None:
        """Nothing is measured yet."""
        interval = self.trainer.config.precision.diagnostics.interval
        self._diagnostics = Diagnostics(interval, self.trainer.precision.linears)

    def around_step(self, step: Step) -> AbstractContextManager[object]:
        """With a probe at each linear if the step is due."""
        return self._diagnostics.measuring(step.index)

    def after_step(self, step: Step) -> None:
        """Record what was measured."""
        if (record := self._diagnostics.collect()) is not None:
            self.trainer.log.metrics.record(step.done, "diagnostics", record, diagnostics_scalars(record))
