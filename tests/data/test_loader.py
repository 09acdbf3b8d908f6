"""The global order of samples is the same at any data-parallel size and worker count, and after a restart. A run may
resume with changed future phases, added files and more steps, but never with other data in its past."""

import json
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from data.indexed import Concatenation
from data.loader import UNCOUNTED, MicroBatch, MicroBatchLoader
from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule
from tests.data.streams import CountingStream

LENGTH, BATCH, MICRO_BATCH = 4, 8, 2
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
    seed: int = 1,
    ranks: tuple[int, int] = (0, 1),
    **options: Any,
) -> MicroBatchLoader:
    """The loader of one rank of a run of several epochs. ranks: (rank, number of ranks)."""
    streams = {"code": Concatenation(code), **dict.fromkeys(others, FILES[4])}
    sources = {n: SampleSource(n, stream, LENGTH, seed, 10**6, order) for n, stream in streams.items()}
    plan = PhaseSchedule(phases, sum(phase.steps or 0 for phase in phases), BATCH, LENGTH)
    return MicroBatchLoader(plan, sources, MICRO_BATCH, *ranks, **{"num_workers": 0, **options})


def rows_of(step: list[MicroBatch]) -> list[list[int]]:
    return [row for batch in step for row in torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()]


def seen(loader: MicroBatchLoader, start: int, end: int) -> list[list[int]]:
    """The rows of the steps in [start, end)."""
    return [row for step in loader.steps(start, end) for row in rows_of(step)]


def whole_steps(start: int, end: int, dp_size: int, **options: Any) -> list[list[MicroBatch]]:
    """The micro-batches of each step, from all ranks, in order."""
    ranks = [list(loader(ranks=(rank, dp_size), **options).steps(start, end)) for rank in range(dp_size)]
    return [sorted(chain(*shares), key=lambda batch: batch.index) for shares in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("start", "dp_size", "options"),
    [(0, 4, {}), (9, 1, {"num_workers": 2}), (10, 2, {"num_workers": 1}), (15, 2, {"consecutive": True})],
)
def test_the_order_is_the_same_on_any_number_of_ranks_and_from_any_step(start: int, dp_size: int, options) -> None:
    """A start may be in the middle of a phase, at a boundary or after it."""
    steps = whole_steps(start, 20, dp_size, **options)
    assert [row for step in steps for row in rows_of(step)] == seen(loader(), start, 20)
    assert all([batch.index for batch in step] == [0, 1, 2, 3] for step in steps)
    [first, *_] = loader(ranks=(1, 2), **options).steps(start, 20)
    assert [batch.index for batch in first] == ([2, 3] if "consecutive" in options else [1, 3])


