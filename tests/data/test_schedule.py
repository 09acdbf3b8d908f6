import json
import random
from collections import Counter

import numpy as np
import pytest

from data.blend import Blend, _Walk
from data.indexed import DataBundle
from data.loader import MicroBatchLoader
from data.order import SampleSource
from data.provider import RunData
from data.schedule import Phase, PhaseSchedule
from tests.data.streams import CountingStream

PHASES = [
    Phase("broad", 0.7, {"code": 0.7, "prose": 0.3}),
    Phase("balanced", 0.2, {"code": 0.5, "prose": 0.5}),
    Phase("late", 0.1, {"prose": 0.6, "new": 0.4}),
]
TWO = [Phase("broad", 0.8, {"code": 0.7, "prose": 0.3}), Phase("late", 0.2, {"prose": 1})]


def check_ordinals(schedule: PhaseSchedule, start: int, before: dict[str, int]) -> None:
    """From sample `start` on, each source's ordinals count up from `before`."""
    seen = Counter(before)
    for i in range(start, schedule.num_samples):
        location = schedule.locate(i)
        assert location.ordinal == seen[location.source]
        seen[location.source] += 1
    assert seen == schedule.counts(schedule.num_samples)


def test_ordinals_count_across_phases() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=101, global_batch_size=6)
    assert [(span.start, span.end) for span in schedule.spans] == [(0, 426), (426, 546), (546, 606)]
    assert [schedule.locate(i).phase for i in (0, 425, 426, 545, 546, 605)] == [
        phase.name for phase in PHASES for _ in range(2)
    ]
    check_ordinals(schedule, 0, {})
    assert schedule.source_names == ["code", "prose", "new"]


def test_source_ranges_agree_with_locate() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=10, global_batch_size=2)
    for start, end in [(0, 20), (0, 0), (3, 4), (5, 19), (9, 11)]:
        ranges = schedule.source_ranges(start, end)
        found = [(taken.phase, taken.source, k) for taken in ranges for k in range(taken.start, taken.end)]
        assert sorted(found) == sorted(map(tuple, map(schedule.locate, range(start, end))))


def test_lengths_of_phases_in_steps_tokens_shares_and_the_rest() -> None:
    phases = [
        Phase("steps", blend={"a": 1}, steps=7),
        Phase("tokens", blend={"a": 2, "b": 1}, tokens=2 * 4 * 16 * 10 + 3, global_batch_size=8),  # ten steps
        Phase("rest", blend={"b": 1}, sequence_length=4),
        Phase("share", 0.25, {"a": 1}),
    ]
    schedule = PhaseSchedule(phases, num_steps=40, global_batch_size=4, sequence_length=16)
    laid_out = [(span.first_step, span.end_step, span.batch_size, span.sequence_length) for span in schedule.spans]
    assert laid_out == [(0, 7, 4, None), (7, 17, 8, None), (17, 30, 4, 4), (30, 40, 4, None)]
    assert schedule.num_samples == 28 + 80 + 52 + 40
    for step in range(41):
        assert schedule.steps_before(schedule.samples_before(step)) == step
    for sample in (1, 29, -4, 201):
        with pytest.raises(ValueError, match="no step of this run begins"):
            schedule.steps_before(sample)


def test_phases_with_growing_batches_continue_their_blend() -> None:
    blend = {"a": 0.7, "b": 0.2, "c": 0.1}
    ramp = [Phase(f"of {size}", blend=blend, steps=3, global_batch_size=size) for size in (2, 4, 6)]
    schedule = PhaseSchedule([*ramp, Phase("full", blend=blend)], num_steps=20, global_batch_size=8)
    alone = Blend(blend)
    assert all(schedule.locate(i)[1:] == alone.source(i) for i in range(schedule.num_samples))


