from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from data.indexed import IndexedDataset
from data.token_source import Concatenation, side_by_side

MakeDataset = Callable[..., IndexedDataset]


def test_tokens_and_documents_across_all_borders(make_dataset: MakeDataset) -> None:
    parts = [make_dataset(name, size) for name, size in (("a", 70), ("b", 1), ("c", 133))]
    parts.append(parts[1])  # twice
    source = Concatenation(parts)
    stream = np.concatenate([part.tokens(0, part.num_tokens) for part in parts])
    assert (source.num_tokens, source.num_documents) == (205, sum(part.num_documents for part in parts))
    for start in range(206):
        for end in range(start, 206):
            assert np.array_equal(source.tokens(start, end - start), stream[start:end])
    offsets = [0]
    for part in parts:
        offsets += (offsets[-1] + np.cumsum([len(part.document(i)) for i in range(part.num_documents)])).tolist()
    count = source.num_documents
    for first in range(count + 1):
        for last in range(first, count + 1):
            assert source.document_offsets(first, last).tolist() == offsets[first : last + 1]


def test_outside_is_an_error(make_dataset: MakeDataset) -> None:
    source = Concatenation([make_dataset("a", 70), make_dataset("b", 30)])
    for start, length in ((-1, 2), (0, 101), (101, 0), (5, -1)):
        with pytest.raises(IndexError, match="a and 1 more"):
            source.tokens(start, length)
    for first, last in ((-1, 0), (1, 0), (0, source.num_documents + 1)):
        with pytest.raises(IndexError, match="a and 1 more"):
            source.document_offsets(first, last)
    with pytest.raises(ValueError, match="no files"):
        Concatenation([])


def test_identity_is_of_the_parts_in_order(make_dataset: MakeDataset) -> None:
    a, b = make_dataset("a", 70), make_dataset("b", 30)
    source = Concatenation([a, b, a])
    assert source.part_identities() == [a.identity(), b.identity(), a.identity()]
    assert source.identity() == Concatenation([a, b, a]).identity()
    for other in ([a, a, b], [a, b], [a, b, b]):
        assert source.identity() != Concatenation(other).identity()
    assert source.identity().startswith("parts-1:") and source.identity() != a.identity()


def test_pickles_without_its_tokens(make_dataset: MakeDataset) -> None:
    source = Concatenation([make_dataset("a", 5000), make_dataset("b", 5000)])
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    assert np.array_equal(pickle.loads(pickled).tokens(4990, 20), source.tokens(4990, 20))


def test_side_by_side_keeps_the_order_and_raises_the_first_error() -> None:
    assert side_by_side(lambda item: item * 2, range(100)) == list(range(0, 200, 2))
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda item: 1 // (item - 7), range(100))
    assert side_by_side(str, []) == []
