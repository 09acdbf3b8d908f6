"""A run resumes with other phases to come, more files and more steps, and never with another past."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from data.indexed import Concatenation
from data.loader import MicroBatchLoader
from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule
from tests.data.streams import CountingStream

LENGTH, BATCH = 4, 6
FILES = [CountingStream([n] * 50, f"file {n}", first=1000 * n) for n in range(5, 10)]
PHASES = [
    Phase("a", steps=10, blend={"code": 0.7, "prose": 0.3}),
    Phase("b", steps=10, blend={"code": 0.5, "prose": 0.5}),
]


def loader(
    phases: list[Phase] = PHASES,
    code: list[CountingStream] = FILES[:2],
    others: tuple[str, ...] = ("prose",),
    order: str = "documents",
    **options: Any,
) -> MicroBatchLoader:
    streams = {"code": Concatenation(code), **dict.fromkeys(others, FILES[4])}
    sources = {n: SampleSource(n, stream, LENGTH, 1, 10**6, order) for n, stream in streams.items()}
    steps = sum(phase.steps or 0 for phase in phases)
    return MicroBatchLoader(PhaseSchedule(phases, steps, BATCH, LENGTH), sources, 2, 0, 1, num_workers=0, **options)


def seen(loader: MicroBatchLoader, start: int, end: int) -> list[list[int]]:
    """The rows of the steps [start, end)."""
    rows = []
    for micro_batches in loader.steps(start, end):
        for batch in micro_batches:
            rows += torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()
    return rows


def state_after(loader: MicroBatchLoader, steps: int, start: int = 0) -> dict[str, Any]:
    seen(loader, start, steps)
    return json.loads(json.dumps(loader.state_dict()))


def resumed(state: dict[str, Any], *arguments: Any, **options: Any) -> MicroBatchLoader:
    other = loader(*arguments, **options)
    other.load_state_dict(state)
    return other


def test_unchanged_data_continue() -> None:
    state = state_after(loader(), 7)
    again = resumed(state)
    assert again.changes == []
    assert seen(again, 7, 20) == seen(loader(), 7, 20)
    assert again.state_dict()["position"]["counts"] == loader().schedule.counts(20 * BATCH)


def test_new_files_join_where_the_run_stands() -> None:
    """Twice, the second time while the first ones are still being mixed in: nothing twice, nothing left out."""
    phases = [Phase("a", blend={"code": 1}, steps=200)]
    first = loader(phases, FILES[:1])
    rows = seen(first, 0, 5)
    second = resumed(state_after(loader(phases, FILES[:1]), 5), phases, FILES[:2])
    assert second.changes == [
        "source 'code' has 1 new files of 300 tokens, mixed with what its epoch has left after its sample 30"
    ]
    rows += seen(second, 5, 8)
    third = resumed(state_after(second, 8, start=5), phases, FILES[:4])
    rows += seen(third, 8, 100)
    windows = sum((file.num_tokens - 1) // LENGTH for file in FILES[:4])
    epoch = Counter(map(tuple, rows[:windows]))
    assert set(epoch.values()) == {1}
    assert {token // 1000 for row in rows[30:48] for token in row} == {5, 6}
    again = resumed(state_after(third, 20, start=8), phases, FILES[:4])  # and a resume without news
    assert again.changes == []
    assert seen(again, 20, 100) == rows[20 * BATCH :]


def test_a_source_that_gave_nothing_may_be_any() -> None:
    phases = [PHASES[0], Phase("c", steps=10, blend={"new": 1})]
    state = state_after(loader(phases, others=("prose", "new")), 5)
    streams = loader(phases, others=("prose", "new"))
    streams.sources["new"] = SampleSource("new", FILES[3], LENGTH, 1, 10**6)
    streams.load_state_dict(state)
    assert len(streams.changes) == 1 and "of which nothing was consumed yet" in streams.changes[0]


def test_phases_to_come_change_and_nothing_comes_twice() -> None:
    state = state_after(loader(), 12)
    phases = [
        *PHASES[:1],
        Phase("b", steps=4, blend={"code": 0.5, "prose": 0.5}),
        Phase("c", steps=9, blend={"code": 0.2, "prose": 0.4, "new": 0.4}, global_batch_size=12),
    ]
    other = resumed(state, phases, others=("prose", "new"))
    assert len(other.changes) == 1
    assert other.changes[0].startswith("phases after sample 72: were b [72, 120) code 0.5, prose 0.5; are b [72, 84)")
    assert seen(other, 12, 14) == seen(loader(), 12, 14)
    taken = [other.schedule.locate(i)[1:] for i in range(72, other.schedule.num_samples)]
    counts = Counter(state["position"]["counts"])
    for source, ordinal in taken:
        assert ordinal == counts[source]
        counts[source] += 1
    assert other.schedule.num_samples == 14 * BATCH + 9 * 12
    # A later checkpoint of it resumes, too.
    rows = seen(other, 14, 23)
    assert seen(resumed(state_after(other, 18, start=14), phases, others=("prose", "new")), 18, 23) == rows[4 * 12 :]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": [Phase("a", steps=20, blend={"code": 0.6, "prose": 0.4})]}, "phase 'a' has served samples"),
        ({"code": FILES[1:3]}, r"source 'code' \(file 6\), file 1 of 2, had 250 tokens .* and now has 300"),
        ({"code": FILES[:1]}, "source 'code' had 2 files and now has 1; files may only be added, at the end"),
        ({"phases": [Phase("a", steps=20, blend={"code": 1})], "others": ()}, "source 'prose' is gone"),
        ({"order": "windows"}, "data.order was documents and is now windows"),
    ],
)
def test_another_past_is_refused(options: dict[str, Any], message: str) -> None:
    state = state_after(loader(), 7)
    with pytest.raises(ValueError, match=message):
        resumed(state, **options)
    accepted = resumed(state, **options, allow_other_data=True)
    assert accepted.consumed_samples == 42
    assert accepted.changes and "the data is other than the checkpoint's" in accepted.changes[0]


def test_weights_by_tokens_follow_the_files() -> None:
    """New files change them from there on, which is no other past."""

    def by_tokens(code: list[CountingStream]) -> list[Phase]:
        weights = {"code": sum(file.num_tokens for file in code), "prose": FILES[4].num_tokens}
        return [Phase("all", steps=20, blend=weights, by_tokens=True)]

    first = loader(by_tokens(FILES[:1]), FILES[:1])
    state = state_after(first, 6)
    other = resumed(state, by_tokens(FILES[:2]), FILES[:2])
    assert any("new files" in change for change in other.changes)
    assert [span.blend.shares[0] / span.blend.period for span in other.schedule.spans] == [250 / 700, 550 / 1000]
    assert [other.schedule.locate(i) for i in range(36)] == [first.schedule.locate(i) for i in range(36)]
    again = resumed(state_after(other, 9, start=6), by_tokens(FILES[:2]), FILES[:2])
    assert again.changes == [] and seen(again, 9, 20) == seen(other, 9, 20)
    fixed = [Phase("all", steps=20, blend={"code": 550, "prose": 450})]
    with pytest.raises(ValueError, match="phase 'all' has served samples"):
        resumed(state, fixed, FILES[:2])


def test_other_data_that_is_allowed_keeps_steps_and_samples_together() -> None:
    """With batches of another size, and a source that is gone."""
    state = state_after(loader(), 7)
    phases = [Phase("x", steps=20, blend={"code": 1}, global_batch_size=2)]
    other = resumed(state, phases, others=(), allow_other_data=True)
    assert other.consumed_samples == 42 and other.schedule.samples_before(7) == 42
    assert other.schedule.samples_before(8) == 44
    assert other.schedule.locate(42).ordinal == state["position"]["counts"]["code"]
    assert len(seen(other, 7, 20)) == 26
    json.dumps(other.state_dict())


def test_a_phase_in_front_of_the_past_is_named() -> None:
    """The past stays as it was; the run says that the new phase has no effect there."""
    rows = seen(loader(), 0, 20)
    state = state_after(loader(), 7)
    in_front = [Phase("new", steps=3, blend={"prose": 1.0}), Phase("a", steps=7, blend=PHASES[0].blend), PHASES[1]]
    again = resumed(state, in_front)
    assert "phases before sample 42 stay as they were: a [0, 42)" in again.changes[0]
    assert "data.phases says new [0, 18)" in again.changes[0]
    assert seen(again, 7, 20) == rows[7 * BATCH :]
