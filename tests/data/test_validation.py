import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import train_tokenizer
from data.validation import ValidationSet
from tests.data.streams import write, write_random


@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(1, 3), (4, 4), (16, 2)])
def test_every_window_is_validated_once_on_any_number_of_ranks(tmp_path, dp_size: int, micro_batch_size: int) -> None:
    validation = ValidationSet("code", write_random(tmp_path / "code", 503), 8, num_samples=11, vocab_size=1000)
    with pytest.raises(ValueError, match=r"503 tokens, .* train.sequence_length \+ 1 = 504; lower train.seq"):
        ValidationSet("code", validation.stream, 503, num_samples=11, vocab_size=1000)
    ranks = [list(validation.batches(micro_batch_size, rank, dp_size)) for rank in range(dp_size)]
    assert [len(batches) for batches in ranks] == [
        len(validation.batches(micro_batch_size, rank, dp_size)) for rank in range(dp_size)
    ]
    in_order = sorted((batch for batches in ranks for batch in batches), key=lambda batch: batch.index)
    assert [batch.index for batch in in_order] == list(range(-(-11 // micro_batch_size)))
    assert all(batch.index % dp_size == rank for rank, batches in enumerate(ranks) for batch in batches)
    [whole] = validation.batches(11, 0, 1)
    assert torch.equal(torch.cat([batch.tokens for batch in in_order]), whole.tokens)
    assert torch.equal(torch.cat([batch.targets for batch in in_order]), whole.targets)
    counts = sum(validation.target_counts(rank, dp_size) for rank in range(dp_size))
    assert torch.equal(torch.as_tensor(counts), torch.bincount(whole.targets.flatten(), minlength=1000))


def test_windows_are_spread_and_never_overlap(tmp_path: Path) -> None:
    dataset = write_random(tmp_path / "code", 503)
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
        # Every token but the first one and those after the last whole window.
        assert batch.targets.flatten().tolist() == dataset.tokens(1, 62 * 8).tolist()


def test_documents_are_numbered_and_targets_across_borders_uncounted(tmp_path: Path) -> None:
    dataset = write_random(tmp_path / "code", 400)
    lengths = np.diff(dataset.document_offsets(0, dataset.num_documents))
    owners = np.repeat(np.arange(dataset.num_documents), lengths)
    joined, masked, uncounted = (
        ValidationSet("code", dataset, 12, 7, 1000, *options) for options in ((), (True,), (True, False))
    )
    [one], [other], [third] = (each.batches(7, 0, 1) for each in (joined, masked, uncounted))
    assert one.documents is None and torch.equal(one.targets, other.targets)
    crossing = []
    for row, sample in zip(other.documents.tolist(), range(7), strict=True):
        found = owners[masked.window(sample) * 12 :][:13]
        assert row == np.unique(found[:-1], return_inverse=True)[1].tolist()
        crossing.append(found[1:] != found[:-1])
    assert torch.equal(third.targets < 0, torch.tensor(np.stack(crossing)))
    counts = [each.target_counts() for each in (joined, masked, uncounted)]
    assert torch.equal(counts[0], counts[1]) and counts[0].sum() == 7 * 12
    assert counts[2].sum() == third.num_targets == 7 * 12 - np.stack(crossing).sum() < 7 * 12


def test_statistics_are_of_exactly_the_targets(tmp_path: Path) -> None:
    text = "naïve façade, 数据 🙂\n"
    tokenizer = train_tokenizer([text * 3] * 5, 280)
    documents = [[*ids, tokenizer.eod_id] for ids in tokenizer.encode_batch([text * n for n in range(1, 20)])]
    validation = ValidationSet("web", write(tmp_path / "held_out", documents), 16, None, vocab_size=300)
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    statistics = validation.statistics(validation.target_counts(), lengths)
    stream = [token for document in documents for token in document]
    targets = stream[1 : 1 + validation.num_samples * 16]
    assert statistics.targets == len(targets)
    # All bytes but those before the first target and after the last window.
    total, rest = sum(n * len(text.encode()) for n in range(1, 20)), [stream[0], *stream[1 + len(targets) :]]
    assert statistics.text_bytes == total - sum(int(lengths[token]) for token in rest)
    assert statistics.bits_per_byte(2.0) == pytest.approx(2.0 * len(targets) / math.log(2) / statistics.text_bytes)
    shares = np.unique(targets, return_counts=True)[1] / len(targets)
    assert statistics.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())
