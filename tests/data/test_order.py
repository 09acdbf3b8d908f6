"""Orders of samples: each token once an epoch, numbered documents, another order in each epoch, added files."""

import random
from collections import Counter

import numpy as np
import pytest

import data.order as orders
from data.indexed import Concatenation
from data.order import DocumentOrder, Growth, Permutation, SampleSource, WindowOrder, num_windows, shuffled
from tests.data.streams import CountingStream

ORDERS = [WindowOrder, DocumentOrder]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups, so that a stream of a few dozen documents has several groups with several runs."""
    monkeypatch.setattr(orders, "_GROUP_DOCUMENTS", 8)
    monkeypatch.setattr(orders, "_RUN_DOCUMENTS", 2)
    monkeypatch.setattr(orders, "_RUNS_IN_GROUP", 3)


def check_epoch(order: WindowOrder | DocumentOrder, stream: CountingStream, seq_length: int, epoch: int) -> None:
    targets = np.zeros(stream.num_tokens, dtype=int)
    for position in range(order.num_windows):
        tokens, documents = order.window(epoch, position, documents=True)
        assert documents is not None and documents.dtype == np.int32
        assert tokens.shape == documents.shape == (seq_length + 1,)
        assert np.array_equal(order.window(epoch, position, documents=False).tokens, tokens)
        targets[tokens[1:]] += 1
        borders = np.diff(documents) == 1
        assert documents[0] == 0 and np.array_equal(borders, np.diff(documents) != 0)
        # Tokens of a document are consecutive, and the next document has another number.
        assert (borders >= (np.diff(stream.document[tokens]) != 0)).all()
        assert (np.diff(tokens)[~borders] == 1).all()
    assert targets.max() == 1 and targets.sum() == order.num_windows * seq_length
    assert stream.num_tokens - 1 - targets.sum() < seq_length


@pytest.mark.parametrize("make", ORDERS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_groups")
def test_every_token_is_a_target_once_an_epoch(make: type[WindowOrder | DocumentOrder], seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 3, 60, draw.randint(1, 20)]) for _ in range(draw.randint(1, 80))] + [40]
    seq_length = draw.randint(1, 30)
    stream = CountingStream(lengths)
    order = make(stream, seq_length, "key")
    for epoch in (0, 3):
        check_epoch(order, stream, seq_length, epoch)


@pytest.mark.usefixtures("small_groups")
def test_a_sorted_corpus_is_shuffled() -> None:
    """Consecutive documents of a window are rarely neighbours in the corpus."""
    stream = CountingStream([5] * 400)
    order = DocumentOrder(stream, 50, "key")
    neighbours = total = 0
    for position in range(order.num_windows):
        found = stream.document[order.window(0, position, documents=False).tokens]
        steps = np.diff(found)[np.diff(found) != 0]
        neighbours, total = neighbours + int((np.abs(steps) == 1).sum()), total + len(steps)
    assert total > 300 and neighbours < 0.25 * total  # 8 documents a group, 2 in a run


@pytest.mark.parametrize("size", [1, 2, 17, 4097])
def test_permutations_are_bijections(size: int) -> None:
    assert sorted(map(Permutation(size, "key"), range(size))) == list(range(size))
    assert sorted(shuffled(size, "key").tolist()) == list(range(size))


def test_the_permutations_never_change() -> None:
    """A change would reorder the data of every run that resumes."""
    assert [Permutation(1000, "seed")(i) for i in range(8)] == [784, 472, 946, 203, 4, 264, 436, 221]
    assert shuffled(8, "key").tolist() == [2, 0, 5, 7, 4, 1, 3, 6]


@pytest.mark.parametrize("order", orders.ORDERS)
def test_the_order_depends_only_on_seed_name_and_epoch(order: str) -> None:
    stream = CountingStream([7] * 60)

    def samples(name: str, seed: int, first: int = 0) -> list[tuple[int, ...]]:
        source = SampleSource(name, stream, seq_length=4, seed=seed, vocab_size=1000, order=order)
        assert source.sample(0).tokens.dtype == np.int64 and source.epochs(50) == 50 / source.num_samples
        return [tuple(source.sample(first + k).tokens) for k in range(source.num_samples)]

    assert samples("code", 1) == samples("code", 1)
    others = samples("code", 2), samples("prose", 1), samples("code", 1, first=num_windows(420, 4))
    assert all(samples("code", 1) != other for other in others)
    # Each epoch cuts shuffled documents at other places, and windows at the same ones.
    assert (set(samples("code", 1)) == set(others[2])) == (order == "windows")


def with_growth(parts: list[CountingStream], growth: list[Growth], order: str) -> SampleSource:
    return SampleSource("x", Concatenation(parts), 4, 1, 10**6, order=order, growth=growth)


@pytest.mark.parametrize("order", orders.ORDERS)
def test_a_source_may_grow_in_the_middle_of_an_epoch(order: str) -> None:
    """Past samples stay. The epoch ends with the remaining and the new windows, each once; the next has all of them."""
    parts = [CountingStream([n] * many, first=first) for n, many, first in ((5, 40, 0), (7, 30, 1000), (3, 100, 2000))]
    first = with_growth(parts[:1], [], order)
    windows = [num_windows(part.num_tokens, 4) for part in parts]
    at, later = windows[0] + 7, windows[0] + 20
    second = with_growth(parts[:2], [Growth(0, 1), Growth(at, 2)], order)
    third = with_growth(parts, [Growth(0, 1), Growth(at, 2), Growth(later, 3)], order)
    assert all(np.array_equal(first.sample(k).tokens, second.sample(k).tokens) for k in range(at))
    assert all(np.array_equal(second.sample(k).tokens, third.sample(k).tokens) for k in range(later))

    end = windows[0] + sum(windows)  # the second epoch
    places = [(id(place.order), *place[1:]) for place in map(third.place, range(windows[0], end))]
    assert len(set(places)) == len(places)
    assert sorted(Counter(order for order, _, _ in places).values()) == sorted(windows)
    newest = [i for i in range(later, end) if third.sample(i).tokens[0] >= 2000]
    assert len(newest) == windows[2]
    assert max(np.diff([later, *newest, end])) <= -(-(end - later) // windows[2])  # evenly mixed
    assert [round(third.epochs(k), 12) for k in (0, windows[0], end)] == [0, 1, 2]
    epochs = [third.epochs(k) for k in range(end + 50)]
    assert epochs == sorted(epochs)
    assert third.place(end)[1:] == (2, 0)
    everything = [third.sample(k).tokens for k in range(end, end + third.num_samples)]
    assert len({tuple(sample) for sample in everything}) == third.num_samples
