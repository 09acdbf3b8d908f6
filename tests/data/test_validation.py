from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from data.indexed_dataset import IndexedDataset
from data.validation import ValidationSet, unigram_entropy

MakeDataset = Callable[..., IndexedDataset]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 16])
def test_every_window_counts_once_at_any_size(make_dataset: MakeDataset, dp_size: int, micro_batch_size: int) -> None:
    validation = ValidationSet("code", make_dataset("code", 503), 8, num_samples=11, vocab_size=1000)
    ranks = [list(validation.batches(micro_batch_size, rank, dp_size)) for rank in range(dp_size)]
    numbers = [len(batches) for batches in ranks]
    assert max(numbers) - min(numbers) <= 1 and sum(numbers) == -(-11 // micro_batch_size)
    by_index = {batch.index: batch for batches in ranks for batch in batches}
    assert sorted(by_index) == list(range(sum(numbers)))
    assert all(batch.index % dp_size == rank for rank, batches in enumerate(ranks) for batch in batches)
    for index, batch in by_index.items():
        rows = micro_batch_size if index < len(by_index) - 1 else 11 - index * micro_batch_size
        assert batch.tokens.shape == batch.targets.shape == (rows, 8)
    [whole] = validation.batches(11, 0, 1)
    in_order = [by_index[index] for index in range(len(by_index))]
    assert torch.equal(torch.cat([batch.tokens for batch in in_order]), whole.tokens)
    assert torch.equal(torch.cat([batch.targets for batch in in_order]), whole.targets)


def test_windows_are_spread_and_never_overlap(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", 503)
    validation = ValidationSet("code", dataset, 8, num_samples=11, vocab_size=1000)
    assert len(set(validation.windows)) == 11
    assert validation.windows[0] == 0 and validation.windows[-1] >= 55  # of 62
    [batch] = validation.batches(11, 0, 1)
    for row, window in zip(batch.targets, validation.windows, strict=True):
        assert row.tolist() == dataset.tokens(window * 8 + 1, 8).tolist()
    everything = ValidationSet("code", dataset, 8, num_samples=10_000, vocab_size=1000)
    assert everything.windows == list(range(62))


def test_counts_are_of_the_targets(make_dataset: MakeDataset) -> None:
    validation = ValidationSet("code", make_dataset("code", 503), 8, num_samples=11, vocab_size=1000)
    [batch] = validation.batches(11, 0, 1)
    counts = validation.target_counts()
    assert counts.shape == (1000,) and counts.sum() == 88
    assert all(counts[token] == (batch.targets == token).sum() for token in batch.targets.unique())


def test_unigram_entropy_in_nats() -> None:
    assert unigram_entropy(torch.tensor([5, 5, 5, 5])) == pytest.approx(math.log(4))
    assert unigram_entropy(torch.tensor([7, 0, 0])) == 0.0
    assert unigram_entropy(torch.tensor([3, 1])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_no_fixed_distribution_beats_the_unigram_entropy(make_dataset: MakeDataset) -> None:
    counts = ValidationSet("code", make_dataset("code", 503), 8, num_samples=11, vocab_size=1000).target_counts()
    frequencies = counts / counts.sum()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        guess = torch.softmax(torch.log(frequencies + 1e-3) + 0.1 * torch.randn(1000, generator=generator), dim=0)
        assert -(frequencies * torch.log(guess)).sum() > unigram_entropy(counts)


def test_misuse_is_explained(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", 20)
    with pytest.raises(ValueError, match="fewer than one window"):
        ValidationSet("code", dataset, 20, 1, 1000)
    with pytest.raises(ValueError, match="0 of length 4"):
        ValidationSet("code", dataset, 4, 0, 1000)
    with pytest.raises(ValueError, match="vocabulary of 2"):
        ValidationSet("code", dataset, 4, 3, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        next(ValidationSet("code", dataset, 4, 3, 1000).batches(1, 2, 2))
    with pytest.raises(ValueError, match="no tokens were counted"):
        unigram_entropy(torch.zeros(4, dtype=torch.int64))
