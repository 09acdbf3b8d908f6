"""Standard errors from influences, against the definition, the jackknife, and many draws."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from inference.evaluation import Difference, Score, difference, score


def documents(values: list) -> dict:
    return {(number, f"hash {number}"): value for number, value in enumerate(values)}


STATISTICS = {
    "bits": lambda pairs: -sum(a for a, _ in pairs) / sum(b for _, b in pairs) / math.log(2),
    "perplexity": lambda pairs: math.exp(-sum(a for a, _ in pairs) / sum(b for _, b in pairs)),
}


def pairs_of(count: int, seed: int, harder: float = 0.0) -> list[tuple[float, int]]:
    draws = random.Random(seed)
    lengths = [draws.randrange(20, 200) for _ in range(count)]
    return [(-length * (draws.gauss(1.5, 0.3) + harder), length) for length in lengths]


@pytest.mark.parametrize("name", STATISTICS)
def test_a_quotient_has_the_error_of_the_jackknife(name: str) -> None:
    pairs, statistic = pairs_of(200, 1), STATISTICS[name]
    found = score(statistic(pairs), None, documents(pairs))
    left_out = [statistic(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))]
    mean = statistics.fmean(left_out)
    jackknife = math.sqrt((len(pairs) - 1) / len(pairs) * sum((x - mean) ** 2 for x in left_out))
    assert found.stderr == pytest.approx(jackknife, rel=0.02)


def test_what_makes_documents_hard_for_both_cancels() -> None:
    """The paired error is that of the difference over fresh sets of documents; the unpaired one is many times it."""

    def models(seed: int) -> tuple[list, list]:
        first = pairs_of(80, seed)
        draws = random.Random(seed + 10**6)
        return first, [(a - b * draws.gauss(0.02, 0.02), b) for a, b in first]

    def apart(first: list, other: list) -> Difference:
        bits = STATISTICS["bits"]
        found = difference(score(bits(first), None, documents(first)), score(bits(other), None, documents(other)))
        assert found is not None and found.paired
        return found

    found = [apart(*models(seed)) for seed in range(300)]
    spread = statistics.stdev(each.value for each in found)
    assert statistics.fmean(each.margin or 0 for each in found) == pytest.approx(1.99 * spread, rel=0.15)
    first, other = models(0)
    alone = difference(
        Score(0.0, score(STATISTICS["bits"](first), None, documents(first)).stderr),
        Score(0.1, score(STATISTICS["bits"](other), None, documents(other)).stderr),
    )
    assert alone is not None and not alone.paired and alone.margin is not None and alone.margin > 8 * spread


def test_what_is_no_mean_and_no_quotient_stands_alone() -> None:
    """Such as an F1: what lm-eval says of its error is taken, and documents are not paired."""
    found = score(0.75, 0.1, documents([(1, 1), (0, 1), (1, 0)]))
    assert (found.value, found.stderr, found.influences) == (0.75, 0.1, None)
    assert score(0.5, None, documents([0.25, 0.25])).influences is None
    other = difference(found, Score(0.5, 0.2))
    assert other is not None and (other.value, other.paired) == (-0.25, False)
    assert other.margin == pytest.approx(1.96 * math.hypot(0.1, 0.2), rel=1e-3)
    assert difference(found, Score(0.5, None)).margin is None
    a, b = score(0.5, None, documents([0.0, 1.0])), score(1.0, None, {(0, "other"): 1.0, (1, "hash 1"): 1.0})
    assert not difference(a, b).paired and difference(a, a).paired
