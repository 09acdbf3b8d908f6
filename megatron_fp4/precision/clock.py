"""Where a run stands, as far as numerics depend on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fp4.precision.device_keys import DeviceKeys


@dataclass
class RunClock:
    """The one mutable object that all linears of a model share; the training step advances it.

    seed: the run's seed. step: the optimizer step being computed, from 0. micro_batch: the *global* micro-batch index
    within the step's batch (the same whichever rank computes it). weights_version: changes whenever weights do;
    quantized weights are kept while it stands still. keys: where draws take their keys from, filled for `step` and
    `micro_batch`; None: from these numbers themselves.
    """

    seed: int
    step: int = 0
    micro_batch: int = 0
    weights_version: int = 0
    keys: DeviceKeys | None = field(default=None, compare=False, repr=False)
