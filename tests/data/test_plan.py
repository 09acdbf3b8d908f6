from __future__ import annotations

from collections import Counter

import pytest

from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule, check_epochs, planned_use
from tests.data.streams import CountingStream

PHASES = [Phase("broad", 0.8, {"code": 0.7, "prose": 0.3}), Phase("late", 0.2, {"prose": 1})]


def sources() -> dict[str, SampleSource]:
    tokens = {"code": 1601, "prose": 801}  # 100 and 50 samples
    return {name: SampleSource(name, CountingStream([n]), 16, 0, 10**6) for name, n in tokens.items()}


def test_the_plan_is_what_the_run_takes() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=50, global_batch_size=4)
    taken: Counter[tuple[str, str]] = Counter()
    for i in range(schedule.num_samples):
        location = schedule.locate(i)
        taken[location.phase, location.source] += 1
    rows = [(span.name, use) for span, uses in planned_use(schedule, sources()) for use in uses]
    assert {(phase, use.source): use.samples for phase, use in rows} == dict(taken)
    assert [(use.source, round(use.epochs, 3), round(use.epochs_done, 3)) for _, use in rows] == [
        ("code", 1.12, 1.12),
        ("prose", 0.96, 0.96),
        ("prose", 0.8, 1.76),
    ]
    assert [use.share for _, use in rows] == [0.7, 0.3, 1.0]


def test_a_limit_of_epochs() -> None:
    schedule = PhaseSchedule(PHASES, num_steps=50, global_batch_size=4)
    for limit in (None, 2, 1.76, {"prose": 2}, {"code": 1.12}):
        check_epochs(schedule, sources(), limit)
    with pytest.raises(ValueError) as refusal:
        check_epochs(schedule, sources(), 1)
    assert str(refusal.value) == (
        "the run would go through code (1,601 tokens) 1.12 times by the end of phase broad, where 1 is the limit; "
        "prose (801 tokens) 1.76 times by the end of phase late, where 1 is the limit: lower their weights in "
        "data.phases or train.steps, add text, or raise data.max_epochs"
    )
    with pytest.raises(ValueError, match=r"prose .* where 1\.5 is the limit"):
        check_epochs(schedule, sources(), {"prose": 1.5})
    with pytest.raises(ValueError, match="names porse, from which no phase draws: code, prose"):
        check_epochs(schedule, sources(), {"porse": 1.5})