@pytest.mark.parametrize("seed", range(4))
def test_a_saved_description_is_enough_to_resume(seed: int) -> None:
    """A run may resume at any step, also if all later phases change."""
    draw = random.Random(seed)

    def some_phases() -> list[Phase]:
        blends = [{"a": 0.7, "b": 0.3}, {"a": 1, "c": 2}, {"b": 1, "a": 0.123456789}]
        return [
            Phase(f"p{i}", blend=draw.choice(blends), steps=draw.randint(1, 6), global_batch_size=draw.choice([2, 4]))
            for i in range(draw.randint(1, 6))
        ]

    def laid_out(phases: list[Phase]) -> PhaseSchedule:
        return PhaseSchedule(phases, sum(phase.steps or 0 for phase in phases), 4)

    whole = laid_out(some_phases())
    consumed = whole.samples_before(draw.randint(0, whole.num_steps))
    other = laid_out([*some_phases(), Phase("last", blend={"d": 1}, steps=30)])
    after = other.after(json.loads(json.dumps(whole.description())), consumed)
    assert [after.locate(i) for i in range(consumed)] == [whole.locate(i) for i in range(consumed)]
    check_ordinals(after, consumed, whole.counts(consumed))
    assert other.after(json.loads(json.dumps(after.description())), consumed).description() == after.description()
    steps = whole.steps_before(consumed)
    assert [after.samples_before(s) for s in range(steps + 1)] == [whole.samples_before(s) for s in range(steps + 1)]


@pytest.fixture
def run() -> RunData:
    """A run that takes 112 samples of code, which has 100, and 48 + 40 of prose, which has 50."""
    streams = {name: CountingStream([n]) for name, n in {"code": 1601, "prose": 801, "more": 40}.items()}
    sources = {name: SampleSource(name, stream, 16, 0, 10**6) for name, stream in streams.items()}
    loader = MicroBatchLoader(PhaseSchedule(TWO, num_steps=50, global_batch_size=4), sources, 1, 0, 1)
    return RunData(DataBundle(streams, {}, None), loader, [])  # type: ignore[arg-type]


def test_the_planned_use_counts_epochs_of_each_source(run: RunData) -> None:
    rows = [(span.name, use) for span, uses in run.planned_use() for use in uses]
    assert [(name, use.source, use.share, round(use.epochs, 3), round(use.epochs_done, 3)) for name, use in rows] == [
        ("broad", "code", 0.7, 1.12, 1.12),
        ("broad", "prose", 0.3, 0.96, 0.96),
        ("late", "prose", 1.0, 0.8, 1.76),
    ]
    assert "warning: no phase draws from data.sources.more" in run.summary()
    assert run.phases.counts(200) == {"code": 112, "prose": 88} and run.epochs(50) == {"code": 1.12, "prose": 1.76}


def test_a_run_above_its_limit_of_epochs_is_refused(run: RunData) -> None:
    for limit in (None, 2, 1.76, {"prose": 2}, {"code": 1.12}):
        run.check_epochs(limit)
    with pytest.raises(ValueError) as refusal:
        run.check_epochs(1)
    assert "code (1,601 tokens) 1.12 times (limit 1); prose (801 tokens) 1.76 times" in str(refusal.value)
    with pytest.raises(ValueError, match=r"through prose .* \(limit 1\.5\)"):
        run.check_epochs({"prose": 1.5})
    with pytest.raises(ValueError, match="names porse, from which no phase draws: code, prose"):
        run.check_epochs({"porse": 1.5})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([{"steps": 5, "fraction": 0.5}, {}], "phase 'p0' has fraction and steps; give one length"),
        ([{}, {}], "the phases p0 and p1 have no length; give all but one"),
        ([{"steps": 20}, {}], "the phases p0 take 20 steps, and the run has 20"),
        ([{"fraction": 0.5}, {"fraction": 0.49}], "take 19.8 steps, and the run has 20"),
        ([{"fraction": 0.001}, {}], "phase 'p0' gets none of the 20 steps"),
    ],
)
def test_phases_that_do_not_fill_the_run_are_refused(lengths: list[dict[str, float]], message: str) -> None:
    phases = [Phase(f"p{i}", blend={"a": 1}, **length) for i, length in enumerate(lengths)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        PhaseSchedule(phases, 20, 4)


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
