"""Held-out windows, the same at every evaluation and at every data-parallel size, and what a loss is measured
by.

`unigram_entropy` is the yardstick: the mean loss, in nats per token, of a model that ignores all context but
knows the exact frequencies of the very target tokens it is tested on. No fixed distribution over tokens can
do better on those tokens, so a model whose validation loss is lower has learnt from context. It is computed
per source, from the targets of that source's windows, and pooled, from the targets of all windows together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from data.bundle import TokenSource
from data.documents import document_numbers
from data.loader import MicroBatch
from data.samples import num_windows


class ValidationSet:
    """num_samples windows of seq_length targets each, spread evenly over a held-out source; no target twice.

    A source with fewer windows gives all it has: read `.num_samples`. masked, boundary_loss: as of the loader.
    Raises ValueError for a non-positive argument, a source shorter than one window, or a token id outside the model's
    vocabulary.
    """

    def __init__(
        self,
        name: str,
        stream: TokenSource,
        seq_length: int,
        num_samples: int,
        vocab_size: int,
        masked: bool = False,
        boundary_loss: bool = True,
    ) -> None:
        if seq_length < 1 or num_samples < 1:
            raise ValueError(
                f"validation needs windows, got {num_samples} of length {seq_length}; both must be positive"
            )
        available = num_windows(stream.num_tokens, seq_length)
        if available == 0:
            raise ValueError(
                f"validation source {name!r} ({stream}) has {stream.num_tokens} tokens, fewer than "
                f"one window of seq_length + 1 = {seq_length + 1}; shorten the sequence or hold out more text"
            )
        self.name = name
        self.num_samples = min(num_samples, available)
        self.windows = [i * available // self.num_samples for i in range(self.num_samples)]
        rows = [stream.tokens(window * seq_length, seq_length + 1) for window in self.windows]
        # Read once: every evaluation uses all of it, and it is small beside a model.
        self._samples = torch.from_numpy(np.stack(rows).astype(np.int64))
        low, high = int(self._samples.min()), int(self._samples.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"validation source {name!r} ({stream}) holds token ids {low} to {high}, outside the "
                f"model's vocabulary of {vocab_size}; raise model.vocab_size or prepare the data again"
            )
        self.vocab_size = vocab_size
        self.boundary_loss = boundary_loss
        self._documents: torch.Tensor | None = None
        if masked:
            numbers = [document_numbers(stream, window * seq_length, seq_length + 1) for window in self.windows]
            self._documents = torch.from_numpy(np.stack(numbers))

    def batches(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        """This rank's share: micro-batches dp_rank, dp_rank + dp_size, ... of the windows in order.

        Over all ranks each window comes exactly once. The last micro-batch may have fewer windows, and a rank one
        micro-batch fewer than others, or none.
        """
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(f"cannot split into micro-batches of {micro_batch_size} for rank {dp_rank} of {dp_size}")
        for index, samples in enumerate(self._samples.split(micro_batch_size)):
            if index % dp_size == dp_rank:
                rows = slice(index * micro_batch_size, index * micro_batch_size + len(samples))
                documents = None if self._documents is None else self._documents[rows]
                yield MicroBatch.of(index, samples, documents, self.boundary_loss)

    def target_counts(self) -> torch.Tensor:
        """How often each token is a target that counts, int64 [vocab_size]; the sum over several sets pools them."""
        [whole] = self.batches(self.num_samples, 0, 1)
        return torch.bincount(whole.targets[whole.targets >= 0], minlength=self.vocab_size)


def unigram_entropy(token_counts: torch.Tensor) -> float:
    """Entropy in nats per token of the distribution that the counts [vocab_size] describe: -sum p ln p.

    Raises ValueError when nothing was counted.
    """
    counts = token_counts.to(torch.float64)
    total = counts.sum()
    if total <= 0:
        raise ValueError("no tokens were counted, so they have no entropy; evaluate at least one window")
    return float(torch.special.entr(counts / total).sum())
