import random

import numpy as np
import pytest

from data.blend import Blend, _Walk


def some_weights(seed: int, count: int) -> dict[str, float]:
    """Random weights: of very different sizes, of few digits, or token counts."""
    draw = random.Random(seed)
    kinds = [
        lambda: draw.random() ** 6 + 1e-12,
        lambda: round(draw.random(), 4) + 0.0015,
        lambda: draw.randint(1, 10**12),
    ]
    kind = draw.choice(kinds)
    return {f"s{i}": kind() for i in range(count)}


def check_prefixes(blend: Blend, start: int, end: int) -> None:
    """In every prefix each source is within one sample of its weight, and its ordinals count up by one."""
    counts = blend.counts(start)
    for i in range(start, end):
        name, ordinal = blend.source(i)
        d = blend.names.index(name)
        assert ordinal == counts[d]
        counts[d] += 1
        for share, count in zip(blend.shares, counts, strict=True):
            assert abs(count * blend.period - share * (i + 1)) < blend.period  # in integers, so exactly
    assert blend.counts(end) == counts


def test_a_small_blend_by_hand() -> None:
    """If two sources are equally due, the first named one comes first."""
    blend = Blend({"a": 0.5, "b": 0.3, "c": 0.2})
    assert (blend.shares, blend.period) == ([5, 3, 2], 10)
    assert "".join(blend.source(i)[0] for i in range(20)) == "abacababacabacababac"
    assert [Blend({"b": 1, "a": 1}).source(i)[0] for i in range(4)] == ["b", "a", "b", "a"]


@pytest.mark.parametrize("seed", [0, 5, 10])
def test_every_prefix_is_within_one_sample_of_the_weights(seed: int) -> None:
    """If many sources are due at once, Megatron's rule, the largest lag, is off by more than one sample."""
    blend = Blend(some_weights(seed, count=1 + seed * 5))
    check_prefixes(blend, 0, 400)
    check_prefixes(blend, 9_000, 9_100)
    check_prefixes(Blend({"x": 0.3, "y": 0.3, **{f"s{i}": 0.01 for i in range(40)}}), 0, 300)


def test_the_order_of_calls_does_not_matter() -> None:
    for weights in ({"a": 1, "b": 2, "c": 4}, some_weights(0, 7)):
        expected = [Blend(weights).source(i) for i in range(300)]
        blend, order = Blend(weights), list(range(300))
        random.Random(1).shuffle(order)
        assert all(blend.source(i) == expected[i] for i in order)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_counts_inside_a_period_are_those_of_a_walk_from_its_start(seed: int) -> None:
    """Counts begin their walk shortly before the slot, not at the start of the period."""
    rng = np.random.default_rng(seed)
    weights = {str(d): int(rng.integers(1, rng.choice([9, 200]))) for d in range(2 + 2 * seed)}
    blend = Blend(weights)
    walk = _Walk(blend.shares, 0, [0] * len(weights))
    for slot in range(blend.period):
        if slot % 7 == 0:
            assert Blend(weights).counts(slot) == walk.counts, slot
        walk.advance()


def test_counts_at_ten_trillion_tokens_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, steps = np.random.default_rng(0), 0
    blend = Blend({str(d): round(float(share), 13) for d, share in enumerate(rng.uniform(0.001, 1, 61))})
    advance = _Walk.advance

    def counted(walk: _Walk) -> None:
        nonlocal steps
        steps += 1
        advance(walk)

    monkeypatch.setattr(_Walk, "advance", counted)
    assert sum(blend.counts(10**13 // 8192)) == 10**13 // 8192 and steps < 100_000
