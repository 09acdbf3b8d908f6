"""Log-probabilities of given tokens by a causal model of transformers, in bounded memory.

Rows are scored longest first, so that those of a batch are about equally long and a batch that is too large fails at
once. A batch is padded at the right, unmasked and without a cache: in a causal model, attention or Mamba, no position
sees what comes behind it. The head multiplies only the positions that are asked for, some at a time, so logits take
some hundred MB however long the rows are and however large the vocabulary; their softmax is in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH_TOKENS = 8192
# FP32 elements of logits at a time: 256 MB.
_LOGITS = 1 << 26

Progress = Callable[[int, int], None]
"""Is told how many of how many pieces of work are done."""


@dataclass(frozen=True)
class Row:
    """tokens: what the model reads, at least one. The logits at positions[i] are to predict targets[i]; both [n]."""

    tokens: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class Scored:
    """Of a row's n targets, on the CPU: log_probs, FP64 nats; greedy: whether each is the most probable token."""

    log_probs: Tensor
    greedy: Tensor


def batches(lengths: Sequence[int], batch_tokens: int, batch_rows: int | None = None) -> Iterator[list[int]]:
    """The numbers of all rows in batches of neighbouring lengths, longest first.

    A batch has as many rows as have batch_tokens tokens when padded, at least one; or batch_rows, if given.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while order:
        count = batch_rows or max(1, batch_tokens // max(lengths[order[0]], 1))
        yield order[:count]
        order = order[count:]


class Scorer:
    """Scores rows with one model. batch_rows: rows of a batch; None: as many as have BATCH_TOKENS padded tokens."""

    def __init__(self, model: Any, batch_rows: int | None = None) -> None:
        self._model, self._batch_rows = model, batch_rows
        self._plain_head: bool | None = None

    @torch.no_grad()
    def score(self, rows: Sequence[Row], progress: Progress | None = None) -> list[Scored]:
        """Of each row, in order."""
        found: dict[int, Scored] = {}
        for batch in batches([len(row.tokens) for row in rows], BATCH_TOKENS, self._batch_rows):
            scored = self._score_batch([rows[number] for number in batch])
            found.update(zip(batch, scored, strict=True))
            if progress is not None:
                progress(len(found), len(rows))
        return [found[number] for number in range(len(rows))]

    def _score_batch(self, rows: Sequence[Row]) -> list[Scored]:
        device = self._model.device
        tokens = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.int64)
        for row, line in zip(rows, tokens, strict=True):
            line[: len(row.tokens)] = torch.tensor(row.tokens)
        which = torch.tensor([number for number, row in enumerate(rows) for _ in row.positions], device=device)
        where = torch.tensor([position for row in rows for position in row.positions], device=device)
        targets = torch.tensor([target for row in rows for target in row.targets], device=device)
        states, head = self._states(tokens.to(device))
        log_probs = torch.empty(len(targets), dtype=torch.float64)
        greedy = torch.empty(len(targets), dtype=torch.bool)
        size = max(1, _LOGITS // self._model.config.vocab_size)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = head(states[which[part], where[part]]).float()
            picked = logits.gather(-1, targets[part, None]).squeeze(-1)
            log_probs[part] = (picked - logits.logsumexp(-1)).double().cpu()
            greedy[part] = (logits.argmax(-1) == targets[part]).cpu()
        ends = [len(row.targets) for row in rows]
        return [Scored(*pair) for pair in zip(log_probs.split(ends), greedy.split(ends), strict=True)]

    def _states(self, tokens: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the head reads, [rows, length, hidden], and the head; or logits, and what leaves them as they are, of a
        model that does more than its head to them."""
        if self._plain_head is None:
            self._plain_head = self._has_plain_head(tokens[:1, :8])
        if self._plain_head:
            return self._model.get_decoder()(tokens, use_cache=False)[0], self._model.get_output_embeddings()
        return self._model(tokens, use_cache=False).logits, lambda logits: logits

    def _has_plain_head(self, tokens: Tensor) -> bool:
        """Whether the model's logits are what its head makes of its decoder's output (some cap or scale them)."""
        head = self._model.get_output_embeddings()
        if head is None:
            return False
        ours = head(self._model.get_decoder()(tokens, use_cache=False)[0]).float()
        theirs = self._model(tokens, use_cache=False).logits.float()
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
