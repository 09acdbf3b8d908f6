"""Which token comes next: the likeliest, or one drawn.

What is drawn for a text is a function of its prompt, the seed, the sample's number and the token's place alone. So a
text does not change with the batch it is in, the machine or the number of ranks, as far as the logits do not.

Shapes: b rows, v ids.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = -1
"""The token where logits are not finite."""


@dataclass(frozen=True)
class Sampling:
    """temperature: logits are divided by it; 0 takes the likeliest token, of equally likely ones the first.
    top_p: draws are among the likeliest tokens that together have at least this probability. seed: of the draws.

    Raises ValueError for values out of their range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is not a number from 0 on; 0 takes the likeliest token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is not above 0 and at most 1; 1 draws among all tokens")


GREEDY = Sampling()


class Draws:
    """The draws of one text."""

    def __init__(self, seed: int, sample: int, prompt: Sequence[int]) -> None:
        self._key = hashlib.sha256(json.dumps([seed, sample, list(prompt)]).encode())

    def __call__(self, place: int) -> float:
        """Of the token at `place` behind the prompt: uniform in [0, 1), 53 bits."""
        digest = self._key.copy()
        digest.update(place.to_bytes(8, "little"))
        return (int.from_bytes(digest.digest()[:8], "little") >> 11) * 2.0**-53


def choose(logits_bv: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """The next token of each row, NOT_FINITE where its logits are not.

    draws: one a row, in [0, 1); with temperature 0 they are not looked at.
    """
    largest, likeliest = logits_bv.max(-1)
    tokens = likeliest.where(largest.isfinite(), NOT_FINITE).tolist()
    if sampling.temperature == 0:
        return tokens
    # On the CPU: there sums do not depend on the machine, and in FP64 not noticeably on their order.
    logits = logits_bv.detach().to("cpu", torch.float64)
    return [
        token if token == NOT_FINITE else _drawn(row, sampling, draw)
        for token, row, draw in zip(tokens, logits, draws, strict=True)
    ]


def _drawn(logits_v: Tensor, sampling: Sampling, draw: float) -> int:
    # The largest first, so that a small temperature does not make infinities.
    probabilities = ((logits_v - logits_v.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p == 1:
        return _place_of(draw, probabilities)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    # Those before which less than top_p lies: the first always.
    kept = int((ordered.cumsum(-1) - ordered < sampling.top_p).sum())
    return int(ids[_place_of(draw, ordered[: max(kept, 1)])])


def _place_of(draw: float, weights: Tensor) -> int:
    """Where a draw falls among weights laid end to end and stretched to 1; never on a weight of zero."""
    ends = weights.cumsum(-1)
    # A draw is at most 1 - 2^-53, so that the product is less than the last end in FP64 too.
    return int(torch.searchsorted(ends, draw * ends[-1], right=True))
