from __future__ import annotations

import itertools
import random

import pytest

from data.blend import TABLE_SLOTS, Blend, _Walk


def served(blend: Blend, start: int, end: int) -> list[str]:
    return [blend.source(i)[0] for i in range(start, end)]


def test_a_small_blend() -> None:
    blend = Blend({"a": 0.5, "b": 0.3, "c": 0.2})
    assert (blend.shares, blend.period) == ([5, 3, 2], 10)
    assert "".join(served(blend, 0, 20)) == "abacababacabacababac"


def some_weights(seed: int, count: int) -> dict[str, float]:
    """As people write them, of very different sizes, and token counts."""
    draw = random.Random(seed)
    kinds = [
        lambda: draw.random() ** 6 + 1e-12,
        lambda: round(draw.random(), 4) + 0.0015,
        lambda: draw.randint(1, 10**12),
    ]
    kind = draw.choice(kinds)
    return {f"s{i}": kind() for i in range(count)}


def check_prefixes(blend: Blend, start: int, end: int) -> None:
    """Every prefix of [start, end) is within one sample of the weights, and ordinals count."""
    counts = blend.counts(start)
    for i in range(start, end):
        name, ordinal = blend.source(i)
        d = blend.names.index(name)
        assert ordinal == counts[d]
        counts[d] += 1
        for share, count in zip(blend.shares, counts, strict=True):
            assert abs(count * blend.period - share * (i + 1)) < blend.period  # in integers, so exactly
    assert blend.counts(end) == counts


@pytest.mark.parametrize("seed", range(30))
def test_every_prefix_is_within_one_sample_of_the_weights(seed: int) -> None:
    blend = Blend(some_weights(seed, count=1 + seed * 2))
    check_prefixes(blend, 0, 400)
    if blend.period > TABLE_SLOTS:  # a table walks nothing
        check_prefixes(blend, 9_000, 9_100)


def test_a_blend_where_the_largest_lag_first_fails() -> None:
    """Two large sources beside many small ones that fall due together."""
    weights = {"x": 0.3, "y": 0.3, **{f"s{i}": 0.01 for i in range(40)}}
    check_prefixes(Blend(weights), 0, 300)
    most, counts = 0.0, dict.fromkeys(weights, 0)
    for i in range(300):
        lags = {name: weight * max(i, 1) - counts[name] for name, weight in weights.items()}
        counts[max(lags, key=lambda name: lags[name])] += 1
        most = max(most, *(abs(weight * (i + 1) - counts[name]) for name, weight in weights.items()))
    assert most > 1


def test_ten_thousand_sources() -> None:
    blend = Blend(some_weights(3, 10_000))
    counts = [0] * len(blend.names)
    for i in range(20_000):
        name, ordinal = blend.source(i)
        d = int(name[1:])
        assert ordinal == counts[d]
        counts[d] += 1
    for share, count in zip(blend.shares, counts, strict=True):
        assert abs(count * blend.period - share * 20_000) < blend.period


def test_weights_are_as_given() -> None:
    """Of 61 sources, some below a thousandth; after 100 periods the counts are exact."""
    weights = {f"s{i}": 0.0015 if i < 20 else round(0.01 + i / 1000, 3) for i in range(61)}
    blend = Blend(weights)
    total = sum(round(weight * 10_000) for weight in weights.values())
    assert blend.period == total // 5  # the weights' ten-thousandths have the divisor 5
    for name, weight in weights.items():
        assert blend.count(name, 100 * total) == 100 * round(weight * 10_000)


def test_calls_in_any_order_agree() -> None:
    for weights in ({"a": 1, "b": 2, "c": 4}, some_weights(0, 7)):
        expected = [Blend(weights).source(i) for i in range(300)]
        blend, order = Blend(weights), list(range(300))
        random.Random(1).shuffle(order)
        assert all(blend.source(i) == expected[i] for i in order)
        assert Blend(weights).counts(300) == [sum(n == name for n, _ in expected) for name in blend.names]


def test_remembered_counts_save_the_walk() -> None:
    weights = {"a": 0.7123456789, "b": 0.2, "c": 0.0876543212345}
    walked = Blend(weights)
    counts = walked.counts(5000)
    fresh = Blend(weights)
    fresh.remember(5000, counts)
    assert fresh._walk_to(5000).slot == 5000  # not from 0
    assert served(fresh, 5000, 5100) == served(walked, 5000, 5100)
    assert served(fresh, 10, 20) == served(walked, 10, 20)
    with pytest.raises(AssertionError):
        fresh.remember(5000, [counts[0] + 2, counts[1] - 2, counts[2]])


def test_long_runs_stay_exact() -> None:
    """After 10^12 samples, where a rounded weight would be off by many."""
    blend = Blend({"a": 0.1, "b": 0.0015, "c": 0.8985})
    end = 10**12 + 7
    for share, count in zip(blend.shares, blend.counts(end), strict=True):
        assert abs(count * blend.period - share * end) < blend.period


def test_equal_blends() -> None:
    assert Blend({"a": 0.7, "b": 0.3}) == Blend({"a": 7, "b": 3}) == Blend({"a": 70.0, "b": 30, "c": 0})
    assert Blend({"a": 0.7, "b": 0.3}) != Blend({"b": 0.3, "a": 0.7})  # the first wins ties
    assert Blend({"a": 0.7, "b": 0.3}) != Blend({"a": 0.7, "b": 0.31})
    assert Blend({"a": 1, "b": 3}).weights == {"a": 0.25, "b": 0.75}


def test_counts_of_sources_that_are_not_there() -> None:
    assert Blend({"a": 1, "b": 0}).count("b", 100) == 0
    assert Blend({"a": 1}).count("zzz", 100) == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "at least one source"),
        ({"a": 0.5, "b": -0.1}, "source 'b' is -0.1"),
        ({"a": float("nan")}, "source 'a' is nan"),
        ({"a": float("inf"), "b": 1}, "source 'a' is inf"),
        ({"a": 0, "b": 0.0}, "are zero"),
    ],
)
def test_misuse_is_explained(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blend(weights)


def test_negative_indices() -> None:
    blend = Blend({"a": 1})
    for call in (blend.source, blend.counts):
        with pytest.raises(IndexError):
            call(-1)


def test_ties_go_to_the_source_named_first() -> None:
    assert list(itertools.islice(served(Blend({"b": 1, "a": 1}), 0, 4), 4)) == ["b", "a", "b", "a"]


@pytest.mark.parametrize(("back", "nearest"), [(8_100, 8_000), (5_010, 5_000), (10, 0)])
def test_going_back_a_step_or_to_a_checkpoint_walks_from_there(
    monkeypatch: pytest.MonkeyPatch, back: int, nearest: int
) -> None:
    weights = {"a": 0.7123456789, "b": 0.2876543211}
    expected, blend, walked = Blend(weights).source(back), Blend(weights), []
    for end in range(1000, 9_001, 1000):
        blend.advance(end)
        if end == 5000:
            blend.keep(end)
    original = _Walk.advance

    def counted(walk: _Walk) -> None:
        walked.append(walk.slot)
        original(walk)

    monkeypatch.setattr(_Walk, "advance", counted)
    assert blend.source(back) == expected
    assert min(walked) == nearest
