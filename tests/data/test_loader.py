"""The loader's promise: the same global order at any data-parallel size, worker count and restart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch

from data.indexed import IndexedDataset
from data.loader import MicroBatch, MicroBatchLoader
from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule

MakeDataset = Callable[..., IndexedDataset]
Sources = Mapping[str, SampleSource]

NUM_STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ_LENGTH = 20, 8, 2, 6
PHASES = (
    Phase("broad", 0.7, {"code": 0.7, "prose": 0.3}),
    Phase("balanced", 0.2, {"code": 0.5, "prose": 0.5}),
    Phase("late", 0.1, {"code": 0.3, "prose": 0.7}),
)


def schedule(num_steps: int = NUM_STEPS, global_batch_size: int = GLOBAL_BATCH) -> PhaseSchedule:
    return PhaseSchedule(PHASES, num_steps, global_batch_size)


def open_sources(make_dataset: MakeDataset, seed: int = 5, num_tokens: int = 500) -> dict[str, SampleSource]:
    """Small enough that the run is several epochs long."""
    return {
        name: SampleSource(name, make_dataset(name, num_tokens), SEQ_LENGTH, seed, vocab_size=1000)
        for name in ("code", "prose")
    }


@pytest.fixture
def sources(make_dataset: MakeDataset) -> dict[str, SampleSource]:
    return open_sources(make_dataset)


def loader(sources: Sources, dp_rank: int = 0, dp_size: int = 1, num_workers: int = 0) -> MicroBatchLoader:
    return MicroBatchLoader(schedule(), sources, MICRO_BATCH, dp_rank, dp_size, num_workers)


def batch_hash(micro_batches: Iterable[MicroBatch]) -> str:
    """A sha256 of micro-batches' indices, tokens and targets, whatever order they are given in.

    Of a rank's list it identifies its share of a step; of all ranks' lists together, the step.
    """
    digest = hashlib.sha256()
    for batch in sorted(micro_batches, key=lambda batch: batch.index):
        digest.update(batch.index.to_bytes(8, "little"))
        digest.update(batch.tokens.contiguous().numpy().tobytes())
        digest.update(batch.targets.contiguous().numpy().tobytes())
    return digest.hexdigest()


def step_hashes(
    sources: Sources, dp_size: int = 1, num_workers: int = 0, span: tuple[int, int] = (0, NUM_STEPS)
) -> list[str]:
    """The hash of each whole step, put together from all ranks."""
    ranks = [loader(sources, rank, dp_size, num_workers).steps(*span) for rank in range(dp_size)]
    return [batch_hash([batch for share in shares for batch in share]) for shares in zip(*ranks, strict=True)]


def test_micro_batches_are_the_schedules_samples_in_order(sources: Sources) -> None:
    plan = schedule()
    for step, batches in enumerate(loader(sources).steps(0, NUM_STEPS)):
        assert [batch.index for batch in batches] == [0, 1, 2, 3]
        rows = torch.cat([torch.cat([b.tokens, b.targets[:, -1:]], dim=1) for b in batches])
        for row, sample in zip(rows, range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH), strict=True):
            location = plan.locate(sample)
            assert np.array_equal(row.numpy(), sources[location.source].sample(location.ordinal).tokens)
        for batch in batches:
            assert batch.tokens.shape == batch.targets.shape == (MICRO_BATCH, SEQ_LENGTH)
            assert batch.tokens.dtype == batch.targets.dtype == torch.int64
            assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize(
    ("start", "dp_size", "num_workers"), [(0, 4, 0), (0, 1, 2), (14, 2, 1), (15, 1, 0), (18, 2, 0)]
)
def test_order_is_the_same_at_any_size_and_from_anywhere(
    sources: Sources, start: int, dp_size: int, num_workers: int
) -> None:
    """In the middle of a phase, at a boundary (14, 18) and after it."""
    assert step_hashes(sources, dp_size, num_workers, (start, NUM_STEPS)) == step_hashes(sources)[start:]


def test_state_is_the_number_of_consumed_samples(sources: Sources, make_dataset: MakeDataset) -> None:
    first = loader(sources, num_workers=2)
    hashes = []
    for step, batches in enumerate(first.steps(0, NUM_STEPS)):
        hashes.append(batch_hash(batches))
        # Workers are ahead by now; the state must not be.
        assert first.consumed_samples == (step + 1) * GLOBAL_BATCH
        if step == 9:
            break
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(open_sources(make_dataset))
    second.load_state_dict(state)
    assert second.consumed_samples == 10 * GLOBAL_BATCH
    hashes += [batch_hash(batches) for batches in second.steps(10, NUM_STEPS)]
    assert hashes == step_hashes(sources)


def resume(state: dict[str, object], sources: Sources, plan: PhaseSchedule | None = None) -> MicroBatchLoader:
    resumed = MicroBatchLoader(plan or schedule(), sources, MICRO_BATCH, 0, 1, num_workers=0)
    resumed.load_state_dict(state)
    return resumed


def test_other_data_is_refused_with_what_differs(sources: Sources, make_dataset: MakeDataset) -> None:
    before = loader(sources)
    before.consumed_samples = 15 * GLOBAL_BATCH
    state = before.state_dict()
    with pytest.raises(ValueError, match=r"data\.seed \(by default run\.seed\) was 5 and is now 6"):
        resume(state, open_sources(make_dataset, seed=6))
    swapped = [Phase(p.name, p.fraction, dict(reversed(p.blend.items()))) for p in PHASES]
    with pytest.raises(ValueError, match="phases up to sample 120 were"):  # ties in the blend fall otherwise
        resume(state, sources, PhaseSchedule(swapped, NUM_STEPS, GLOBAL_BATCH))


def samples(steps: Iterable[list[MicroBatch]]) -> list[str]:
    return [batch_hash(batches) for batches in steps]


@pytest.mark.parametrize("again", [18, 25, 28])
def test_a_lengthened_run_resumes_as_if_it_had_not_stopped(sources: Sources, again: int) -> None:
    before = loader(sources)
    list(before.steps(0, 18))
    longer = resume(before.state_dict(), sources, schedule(40))
    straight = samples(longer.steps(18, 40))
    longer.consumed_samples = again * GLOBAL_BATCH
    state = json.loads(json.dumps(longer.state_dict()))
    resumed = resume(state, sources, schedule(40))
    assert resumed.state_dict()["fingerprint"] == state["fingerprint"]
    assert samples(resumed.steps(again, 40)) == straight[again - 18 :]
    much_longer = resume(state, sources, schedule(60))  # and once more
    assert samples(much_longer.steps(18, again)) == straight[: again - 18]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_phases_of_other_batches_and_sequence_lengths(make_dataset: MakeDataset, num_workers: int) -> None:
    """At any number of ranks and workers, from anywhere: the schedule's samples, cut into shorter rows."""
    phases = (
        Phase("small", steps=3, blend={"code": 0.7, "prose": 0.3}, global_batch_size=4),
        Phase("large", steps=2, blend={"code": 0.7, "prose": 0.3}, global_batch_size=8),
        Phase("short", steps=2, blend={"prose": 1}, sequence_length=2),
    )
    sources = open_sources(make_dataset)

    def steps(dp_rank: int, dp_size: int, start: int) -> list[list[MicroBatch]]:
        plan = PhaseSchedule(phases, 7, 12, SEQ_LENGTH)
        loader = MicroBatchLoader(
            plan, sources, MICRO_BATCH, dp_rank, dp_size, num_workers, masked=True, boundary_loss=False
        )
        return list(loader.steps(start, 7))

    plan, whole = PhaseSchedule(phases, 7, 12, SEQ_LENGTH), steps(0, 1, 0)
    assert [len(step) for step in whole] == [2, 2, 2, 4, 4, 6, 6]
    sample = 0
    for step in whole:
        assert [batch.index for batch in step] == list(range(len(step)))
        for batch in step:
            located = [plan.locate(i) for i in range(sample, sample + MICRO_BATCH)]
            rows = [sources[at.source].sample(at.ordinal, documents=True) for at in located]
            tokens, documents = (np.stack(parts) for parts in zip(*rows, strict=True))
            length = 2 if located[0].phase == "short" else SEQ_LENGTH
            assert batch.tokens.shape == (MICRO_BATCH * SEQ_LENGTH // length, length)
            assert torch.equal(batch.tokens.flatten(), torch.from_numpy(tokens[:, :-1]).flatten())
            crossing = torch.from_numpy(documents[:, 1:] != documents[:, :-1]).flatten()
            assert torch.equal(batch.targets.flatten() < 0, crossing)
            assert batch.num_targets == int((~crossing).sum())
            assert batch.documents is not None and (batch.documents[:, 0] == 0).all()
            assert torch.equal(batch.documents.diff() != 0, ~(~crossing.view(-1, length)[:, :-1]))
            assert batch.num_documents == int((batch.documents[:, -1] + 1).sum())
            sample += MICRO_BATCH
    assert sample == plan.num_samples
    for dp_size, start in ((2, 0), (2, 4), (1, 6)):
        ranks = [steps(rank, dp_size, start) for rank in range(dp_size)]
        for number, shares in enumerate(zip(*ranks, strict=True), start=start):
            assert batch_hash([batch for share in shares for batch in share]) == batch_hash(whole[number])
