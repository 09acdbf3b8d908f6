"""Held-out windows, the same at every evaluation and at every data-parallel size, and what a loss is measured
by.

A set is read again at every evaluation, a micro-batch at a time, so that one of any size takes no memory. Tokens behind
the last whole window are left out: fewer than seq_length of them.

Two yardsticks, both of the very targets that are evaluated:

`unigram_entropy`: the mean loss, in nats per token, of a model that ignores all context but knows the exact frequencies
of these targets. No fixed distribution over tokens can do better on those tokens, so a model whose validation loss is
lower has learnt from context.

`bits_per_byte`: the loss for each byte of the text that the targets stand for. Losses per token of two tokenizers mean
different things, these do not. A document's end has a loss and no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.loader import MicroBatch
from data.order import num_windows
from data.token_source import TokenSource, check_ids, document_numbers

# Windows that are counted at a time.
_BLOCK = 64


class HeldOutBatches:
    """One rank's micro-batches of a ValidationSet, read as they are iterated over; the first is as large as any."""

    def __init__(self, held_out: ValidationSet, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        self._held_out, self._size = held_out, micro_batch_size
        self._indices = range(dp_rank, -(-held_out.num_samples // micro_batch_size), dp_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in self._indices:
            yield self._held_out.batch(index, index * self._size, (index + 1) * self._size)


class ValidationSet:
    """num_samples windows of seq_length targets each, spread evenly over a held-out source; no target twice.

    num_samples: None for all windows. A source with fewer windows gives all it has: read `.num_samples`. masked,
    boundary_loss: as of the loader. Raises ValueError for a non-positive argument or a source shorter than one window.
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
        if seq_length < 1 or (num_samples is not None and num_samples < 1):
            raise ValueError(
                f"validation needs windows, got {num_samples} of length {seq_length}; both must be positive"
            )
        self._available = num_windows(stream.num_tokens, seq_length)
        if self._available == 0:
            raise ValueError(
                f"validation source {name!r} ({stream}) has {stream.num_tokens} tokens, fewer than "
                f"one window of seq_length + 1 = {seq_length + 1}; shorten the sequence or hold out more text"
            )
        self.name = name
        self.stream = stream
        self.seq_length = seq_length
        self.num_samples = self._available if num_samples is None else min(num_samples, self._available)
        self.vocab_size = vocab_size
        self.masked = masked
        self.boundary_loss = boundary_loss

    def window(self, sample: int) -> int:
        """Which window of the stream a sample is."""
        return sample * self._available // self.num_samples

    def batch(self, index: int, start: int, end: int) -> MicroBatch:
        """The samples [start, end), as far as there are any, as micro-batch `index`.

        Raises ValueError for a token id outside the model's vocabulary.
        """
        rows = self._rows(start, end)
        numbers = None
        if self.masked:
            found = [
                document_numbers(self.stream, self.window(start + row) * self.seq_length, self.seq_length + 1)
                for row in range(len(rows))
            ]
            numbers = torch.from_numpy(np.stack(found))
        return MicroBatch.of(index, rows, numbers, self.boundary_loss)

    def batches(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> HeldOutBatches:
        """This rank's share: micro-batches dp_rank, dp_rank + dp_size, ... of the windows in order.

        Over all ranks each window comes exactly once. The last micro-batch may have fewer windows, and a rank one
        micro-batch fewer than others, or none.
        """
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(f"cannot split into micro-batches of {micro_batch_size} for rank {dp_rank} of {dp_size}")
        return HeldOutBatches(self, micro_batch_size, dp_rank, dp_size)

    def target_counts(self, dp_rank: int = 0, dp_size: int = 1) -> torch.Tensor:
        """How often each token is a target that counts, in this rank's share of the windows: int64 [vocab_size]. The
        sum over all ranks is of all windows.

        Raises ValueError for a token id outside the model's vocabulary.
        """
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for start in range(dp_rank * _BLOCK, self.num_samples, dp_size * _BLOCK):
            targets = self.batch(0, start, start + _BLOCK).targets
            counts += torch.bincount(targets[targets >= 0], minlength=self.vocab_size)
        return counts

    def _rows(self, start: int, end: int) -> torch.Tensor:
        """int64 [windows, seq_length + 1] of the samples [start, end)."""
        length = self.seq_length
        windows = map(self.window, range(start, min(end, self.num_samples)))
        found = [self.stream.tokens(window * length, length + 1) for window in windows]
        rows = np.stack(found).astype(np.int64)
        check_ids(f"validation source {self.name!r}", self.stream, rows, self.vocab_size)
        return torch.from_numpy(rows)


def fewer_windows(validation: Sequence[ValidationSet], num_samples: int | None) -> list[str]:
    """A line for each set with fewer windows than the `num_samples` that were asked for and another set has: means over
    sets weigh them alike, and the small one's noise is most of theirs."""
    most = max((held_out.num_samples for held_out in validation), default=0)
    return [
        f"validation {held_out.name}: {held_out.num_samples:,} window{'s' if held_out.num_samples > 1 else ''} of "
        f"{held_out.seq_length:,} tokens, fewer than validation.num_samples={num_samples:,}; its losses are noisier "
        "than the others', and weigh as much in a mean over sources"
        for held_out in validation
        if held_out.num_samples < most and num_samples is not None
    ]


@dataclass(frozen=True)
class Yardstick:
    """What the losses of one set are measured by.

    targets: those that count. unigram_entropy: nats per token. text_bytes: of the text that they stand for, exact where
    the tokenizer says it, else by the average of the source; None if nobody knows.
    """

    targets: int
    unigram_entropy: float
    text_bytes: float | None

    @classmethod
    def of(
        cls, counts: torch.Tensor, byte_lengths: np.ndarray | None, bytes_per_token: float | None = None
    ) -> Yardstick:
        """counts: int64 [vocab_size] of the targets. byte_lengths: of the tokenizer's tokens, [at most vocab_size].
        bytes_per_token: the average, where there are none."""
        targets = int(counts.sum())
        text_bytes = None if bytes_per_token is None else targets * bytes_per_token
        if byte_lengths is not None:
            text_bytes = float(counts[: len(byte_lengths)] @ torch.from_numpy(byte_lengths))
        return cls(targets, unigram_entropy(counts), text_bytes or None)

    def bits_per_byte(self, loss: float) -> float | None:
        """A mean loss in nats per target as bits for each byte of text."""
        return None if self.text_bytes is None else loss * self.targets / (math.log(2) * self.text_bytes)


def unigram_entropy(token_counts: torch.Tensor) -> float:
    """Entropy in nats per token of the distribution that the counts [vocab_size] describe: -sum p ln p.

    Raises ValueError when nothing was counted.
    """
    counts = token_counts.to(torch.float64)
    total = counts.sum()
    if total <= 0:
        raise ValueError("no tokens were counted, so they have no entropy; evaluate at least one window")
    return float(torch.special.entr(counts / total).sum())
