"""Where a run stands, as far as numerics depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunClock:
    """The one mutable object that all linears of a model share; the training step advances it.

    seed: the run's seed. step: the optimizer step being computed, from 0. micro_batch: the *global* micro-batch index
    within the step's batch (the same whichever rank computes it). weights_version: changes whenever weights do;
    quantized weights are kept while it stands still.
    """

    seed: int
    step: int = 0
    micro_batch: int = 0
    weights_version: int = 0
