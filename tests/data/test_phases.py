from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from data.blend import Blend
from data.schedule import Phase, PhaseSchedule

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
        schedule = longer.after(past.description(), consumed)
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
        schedule = shorter.after(past.description(), consumed)
        assert spans(schedule) == expected
        seen: Counter[str] = Counter()
        for i in range(85):
            location = schedule.locate(i)
            assert location.ordinal == seen[location.source]
            seen[location.source] += 1


def test_lengths_in_steps_tokens_and_the_rest() -> None:
    phases = [
        Phase("steps", blend={"a": 1}, steps=7),
        Phase("tokens", blend={"a": 2, "b": 1}, tokens=2 * 4 * 16 * 10 + 3, global_batch_size=8),  # ten steps
        Phase("rest", blend={"b": 1}, sequence_length=4),
        Phase("share", 0.25, {"a": 1}),
    ]
    schedule = PhaseSchedule(phases, num_steps=40, global_batch_size=4, sequence_length=16)
    assert [(span.first_step, span.end_step, span.batch_size) for span in schedule.spans] == [
        (0, 7, 4),
        (7, 17, 8),
        (17, 30, 4),
        (30, 40, 4),
    ]
    assert [span.sequence_length for span in schedule.spans] == [None, None, 4, None]
    assert schedule.num_samples == 28 + 80 + 52 + 40
    for step in range(41):
        assert schedule.steps_before(schedule.samples_before(step)) == step
    for sample in (1, 29, -4, 201):
        with pytest.raises(ValueError, match="begins no step"):
            schedule.steps_before(sample)


def test_growing_batches_go_on_with_their_blend() -> None:
    blend = {"a": 0.7, "b": 0.2, "c": 0.1}
    ramp = [Phase(f"of {size}", blend=blend, steps=3, global_batch_size=size) for size in (2, 4, 6)]
    schedule = PhaseSchedule([*ramp, Phase("full", blend=blend)], num_steps=20, global_batch_size=8)
    alone = Blend(blend)
    assert [schedule.locate(i)[1:] for i in range(schedule.num_samples)] == [
        alone.source(i) for i in range(schedule.num_samples)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_position_is_enough_to_go_on(seed: int) -> None:
    """At any step: in the same phases, and in quite other ones behind it."""
    draw = random.Random(seed)

    def some_phases() -> list[Phase]:
        blends = [{"a": 0.7, "b": 0.3}, {"a": 1, "c": 2}, {"b": 1, "a": 0.123456789}]
        return [
            Phase(f"p{i}", blend=draw.choice(blends), steps=draw.randint(1, 6), global_batch_size=draw.choice([2, 4]))
            for i in range(draw.randint(1, 6))
        ]

    def laid_out(phases: list[Phase]) -> PhaseSchedule:
        return PhaseSchedule(phases, sum(phase.steps or 0 for phase in phases), 4)

    phases = some_phases()
    whole = laid_out(phases)
    consumed = whole.samples_before(draw.randint(0, whole.num_steps))
    position = json.loads(json.dumps(whole.position(consumed)))
    again = laid_out(phases)
    again.stand_at(consumed, position)
    rest = range(consumed, whole.num_samples)
    assert [again.locate(i) for i in rest] == [whole.locate(i) for i in rest]
    assert again.position(consumed) == position

    other = laid_out([*some_phases(), Phase("last", blend={"d": 1}, steps=30)])
    description = json.loads(json.dumps(whole.description()))
    behind = other.after(description, consumed)
    behind.stand_at(consumed, position)
    seen = Counter(position["counts"])
    for i in range(consumed, behind.num_samples):
        location = behind.locate(i)
        assert location.ordinal == seen[location.source]
        seen[location.source] += 1
    assert dict(seen) == behind.counts(behind.num_samples)
    assert other.after(json.loads(json.dumps(behind.description())), consumed).description() == behind.description()
    steps = whole.steps_before(consumed)
    assert [behind.samples_before(s) for s in range(steps + 1)] == [whole.samples_before(s) for s in range(steps + 1)]
