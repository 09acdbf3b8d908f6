from __future__ import annotations

import pytest

from data.blend import PERIOD, Blend


def test_starts_as_megatrons() -> None:
    blend = Blend({"a": 0.5, "b": 0.3, "c": 0.2})
    assert [blend.names.index(blend.source(i)[0]) for i in range(10)] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1.0},
        {"a": 0.5, "b": 0.3, "c": 0.2},
        {"a": 3, "b": 1},
        {"a": 0.999, "b": 0.001},
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
        {"a": 0.29, "b": 0.57, "c": 0.14},
        {name: 0.5 ** (i + 1) for i, name in enumerate("abcdefg")},
        {f"s{i}": 1.0 for i in range(37)},
    ],
)
def test_ordinals_count_what_came_before_and_every_prefix_keeps_the_weights(
    weights: dict[str, float],
) -> None:
    blend = Blend(weights)
    total = sum(weights.values())
    seen = dict.fromkeys(weights, 0)
    for i in range(2 * PERIOD + 17):
        for name in weights:
            assert blend.count(name, i) == seen[name]
            # Each step's rounding error is below the number of sources; Megatron's rule keeps it so.
            assert abs(seen[name] - i * weights[name] / total) < len(weights)
        name, ordinal = blend.source(i)
        assert ordinal == seen[name]
        seen[name] += 1
    for name in weights:
        assert abs(blend.count(name, PERIOD) - PERIOD * weights[name] / total) < 1


def test_decimal_weights_are_exact() -> None:
    blend = Blend({"a": 0.29, "b": 0.57, "c": 0.14})
    assert [blend.count(name, PERIOD) for name in "abc"] == [290, 570, 140]


def test_zero_weight_leaves_a_source_out() -> None:
    blend = Blend({"a": 0, "b": 2})
    assert blend.names == ["b"]
    assert blend.count("a", 100) == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "at least one source"),
        ({"a": 0.0}, "all weights"),
        ({"a": -1.0, "b": 2.0}, "'a' is -1.0"),
        ({"a": float("nan")}, "finite"),
        ({"a": 1.0, "b": 1e-4}, "'b' is 0.0001 of the blend"),
    ],
)
def test_misuse_is_explained(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blend(weights)
