from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from data.indexed_dataset import IndexedDataset
from data.samples import SampleSource, num_windows

MakeDataset = Callable[..., IndexedDataset]


def test_windows_overlap_by_one_and_cover_every_target() -> None:
    assert [num_windows(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_an_epoch_is_every_window_once_and_the_next_differs(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", num_tokens=403)
    source = SampleSource("code", dataset, seq_length=4, seed=1, vocab_size=1000)
    assert source.num_samples == 100
    epochs = [[source.window(k) for k in range(e * 100, e * 100 + 100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream = dataset.tokens(0, 403)
    for k in range(250):
        start = source.window(k) * 4
        assert np.array_equal(source.sample(k), stream[start : start + 5])
        assert source.sample(k).dtype == np.int64


def test_order_depends_on_seed_and_name_only(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code")

    def order(name: str, seed: int) -> list[int]:
        source = SampleSource(name, dataset, seq_length=4, seed=seed, vocab_size=1000)
        return [source.window(k) for k in range(300)]

    assert order("code", 1) == order("code", 1)
    assert order("code", 1) != order("code", 2)
    assert order("code", 1) != order("prose", 1)


def test_misuse_is_explained(make_dataset: MakeDataset) -> None:
    dataset = make_dataset("code", num_tokens=10)
    with pytest.raises(ValueError, match=r"10 tokens, fewer than one sample of seq_length \+ 1 = 11"):
        SampleSource("code", dataset, seq_length=10, seed=0, vocab_size=1000)
    with pytest.raises(ValueError, match="seq_length must be positive"):
        SampleSource("code", dataset, seq_length=0, seed=0, vocab_size=1000)
    source = SampleSource("code", dataset, seq_length=9, seed=0, vocab_size=3)
    with pytest.raises(ValueError, match=r"'code'.*vocabulary of 3"):
        source.sample(0)
    with pytest.raises(IndexError, match="negative"):
        source.sample(-1)
