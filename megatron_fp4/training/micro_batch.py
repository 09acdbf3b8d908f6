"""What a step needs of its micro-batches, and what each is a part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class MicroBatch(Protocol):
    """What a step needs of a micro-batch. index: within the global batch, the same whichever rank computes it."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> Tensor: ...  # int64 [micro_batch_size, sequence_length]

    @property
    def targets(self) -> Tensor: ...  # int64, the same shape

    @property
    def documents(self) -> Tensor | None: ...  # int32, the same shape: numbers of documents, if they are masked

    @property
    def num_documents(self) -> int | None: ...  # of all rows together, if they are masked

    @property
    def num_targets(self) -> int | None: ...  # how many targets count, where negative ones do not; None: all do


@dataclass(frozen=True)
class GlobalBatch:
    """What a micro-batch is a part of. num_targets: how many targets of the global batch count, int64 0-dim on the
    device; None: all do."""

    num_micro_batches: int
    num_targets: Tensor | None = None

    def weight(self, micro_batch: MicroBatch) -> Tensor:
        """The share of the targets that count, FP64 0-dim; only where not all do. 0 if there are none at all."""
        assert self.num_targets is not None and micro_batch.num_targets is not None
        return micro_batch.num_targets / self.num_targets.clamp(min=1).to(torch.float64)


ALONE = GlobalBatch(1)
"""For a micro-batch of which only its own mean is wanted."""
