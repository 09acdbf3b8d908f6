"""Which document each token is of, from the index on disk to the micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from data.indexed import IndexedDataset, document_numbers
from data.loader import UNCOUNTED, MicroBatch, MicroBatchLoader
from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule
from data.validation import ValidationSet

MakeDataset = Callable[..., IndexedDataset]
LENGTH = 12


def lengths_of(dataset: IndexedDataset) -> list[int]:
    return [len(dataset.document(document)) for document in range(dataset.num_documents)]


def expected(dataset: IndexedDataset, start: int, length: int) -> list[int]:
    """By hand: the documents of the tokens, numbered anew."""
    owners = np.repeat(np.arange(dataset.num_documents), lengths_of(dataset))[start : start + length]
    return (np.unique(owners, return_inverse=True)[1]).tolist()


def test_every_window_at_every_place(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", 300)
    assert min(lengths_of(dataset)) < 5 and len(lengths_of(dataset)) > 5
    for length in (1, 2, 90):
        for start in range(300 - length + 1):
            numbers = document_numbers(dataset, start, length)
            assert numbers.dtype == np.int32 and numbers.tolist() == expected(dataset, start, length)


def loader(dataset: IndexedDataset, **options: bool) -> MicroBatchLoader:
    sources = {"code": SampleSource("code", dataset, LENGTH, seed=1, vocab_size=1000)}
    return MicroBatchLoader(PhaseSchedule([Phase("all", 1.0, {"code": 1.0})], 12, 4), sources, 2, 0, 1, 0, **options)


def batches(dataset: IndexedDataset, **options: bool) -> list[MicroBatch]:
    return [batch for step in loader(dataset, **options).steps(0, 12) for batch in step]


def test_micro_batches(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", 900)
    joined, masked = batches(dataset), batches(dataset, masked=True)
    uncounted = batches(dataset, masked=True, boundary_loss=False)
    source, at_the_end = loader(dataset).sources["code"], 0
    for step_and_place, (a, b, c) in enumerate(zip(joined, masked, uncounted, strict=True)):
        assert a.documents is a.num_documents is a.num_targets is b.num_targets is None
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
        assert torch.equal(a.tokens, c.tokens) and torch.equal(b.documents, c.documents)
        rows = [source.sample(2 * step_and_place + row, documents=True)[1] for row in range(2)]
        assert b.documents.dtype == torch.int32 and b.documents.is_contiguous()
        assert b.documents.tolist() == [row[:-1].tolist() for row in rows]
        assert b.num_documents == sum(len(set(row[:-1].tolist())) for row in rows)
        boundary = torch.tensor(np.stack([row[1:] != row[:-1] for row in rows]))
        assert torch.equal(c.targets, torch.where(boundary, UNCOUNTED, a.targets))
        assert c.num_targets == 2 * LENGTH - int(boundary.sum())
        at_the_end += int(boundary[:, -1].sum())
    assert at_the_end > 0, "a last target of another document is among them"


def test_a_micro_batch_is_a_copy() -> None:
    """Of a single row, too, which is contiguous whatever is cut off it: its memory is another micro-batch's next."""
    row = torch.zeros(1, LENGTH + 1, dtype=torch.int32)
    batch = MicroBatch.of(0, row, row)
    row += 1
    assert batch.documents is not None and not (batch.tokens.any() or batch.targets.any() or batch.documents.any())


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_validation_sets(make_dataset: MakeDataset, micro_batch_size: int) -> None:
    dataset = make_dataset("code", 400)
    sets = [ValidationSet("code", dataset, LENGTH, 7, 1000, *options) for options in ((), (True,), (True, False))]
    joined, masked, uncounted = (
        [batch for rank in range(2) for batch in one.batches(micro_batch_size, rank, 2)] for one in sets
    )
    assert all(a.documents is None and torch.equal(a.targets, b.targets) for a, b in zip(joined, masked, strict=True))
    for batch in [*masked, *uncounted]:
        first = batch.index * micro_batch_size
        for row, window in zip(batch.documents, map(sets[1].window, range(first, sets[1].num_samples)), strict=False):
            assert row.tolist() == expected(dataset, window * LENGTH, LENGTH)
    counts = [one.target_counts() for one in sets]
    assert torch.equal(counts[0], counts[1]) and counts[0].sum() == 7 * LENGTH
    assert counts[2].sum() == sum(batch.num_targets for batch in uncounted) < 7 * LENGTH
    boundaries = sum(int((batch.targets < 0).sum()) for batch in uncounted)
    assert counts[2].sum() == 7 * LENGTH - boundaries