def test_phases_may_have_their_own_batch_sizes_and_sequence_lengths() -> None:
    """The rows are the schedule's samples on any number of ranks. A phase with shorter sequences cuts each sample into
    several rows."""
    phases = [
        Phase("small", steps=3, blend={"code": 0.7, "prose": 0.3}, global_batch_size=4),
        Phase("large", steps=2, blend={"code": 0.7, "prose": 0.3}, global_batch_size=12),
        Phase("short", steps=2, blend={"prose": 1}, sequence_length=2),
    ]
    options = {"phases": phases, "masked": True, "boundary_loss": False}
    one = loader(**options)
    whole = list(one.steps(0, 7))
    assert [len(step) for step in whole] == [2, 2, 2, 6, 6, 4, 4]
    sample = 0
    for step in whole:
        assert [batch.index for batch in step] == list(range(len(step)))
        for batch in step:
            located = [one.schedule.locate(i) for i in range(sample, sample + MICRO_BATCH)]
            windows = [one.sources[at.source].sample(at.ordinal, documents=True) for at in located]
            tokens, documents = (np.stack(parts) for parts in zip(*windows, strict=True))
            length = 2 if located[0].phase == "short" else LENGTH
            assert batch.tokens.shape == (MICRO_BATCH * LENGTH // length, length)
            assert torch.equal(batch.tokens.flatten(), torch.from_numpy(tokens[:, :-1]).flatten())
            crossing = torch.from_numpy(documents[:, 1:] != documents[:, :-1]).flatten()
            targets = torch.where(crossing, UNCOUNTED, torch.from_numpy(tokens[:, 1:]).flatten())
            assert torch.equal(batch.targets.flatten(), targets)
            assert batch.num_targets == int((~crossing).sum())
            assert batch.documents is not None and (batch.documents[:, 0] == 0).all()
            assert torch.equal(batch.documents.diff() != 0, crossing.view(-1, length)[:, :-1])
            assert batch.num_documents == int((batch.documents[:, -1] + 1).sum())
            sample += MICRO_BATCH
    assert sample == one.schedule.num_samples
    for dp_size, start, workers in ((2, 0, 0), (1, 4, 2)):
        steps = whole_steps(start, 7, dp_size, num_workers=workers, **options)
        for step, expected in zip(steps, whole[start:], strict=True):
            for batch, other in zip(step, expected, strict=True):
                assert batch.documents is not None and other.documents is not None
                assert torch.equal(batch.tokens, other.tokens) and torch.equal(batch.documents, other.documents)


# --- resuming


def saved(loader: MicroBatchLoader) -> dict[str, Any]:
    return json.loads(json.dumps(loader.state_dict()))


def state_after(loader: MicroBatchLoader, steps: int, start: int = 0) -> dict[str, Any]:
    seen(loader, start, steps)
    return saved(loader)


def resumed(state: dict[str, Any], *arguments: Any, **options: Any) -> MicroBatchLoader:
    other = loader(*arguments, **options)
    other.load_state_dict(state)
    return other


def test_a_run_resumes_with_unchanged_data() -> None:
    """The saved position is that of the steps taken, however far workers have read ahead."""
    first = loader(num_workers=2)
    rows = []
    for step, batches in enumerate(first.steps(0, 20), start=1):
        rows += rows_of(batches)
        assert first.consumed_samples == step * BATCH
        if step == 7:
            break
    again = resumed(saved(first))
    assert again.changes == [] and again.consumed_samples == 7 * BATCH
    assert [*rows, *seen(again, 7, 20)] == seen(loader(), 0, 20)
    assert again.state_dict()["position"]["counts"] == loader().schedule.counts(20 * BATCH)


def test_new_files_are_mixed_into_the_rest_of_the_epoch() -> None:
    """Files are added twice, the second time before the first ones are used up. Each window comes exactly once."""
    phases = [Phase("a", blend={"code": 1}, steps=200)]
    first = loader(phases, FILES[:1])
    rows = seen(first, 0, 4)
    second = resumed(state_after(loader(phases, FILES[:1]), 4), phases, FILES[:2])
    assert second.changes == [
        "source 'code' has 1 new files of 300 tokens, mixed with the rest of its epoch after its sample 32"
    ]
    rows += seen(second, 4, 6)
    third = resumed(state_after(second, 6, start=4), phases, FILES[:4])
    rows += seen(third, 6, 100)
    windows = sum((file.num_tokens - 1) // LENGTH for file in FILES[:4])
    assert len(set(map(tuple, rows[:windows]))) == windows
    assert {token // 1000 for row in rows[32:48] for token in row} == {5, 6}
    again = resumed(state_after(third, 20, start=6), phases, FILES[:4])  # a resume with the same files
    assert again.changes == []
    assert seen(again, 20, 100) == rows[20 * BATCH :]


def test_a_source_of_which_nothing_was_consumed_may_be_replaced() -> None:
    phases = [PHASES[0], Phase("c", steps=10, blend={"new": 1})]
    state = state_after(loader(phases, others=("prose", "new")), 5)
    other = loader(phases, others=("prose", "new"))
    other.sources = {**other.sources, "new": SampleSource("new", FILES[3], LENGTH, 1, 10**6)}
    other.load_state_dict(state)
    assert len(other.changes) == 1 and "of which nothing was consumed yet" in other.changes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": [Phase("a", steps=20, blend={"code": 0.6, "prose": 0.4})]}, "phase 'a' has served samples"),
        # The order of the sources decides ties.
        ({"phases": [Phase("a", steps=20, blend={"prose": 0.3, "code": 0.7})]}, "the phases up to sample 56 were a"),
        ({"code": FILES[1:3]}, r"source 'code' \(file 6\), file 1 of 2, had 250 tokens .* and now has 300"),
        ({"code": FILES[:1]}, "source 'code' had 2 files and now has 1; files may only be added, at the end"),
        ({"phases": [Phase("a", steps=20, blend={"code": 1})], "others": ()}, "source 'prose' is missing"),
        ({"seed": 2}, r"data\.seed \(by default run\.seed\) was 1 and is now 2"),
    ],
)
def test_changes_of_the_past_are_refused(options: dict[str, Any], message: str) -> None:
    state = state_after(loader(), 7)
    with pytest.raises(ValueError, match=message):
        resumed(state, **options)
    accepted = resumed(state, **options, allow_other_data=True)
    assert accepted.consumed_samples == 56
    assert accepted.changes and "the data differs from the checkpoint's" in accepted.changes[0]


def test_weights_by_tokens_change_with_added_files() -> None:
    """The weights change from the resume on. The past stays as it was, so the run is not refused."""

    def by_tokens(code: list[CountingStream]) -> list[Phase]:
        weights = {"code": sum(file.num_tokens for file in code), "prose": FILES[4].num_tokens}
        return [Phase("all", steps=20, blend=weights, by_tokens=True)]

    first = loader(by_tokens(FILES[:1]), FILES[:1])
    state = state_after(first, 6)
    other = resumed(state, by_tokens(FILES[:2]), FILES[:2])
    assert any("new files" in change for change in other.changes)
    assert [span.blend.shares[0] / span.blend.period for span in other.schedule.spans] == [250 / 700, 550 / 1000]
    assert [other.schedule.locate(i) for i in range(48)] == [first.schedule.locate(i) for i in range(48)]
    again = resumed(state_after(other, 9, start=6), by_tokens(FILES[:2]), FILES[:2])
    assert again.changes == [] and seen(again, 9, 20) == seen(other, 9, 20)
    fixed = [Phase("all", steps=20, blend={"code": 550, "prose": 450})]
    with pytest.raises(ValueError, match="phase 'all' has served samples"):
        resumed(state, fixed, FILES[:2])


def test_a_phase_inserted_before_the_position_is_reported() -> None:
    """The past stays as it was, so the new phase has no effect there."""
    state = state_after(loader(), 7)
    in_front = [Phase("new", steps=3, blend={"prose": 1.0}), Phase("a", steps=7, blend=PHASES[0].blend), PHASES[1]]
    again = resumed(state, in_front)
    assert "phases before sample 56 stay a [0, 56)" in again.changes[0]
    assert "the new data.phases would give new [0, 24)" in again.changes[0]
    assert seen(again, 7, 20) == seen(loader(), 7, 20)
