from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data.indexed import IndexedDataset, IndexedDatasetWriter
from data.sources import bytes_per_token
from data.token_source import Concatenation, TokenRange
from data.tokenizer import train_tokenizer
from data.validation import ValidationSet, Yardstick, unigram_entropy

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
    windows = [validation.window(sample) for sample in range(11)]
    assert len(set(windows)) == 11
    assert windows[0] == 0 and windows[-1] >= 55  # of 62
    [batch] = validation.batches(11, 0, 1)
    for row, window in zip(batch.targets, windows, strict=True):
        assert row.tolist() == dataset.tokens(window * 8 + 1, 8).tolist()
    for num_samples in (10_000, None):
        everything = ValidationSet("code", dataset, 8, num_samples, vocab_size=1000)
        assert everything.num_samples == 62
        [batch] = everything.batches(100, 0, 1)
        # Every token but the first, and those behind the last whole window.
        assert batch.targets.flatten().tolist() == dataset.tokens(1, 62 * 8).tolist()


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


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1\n", "naïve façade, 数据 🙂\n"])
def test_bits_per_byte_of_the_very_targets(text: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([text * 3] * 5, 280)
    documents = [[*ids, tokenizer.eod_id] for ids in tokenizer.encode_batch([text * n for n in range(1, 20)])]
    with IndexedDatasetWriter(tmp_path / "held_out", np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    validation = ValidationSet("web", IndexedDataset(tmp_path / "held_out"), 16, None, vocab_size=300)
    yardstick = Yardstick.of(validation.target_counts(), tokenizer.byte_lengths())
    stream = [token for document in documents for token in document]
    targets = stream[1 : 1 + validation.num_samples * 16]
    # The bytes before the first target, and of what is left behind the last window.
    rest = [tokenizer.encode_batch([text])[0][:1], stream[1 + len(targets) :]]
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    assert yardstick.targets == len(targets)
    total = sum(n * len(text.encode()) for n in range(1, 20))
    assert yardstick.text_bytes == total - sum(int(lengths[token]) for part in rest for token in part)
    assert yardstick.bits_per_byte(2.0) == pytest.approx(2.0 * len(targets) / math.log(2) / yardstick.text_bytes)
    # A model that knows each byte's bits: 8 bits a byte.
    nats = 8 * math.log(2) * yardstick.text_bytes / len(targets)
    assert yardstick.bits_per_byte(nats) == pytest.approx(8.0)


def test_bits_per_byte_by_the_average_of_the_source(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("web", 500)
    validation = ValidationSet("web", dataset, 8, 11, vocab_size=1000)
    counts = validation.target_counts()
    assert Yardstick.of(counts, None, bytes_per_token(dataset)).bits_per_byte(1.0) is None
    facts = Path(f"{dataset.prefix}.json")
    facts.write_text('{"tokens": 500, "text_bytes": 2000}')
    yardstick = Yardstick.of(counts, None, bytes_per_token(dataset))
    assert yardstick.text_bytes == 88 * 4.0
    assert bytes_per_token(TokenRange(dataset, 1, dataset.num_sequences)) == 4.0
    both = Concatenation([dataset, make_dataset("other", 300)])
    assert bytes_per_token(both) is None
    (facts.parent / "other.json").write_text('{"tokens": 300, "text_bytes": 400}')
    assert bytes_per_token(both) == 2400 / 800
    for wrong in (
        '{"tokens": 499, "text_bytes": 2000}',
        '{"tokens": 500}',
        "no JSON",
        '{"tokens": 500, "text_bytes": 0}',
    ):
        facts.write_text(wrong)
        assert bytes_per_token(dataset) is None
