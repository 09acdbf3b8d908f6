"""Scores, their standard errors, and whether two models differ, from what each document contributes.

A mean over n documents, x = sum x_i / n, and a quotient of two sums over them, r = sum a_i / sum b_i (nats over bytes),
passed through a function f, are both estimates whose error is, to first order, a mean of one number per document, its
influence:

    mean       u_i = x_i - x
    quotient   u_i = f'(r) (a_i - r b_i) / (sum b / n)          f: to bits, or to a perplexity (the delta method)

    standard error = sqrt( sum u_i^2 / (n (n - 1)) )

For the mean this is the usual one, which lm-eval also gives; for bits per byte and perplexities lm-eval gives none.
Two models that answer the same documents are compared document by document: the error of the difference is

    standard error of B - A = sqrt( sum (u_i^B - u_i^A)^2 / (n (n - 1)) )

What makes a document hard for both models cancels, so it is often much smaller than sqrt(se_A^2 + se_B^2), which is
taken where documents cannot be paired. All of this takes documents as independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = tuple[int, str]
"""A document's number in its task, and the hash of it and of how it was asked."""


@dataclass(frozen=True)
class Score:
    """stderr: None if there is none. influences: of each document, None if the score is no mean and no quotient."""

    value: float
    stderr: float | None
    influences: Mapping[Document, float] | None = None


@dataclass(frozen=True)
class Difference:
    """Of a score to the first model's. stderr: None if there is none; paired: from documents that both answered."""

    value: float
    stderr: float | None
    paired: bool

    @property
    def exceeds(self) -> bool | None:
        """Whether it is larger than its standard error; None without one."""
        return None if self.stderr is None else abs(self.value) > self.stderr


def score(value: float, stderr: float | None, documents: Mapping[Document, Any]) -> Score:
    """A score from its documents.

    value: what lm-eval made of them; stderr: lm-eval's, taken where there is no other. documents: a number each, or
    (log-likelihood, length) each. Which statistic it is shows in that it comes out again; if none does, the score
    stands alone.
    """
    found = _influences(value, list(documents.values()))
    if found is None:
        return Score(value, stderr)
    return Score(value, standard_error(found), dict(zip(documents, found, strict=True)))


def difference(first: Score, other: Score) -> Difference:
    """`other` less `first`."""
    value = other.value - first.value
    a, b = first.influences, other.influences
    if a is not None and b is not None and a.keys() == b.keys():
        return Difference(value, standard_error([b[document] - a[document] for document in a]), True)
    if first.stderr is None or other.stderr is None:
        return Difference(value, None, False)
    return Difference(value, math.hypot(first.stderr, other.stderr), False)


def standard_error(influences: Sequence[float]) -> float | None:
    """Of what has these influences; None for a single document."""
    n = len(influences)
    return math.sqrt(sum(u * u for u in influences) / (n * (n - 1))) if n > 1 else None


def _influences(value: float, documents: Sequence[Any]) -> list[float] | None:
    if documents and all(isinstance(x, (int, float)) for x in documents):
        mean = math.fsum(documents) / len(documents)
        if _equal(mean, value):
            return [x - mean for x in documents]
        documents = [(x, 1) for x in documents]  # a perplexity of single log-likelihoods
    if documents and all(isinstance(x, (tuple, list)) and len(x) == 2 for x in documents):
        total, length = (math.fsum(x[part] for x in documents) for part in (0, 1))
        if length <= 0:
            return None
        nats = -total / length
        # f and f' of the two statistics that lm-eval makes of such pairs.
        for result, slope in ((nats / math.log(2), 1 / math.log(2)), (_exp(nats), _exp(nats))):
            if _equal(result, value):
                return [slope * (-a - nats * b) / (length / len(documents)) for a, b in documents]
    return None


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _equal(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
