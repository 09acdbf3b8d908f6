"""Held-out windows, the same at every evaluation and data-parallel size, and two references for their losses.

`unigram_entropy`: the mean loss, in nats per token, of a model that ignores all context but knows the exact frequencies
of the evaluated targets. A model with a lower validation loss has learned from context.

`bits_per_byte`: the loss in bits, divided by the bytes of text that the targets stand for. It compares models with
different tokenizers. The end-of-document token has a loss but no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from data.indexed import TokenSource, check_ids, document_numbers
from data.loader import MicroBatch
from data.order import num_windows

# Windows in which `target_counts` counts at a time.
_BLOCK = 64


class ValidationSet:
    """num_samples windows of seq_length targets each, spread evenly over a held-out source; no target occurs twice.

    num_samples: None for all windows. A source with fewer windows serves all that it has; `.num_samples` is then
    smaller. masked, boundary_loss: as in the loader. Raises ValueError for a source shorter than one window.
    """

    def __init__(
        self,
        name: str,
        stream: TokenSource,
        seq_length: int,
        num_samples: int | None,
        vocab_size: int,
        masked: bool = False,
        boundary_loss: bool = True,
    ) -> None:
        self._available = num_windows(stream.num_tokens, seq_length)
        if self._available == 0:
            raise ValueError(
                f"validation source {name!r} ({stream}) has {stream.num_tokens} tokens, fewer than "
                f"one window of train.sequence_length + 1 = {seq_length + 1}; lower train.sequence_length, or hold out "
                "more text"
            )
        self.name, self.stream, self.seq_length, self.vocab_size = name, stream, seq_length, vocab_size
        self.num_samples = min(num_samples or self._available, self._available)
        self.masked, self.boundary_loss = masked, boundary_loss

    def window(self, sample: int) -> int:
        return sample * self._available // self.num_samples

    def batch(self, index: int, start: int, end: int) -> MicroBatch:
        """The samples [start, end), or those of them that exist, as micro-batch `index`."""
        length = self.seq_length
        starts = [self.window(sample) * length for sample in range(start, min(end, self.num_samples))]
        rows = np.stack([self.stream.tokens(first, length + 1) for first in starts]).astype(np.int64)
        check_ids(f"validation source {self.name!r}", self.stream, rows, self.vocab_size)
        numbers = None
        if self.masked:
            numbers = torch.from_numpy(np.stack([document_numbers(self.stream, at, length + 1) for at in starts]))
        return MicroBatch.of(index, torch.from_numpy(rows), numbers, self.boundary_loss)

    def batches(self, micro_batch_size: int, rank: int, num_ranks: int) -> HeldOutBatches:
        """This rank's share: the micro-batches rank, rank + num_ranks, ... of the windows in order. The last
        micro-batch may have fewer windows. A rank may have one micro-batch fewer than others, perhaps none."""
        return HeldOutBatches(self, micro_batch_size, range(rank, -(-self.num_samples // micro_batch_size), num_ranks))

    def target_counts(self, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """How often each token is a target with a loss, in this rank's share of the windows: int64 [vocab_size].
        Raises ValueError for a token id outside the model's vocabulary."""
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for batch in self.batches(_BLOCK, rank, num_ranks):
            counts += torch.bincount(batch.targets[batch.targets >= 0], minlength=self.vocab_size)
        return counts

    def statistics(self, counts: torch.Tensor, byte_lengths: np.ndarray | None) -> TargetStatistics:
        """counts: int64 [vocab_size], how often each token is a target, over all windows. byte_lengths: bytes of each
        of the tokenizer's tokens; None: unknown. Raises ValueError if no target has a loss."""
        targets = int(counts.sum())
        if targets == 0:
            raise ValueError(f"validation source {self.name!r} has no targets with a loss; give it data")
        text_bytes = None
        if byte_lengths is not None:
            text_bytes = float(counts[: len(byte_lengths)] @ torch.from_numpy(byte_lengths)) or None
        shares = counts.to(torch.float64) / targets
        return TargetStatistics(targets, float(torch.special.entr(shares).sum()), text_bytes)


@dataclass(frozen=True)
class HeldOutBatches:
    """The micro-batches `indices` of a set, read while they are iterated over. The first one is the largest."""

    held_out: ValidationSet
    micro_batch_size: int
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in self.indices:
            yield self.held_out.batch(index, index * self.micro_batch_size, (index + 1) * self.micro_batch_size)


@dataclass(frozen=True)
class TargetStatistics:
    """The targets of one set. targets: how many have a loss. unigram_entropy: nats per token. text_bytes: bytes of the
    text that they stand for; None if unknown."""

    targets: int
    unigram_entropy: float
    text_bytes: float | None

    def bits_per_byte(self, loss: float) -> float | None:
        """A mean loss in nats per target, in bits per byte of text; None if the bytes are unknown."""
        return None if self.text_bytes is None else loss * self.targets / (math.log(2) * self.text_bytes)
