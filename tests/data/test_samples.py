from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from data.indexed import IndexedDataset
from data.order import ORDERS, Growth, SampleSource, num_windows
from data.token_source import Concatenation
from tests.data.streams import CountingStream

MakeDataset = Callable[..., IndexedDataset]


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_is_every_window_once_and_the_next_differs(make_dataset: MakeDataset, order: str) -> None:
    dataset = make_dataset("code", num_tokens=403)
    source = SampleSource("code", dataset, seq_length=4, seed=1, vocab_size=1000, order=order)
    assert source.num_samples == 100
    epochs = [[tuple(source.sample(k)) for k in range(e * 100, e * 100 + 100)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    everything = Counter(dataset.tokens(0, 403).tolist())
    for epoch in epochs:
        targets = Counter(int(token) for sample in epoch for token in sample[1:])
        assert targets.total() == 400 and not targets - everything
    assert source.sample(0).dtype == np.int64
    assert [source.epochs(k) for k in (0, 50, 100, 250)] == [0.0, 0.5, 1.0, 2.5]


@pytest.mark.parametrize("order", ORDERS)
def test_order_depends_on_seed_and_name_only(make_dataset: MakeDataset, order: str) -> None:
    dataset = make_dataset("code")

    def samples(name: str, seed: int) -> list[tuple[int, ...]]:
        source = SampleSource(name, dataset, seq_length=4, seed=seed, vocab_size=1000, order=order)
        return [tuple(source.sample(k)) for k in range(120)]

    assert samples("code", 1) == samples("code", 1)
    assert samples("code", 1) != samples("code", 2)
    assert samples("code", 1) != samples("prose", 1)


def test_documents_come_along(make_dataset: MakeDataset) -> None:
    stream = CountingStream([3, 9, 1, 30, 7] * 5)
    for order in ORDERS:
        source = SampleSource("code", stream, seq_length=16, seed=1, vocab_size=1000, order=order)
        for k in range(source.num_samples):
            tokens, documents = source.sample_and_documents(k)
            assert documents is not None and np.array_equal(tokens, source.sample(k))
            assert np.array_equal(np.diff(documents) != 0, np.diff(stream.document[tokens]) != 0)


def grown(parts: list[CountingStream], growth: list[Growth], order: str) -> SampleSource:
    return SampleSource("x", Concatenation(parts), 4, 1, 10**6, order=order, growth=growth)


@pytest.mark.parametrize("order", ORDERS)
def test_a_source_that_grows_in_the_middle_of_an_epoch(order: str) -> None:
    """What was, stays; then what was left and what is new, each once; then everything."""
    parts = [CountingStream([n] * many, first=first) for n, many, first in ((5, 40, 0), (7, 30, 1000), (3, 100, 2000))]
    first = grown(parts[:1], [], order)
    windows = [num_windows(part.num_tokens, 4) for part in parts]
    at, later = windows[0] + 7, windows[0] + 20
    second = grown(parts[:2], [Growth(0, 1), Growth(at, 2)], order)
    third = grown(parts, [Growth(0, 1), Growth(at, 2), Growth(later, 3)], order)
    assert all(np.array_equal(first.sample(k), second.sample(k)) for k in range(at))
    assert all(np.array_equal(second.sample(k), third.sample(k)) for k in range(later))

    end = windows[0] + sum(windows)  # the second epoch
    places = [(id(place.order), *place[1:]) for place in map(third.place, range(windows[0], end))]
    assert len(set(places)) == len(places)
    assert sorted(Counter(order for order, _, _ in places).values()) == sorted(windows)
    newest = [i for i in range(later, end) if third.sample(i)[0] >= 2000]
    assert len(newest) == windows[2]
    assert max(np.diff([later, *newest, end])) <= -(-(end - later) // windows[2])  # evenly mixed
    assert [round(third.epochs(k), 12) for k in (0, windows[0], end)] == [0, 1, 2]
    epochs = [third.epochs(k) for k in range(end + 50)]
    assert epochs == sorted(epochs)
    assert third.place(end)[1:] == (2, 0)
    everything = [third.sample(k) for k in range(end, end + third.num_samples)]
    assert len({tuple(sample) for sample in everything}) == third.num_samples
