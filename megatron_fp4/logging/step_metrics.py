"""What is measured of a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One training step.

    step: steps done, this one included. tokens: seen since the run began. loss: mean NLL in nats per token over the
    global batch. lr: what the update used. grad_norm: before clipping. tokens_per_second: over all ranks.
    model_tflops: model TFLOP/s per device. step_time: seconds, with the wait for data. skipped: no update, because
    something was not finite or the step was a spike.
    phase: name of the data phase. plan: name of the precision plan in effect. epochs: how often the run has been
    through each source so far; empty in most steps.
    data_wait: seconds for which the first rank waited for its micro-batches.
    mfu: model_tflops over what the device could do in BF16; None where that is not known. peak_memory_gib: of the first
    rank since it began (measure/machine.py); None in most steps.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    model_tflops: float
    step_time: float
    skipped: bool
    phase: str
    plan: str
    data_wait: float = 0.0
    epochs: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    peak_memory_gib: float | None = None

    @property
    def spike(self) -> bool:
        """Whether it was skipped although everything was finite."""
        return self.skipped and math.isfinite(self.loss) and math.isfinite(self.grad_norm)
