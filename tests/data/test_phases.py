from __future__ import annotations

from collections import Counter

import pytest

from data.blend import Blend
from data.phases import Phase, PhaseSchedule

PHASES = [
    Phase("broad", 0.7, {"code": 0.7, "prose": 0.3}),
    Phase("balanced", 0.2, {"code": 0.5, "prose": 0.5}),
    Phase("late", 0.1, {"prose": 0.6, "new": 0.4}),
]


def test_boundaries_are_whole_steps_and_cover_the_run() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=101, global_batch_size=6)
    assert [(span.start, span.end) for span in schedule.spans] == [(0, 426), (426, 546), (546, 606)]
    assert schedule.num_samples == 606


def test_ordinals_go_on_across_phases() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=101, global_batch_size=6)
    seen: Counter[str] = Counter()
    for i in range(schedule.num_samples):
        location = schedule.locate(i)
        assert location.ordinal == seen[location.source]
        assert location.phase == ("broad" if i < 426 else "balanced" if i < 546 else "late")
        seen[location.source] += 1
    assert schedule.source_names == ["code", "prose", "new"]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7])
def test_very_short_runs_skip_short_phases(num_steps: int) -> None:
    schedule = PhaseSchedule(PHASES, num_steps, global_batch_size=2)
    phases = [schedule.locate(i).phase for i in range(2 * num_steps)]
    assert phases == [span.name for span in schedule.spans for _ in range(span.num_samples)]
    assert len(phases) == 2 * num_steps


@pytest.mark.parametrize(("start", "end"), [(0, 20), (0, 0), (3, 4), (5, 19), (9, 11), (19, 20)])
def test_source_ranges_are_what_locate_says(start: int, end: int) -> None:
    schedule = PhaseSchedule(PHASES, num_steps=10, global_batch_size=2)
    located: dict[tuple[str, str], list[int]] = {}
    for i in range(start, end):
        phase, source, ordinal = schedule.locate(i)
        located.setdefault((phase, source), []).append(ordinal)
    ranges = {
        (phase, source): list(range(*ordinals)) for phase, source, *ordinals in schedule.source_ranges(start, end)
    }
    assert ranges == located
    for outside in ((-1, 2), (3, 2), (0, 21)):
        with pytest.raises(IndexError, match="outside a run of 20"):
            schedule.source_ranges(*outside)


def test_off_the_run() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=10, global_batch_size=2)
    for i in (-1, 20):
        with pytest.raises(IndexError, match="outside a run of 20"):
            schedule.locate(i)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "at least one phase"),
        ([Phase("a", 0.5, {"x": 1}), Phase("a", 0.5, {"x": 1})], "two phases are named 'a'"),
        ([Phase("a", 0.5, {"x": 1}), Phase("b", 0.4, {"x": 1})], "sum to 0.9"),
        ([Phase("a", 1.0, {"x": 1}), Phase("b", 0.0, {"x": 1})], "'b' has the fraction 0"),
        ([Phase("a", 1.0, {"x": -1})], "phase 'a': the weight of source 'x'"),
    ],
)
def test_misuse_is_explained(phases: list[Phase], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PhaseSchedule(phases, num_steps=10, global_batch_size=2)


def test_a_run_needs_steps() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        PhaseSchedule(PHASES, num_steps=0, global_batch_size=2)


def spans(schedule: PhaseSchedule) -> list[tuple[str, int, int]]:
    return [(span.name, span.start, span.end) for span in schedule.spans]


def test_the_past_of_another_layout() -> None:
    past = PhaseSchedule(PHASES, num_steps=100, global_batch_size=1)  # boundaries behind 70 and 90
    longer = PhaseSchedule(PHASES, num_steps=200, global_batch_size=1)  # behind 140 and 180
    tail = [("balanced", 140, 180), ("late", 180, 200)]
    for consumed, expected in {
        0: [("broad", 0, 140)],
        50: [("broad", 0, 140)],  # goes on
        70: [("broad", 0, 140)],
        80: [("broad", 0, 70), ("balanced", 70, 80), ("broad", 80, 140)],
        90: [("broad", 0, 70), ("balanced", 70, 90), ("broad", 90, 140)],
        100: [("broad", 0, 70), ("balanced", 70, 90), ("late", 90, 100), ("broad", 100, 140)],
    }.items():
        schedule = longer.behind(past.description(), consumed)
        assert spans(schedule) == [*expected, *tail]
        assert all(schedule.locate(i) == past.locate(i) for i in range(consumed))
        assert spans(longer) == [("broad", 0, 140), *tail]  # as it was


def test_a_blend_under_way_goes_on() -> None:
    """In a phase that starts elsewhere in the new layout but has the same blend: 8 of [70, 90) are done."""
    past = PhaseSchedule(PHASES, num_steps=100, global_batch_size=1)
    shorter = PhaseSchedule(PHASES, num_steps=85, global_batch_size=1)  # boundaries behind 60 and 76
    for consumed, expected in {
        73: [("broad", 0, 70), ("balanced", 70, 76), ("late", 76, 85)],
        78: [("broad", 0, 70), ("balanced", 70, 78), ("late", 78, 85)],
    }.items():
        schedule = shorter.behind(past.description(), consumed)
        assert spans(schedule) == expected
        seen: Counter[str] = Counter()
        for i in range(85):
            location = schedule.locate(i)
            assert location.ordinal == seen[location.source]
            seen[location.source] += 1


def test_weights_come_back_bit_for_bit() -> None:
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}  # whose sum is not exactly 1
    blend = Blend(weights)
    assert Blend.restored(dict(blend.weights)).weights == blend.weights
    schedule = PhaseSchedule([Phase("p", 1.0, weights)], 10, 1)
    for steps in (20, 30, 40):
        longer = PhaseSchedule([Phase("q", 0.5, {"a": 1}), Phase("p", 0.5, weights)], steps, 1)
        schedule = longer.behind(schedule.description(), steps // 2 - 1)
    assert all(dict(span["blend"]) in (dict(blend.weights), {"a": 1.0}) for span in schedule.description())
