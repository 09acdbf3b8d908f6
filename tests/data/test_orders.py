"""Both orders: every token once an epoch, documents whole and numbered right, another order each epoch."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

import data.order as orders
from data.order import DocumentOrder, WindowOrder, shuffled
from tests.data.streams import CountingStream

ORDERS = [WindowOrder, DocumentOrder]
SHUFFLED = [2, 0, 5, 7, 4, 1, 3, 6]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of several runs in a stream of some dozen documents, of which one is kept."""
    monkeypatch.setattr(orders, "_GROUP_DOCUMENTS", 8)
    monkeypatch.setattr(orders, "_MIN_RUN", 2)
    monkeypatch.setattr(orders, "_MIN_RUNS_IN_GROUP", 3)
    monkeypatch.setattr(orders, "_MAX_RUNS", 20)
    monkeypatch.setattr(orders, "_GROUPS", orders._Kept(8))


def check_epoch(order: WindowOrder | DocumentOrder, stream: CountingStream, seq_length: int, epoch: int) -> None:
    targets = np.zeros(stream.num_tokens, dtype=int)
    for position in range(order.num_windows):
        tokens, documents = order.window(epoch, position, documents=True)
        assert documents is not None and documents.dtype == np.int32
        assert tokens.shape == documents.shape == (seq_length + 1,)
        assert np.array_equal(order.window(epoch, position).tokens, tokens)
        targets[tokens[1:]] += 1
        borders = np.diff(documents) == 1
        assert documents[0] == 0 and np.array_equal(borders, np.diff(documents) != 0)
        # Within a document the tokens follow each other; a new number is another document.
        assert np.array_equal(borders, np.diff(stream.document[tokens]) != 0)
        assert (np.diff(tokens)[~borders] == 1).all()
    assert targets.max() == 1 and targets.sum() == order.num_windows * seq_length
    assert stream.num_tokens - 1 - targets.sum() < seq_length


@pytest.mark.parametrize("make", ORDERS)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("small_groups")
def test_every_token_is_a_target_once_an_epoch(make: type[WindowOrder | DocumentOrder], seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 3, 60, draw.randint(1, 20)]) for _ in range(draw.randint(1, 80))] + [40]
    seq_length = draw.randint(1, 30)
    stream = CountingStream(lengths)
    order = make(stream, seq_length, "key")
    for epoch in (0, 3):
        check_epoch(order, stream, seq_length, epoch)


@pytest.mark.parametrize("make", ORDERS)
def test_epochs_and_keys_give_other_orders(make: type[WindowOrder | DocumentOrder]) -> None:
    stream = CountingStream([7] * 200)

    def firsts(key: str, epoch: int) -> list[int]:
        order = make(stream, 16, key)
        return [int(order.window(epoch, position).tokens[0]) for position in range(order.num_windows)]

    assert firsts("a", 0) == firsts("a", 0)
    assert firsts("a", 0) != firsts("a", 1) and firsts("a", 0) != firsts("b", 0)
    cuts = [{first % 16 for first in firsts("a", epoch)} for epoch in (0, 1)]
    assert (cuts[0] == cuts[1] == {0}) == (make is WindowOrder)  # documents: cut elsewhere in each epoch


@pytest.mark.usefixtures("small_groups")
def test_a_sorted_corpus_is_mixed() -> None:
    """Documents of a window are neighbours in the corpus no more often than chance has it."""
    stream = CountingStream([5] * 400)
    order = DocumentOrder(stream, 50, "key")
    neighbours = total = 0
    for position in range(order.num_windows):
        found = stream.document[order.window(0, position).tokens]
        steps = np.diff(found)[np.diff(found) != 0]
        neighbours, total = neighbours + int((np.abs(steps) == 1).sum()), total + len(steps)
    assert total > 300 and neighbours < 0.25 * total  # 8 documents a group, 2 in a run


def test_reading_a_window_of_many_documents_reads_a_part_of_the_index() -> None:
    stream = CountingStream([3] * 200_000)
    order = DocumentOrder(stream, 100, "key")
    order.window(0, 5)
    assert stream.reads < 40_000  # a group, and where each run of documents begins


def test_copies_for_workers_are_small_and_agree() -> None:
    stream = CountingStream([3] * 2000)
    order = DocumentOrder(stream, 100, "key")
    expected = [order.window(1, position).tokens for position in range(10)]
    copy = pickle.loads(pickle.dumps(order))
    assert copy._epoch is None
    assert all(np.array_equal(copy.window(1, i).tokens, tokens) for i, tokens in enumerate(expected))


def test_two_orders_of_one_key_do_not_mix() -> None:
    """What is kept of one stream's groups is not another's."""
    one, other = (DocumentOrder(CountingStream([length] * 30), 10, "key") for length in (5, 6))
    assert one.window(0, 0).tokens.max() < 150
    assert not np.array_equal(one.window(0, 0).tokens, other.window(0, 0).tokens)


def test_shuffled_is_a_permutation_that_stays() -> None:
    assert sorted(shuffled(1000, "key").tolist()) == list(range(1000))
    assert shuffled(8, "key").tolist() == SHUFFLED
    assert shuffled(8, "other").tolist() != SHUFFLED
    assert shuffled(0, "key").tolist() == []
