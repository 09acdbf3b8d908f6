from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np

from data.indexed import IndexedDataset
from data.token_source import Concatenation

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
