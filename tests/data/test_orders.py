"""Both orders: every token once an epoch, documents whole and numbered right, another order each epoch."""

from __future__ import annotations

import random

import numpy as np
import pytest

import data.order as orders
from data.order import DocumentOrder, SampleSource, WindowOrder, shuffled
from tests.data.streams import CountingStream

ORDERS = [WindowOrder, DocumentOrder]
SHUFFLED = [2, 0, 5, 7, 4, 1, 3, 6]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of several runs in a stream of some dozen documents, of which one is kept."""
    monkeypatch.setattr(orders, "_GROUP_DOCUMENTS", 8)
    monkeypatch.setattr(orders, "_RUN_DOCUMENTS", 2)
    monkeypatch.setattr(orders, "_RUNS_IN_GROUP", 3)
    monkeypatch.setattr(orders, "_SEARCHED_DOCUMENTS", 3)
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
        # Within a document the tokens follow each other; another document has another number.
        assert (borders >= (np.diff(stream.document[tokens]) != 0)).all()
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


def test_shuffled_is_a_permutation_that_stays() -> None:
    assert sorted(shuffled(1000, "key").tolist()) == list(range(1000))
    assert shuffled(8, "key").tolist() == SHUFFLED
    assert shuffled(8, "other").tolist() != SHUFFLED
    assert shuffled(0, "key").tolist() == []


class _Even:
    """A stream of 10^8 documents or more, of which nothing is stored: document d begins at 517 d + (d^2 mod 256)."""

    num_documents = 10**8
    num_tokens = 517 * num_documents

    def __init__(self) -> None:
        self.reads = 0

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        self.reads += 1
        documents = np.arange(first, last + 1, dtype=np.int64)
        return np.where(documents < self.num_documents, 517 * documents + documents**2 % 256, self.num_tokens)

    def tokens(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length)


def test_the_first_sample_of_a_large_source_reads_little() -> None:
    stream = _Even()
    order = DocumentOrder(stream, 4096, "key")  # type: ignore[arg-type]
    first = order.window(0, 0).tokens
    assert stream.reads < 300 and len(first) == 4097
    before = stream.reads
    for position in range(1, 100):
        order.window(0, position)
    assert stream.reads == before  # of one group


def test_three_hundred_large_sources_keep_a_group_each() -> None:
    """Windows in turn, as a blend draws them: none is shuffled twice."""
    streams = [_Even() for _ in range(40)]
    made = [DocumentOrder(stream, 4096, str(number)) for number, stream in enumerate(streams)]  # type: ignore[arg-type]
    reads = []
    for position in range(3):
        for order in made:
            order.window(0, position)
        reads.append(sum(stream.reads for stream in streams))
    assert reads[0] == reads[-1]
    assert orders._KEPT_DOCUMENTS > 300 * 1.5 * orders._GROUP_DOCUMENTS


def test_a_large_source_of_an_earlier_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = CountingStream([20] * 100)
    source = SampleSource("web", stream, 16, 0, 10_000)  # type: ignore[arg-type]
    small = source.description()
    assert "shuffle" not in small and source.replaces(small) is None
    monkeypatch.setattr(orders, "_GROUP_DOCUMENTS", 8)
    assert source.replaces(source.description()) is None
    assert "version shuffled otherwise" in (source.replaces(small) or "")
