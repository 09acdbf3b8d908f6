"""Which token comes next, against definitions written out and frequencies of many draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from inference.generation import NOT_FINITE, Sampling, TokenDraws, choose

LOGITS = [0.3, -1.0, 2.0, 2.0, 0.0, -5.0, 1.2, 2.5]


def probabilities(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """By the definition: the likeliest first, of equally likely ones the first, until they have top_p together."""
    weights = [math.exp(value / temperature) for value in logits]
    shares = [weight / sum(weights) for weight in weights]
    kept, together = [], 0.0
    for token in sorted(range(len(shares)), key=lambda token: (-shares[token], token)):
        if together >= top_p:
            break
        kept.append(token)
        together += shares[token]
    return [share / together if token in kept else 0.0 for token, share in enumerate(shares)]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.3, 0.9), (2.5, 1.0), (1.0, 1e-9)])
def test_frequencies_are_the_probabilities(temperature: float, top_p: float) -> None:
    """Pearson's statistic over 1,500 draws; and tokens outside of top-p never come."""
    expected = probabilities(LOGITS, temperature, top_p)
    sampling = Sampling(temperature, top_p, seed=1)
    draws = TokenDraws(sampling.seed, 0, [1, 2, 3])
    found = Counter(choose(torch.tensor([LOGITS]), sampling, [draws(place)])[0] for place in range(1500))
    assert all(expected[token] > 0 for token in found)
    possible = [(found[token], 1500 * share) for token, share in enumerate(expected) if share > 0]
    statistic = sum((seen - want) ** 2 / want for seen, want in possible)
    degrees = len(possible) - 1
    assert statistic <= chi2.isf(1e-5, degrees) if degrees else statistic == 0


def test_zero_takes_the_likeliest_and_small_temperatures_come_to_the_same() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    assert choose(logits, Sampling(), [0.9, 0.9]) == [7, 0]
    assert choose(logits, Sampling(1e-300), [0.9, 0.9]) == [7, 0]
    assert choose(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(), [0.0]) == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9)])
def test_numbers_that_are_not_finite_are_told(sampling: Sampling) -> None:
    rows = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [-math.inf, 0.0]])
    assert choose(rows, sampling, [0.5] * 4) == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]


def test_draws_are_of_the_prompt_the_seed_the_sample_and_the_place() -> None:
    kinds = [(seed, sample, prompt) for seed in (0, 1) for sample in (0, 1) for prompt in ([1, 2], [12])]
    drawn = {TokenDraws(*kind)(place) for kind in kinds for place in range(20)}
    assert len(drawn) == len(kinds) * 20 and all(0 <= draw < 1 for draw in drawn)
    assert TokenDraws(0, 1, [12])(3) == TokenDraws(0, 1, (12,))(3)
    mean = sum(TokenDraws(0, 0, [1])(place) for place in range(2000)) / 2000
    assert abs(mean - 0.5) < 5 / math.sqrt(12 * 2000)
