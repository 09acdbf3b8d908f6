"""Which document each token of a sample belongs to, and which targets count.

A sample is a piece of a stream of documents laid end to end. Its documents are numbered from 0, in the order in which
they come, a document of which the sample holds only a part included. Empty documents have no number.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch

from data.bundle import TokenSource

UNCOUNTED = -1
"""A target that does not count: its token has no loss, and the mean is over the others."""


def document_numbers(source: TokenSource, start: int, length: int) -> np.ndarray:
    """The number, from 0, of the document of each of the tokens [start, start + length) of a stream: int32 [length].

    O(log documents) to find the first, and what lies in between.
    """

    def offset(document: int) -> int:
        return int(source.document_offsets(document, document)[0])

    documents = range(source.num_documents + 1)
    first = bisect_right(documents, start, key=offset)
    last = bisect_right(documents, start + length - 1, lo=first, key=offset)
    begins = np.zeros(length, dtype=np.int32)
    if first < last:  # documents that begin behind the first token
        begins[source.document_offsets(first, last - 1) - start] = 1
    return begins.cumsum(dtype=np.int32)


def without_boundaries(targets: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Targets (int64 [rows, length]) with `UNCOUNTED` wherever the target is of another document than its token.

    documents: int32 [rows, length + 1], of the tokens and of the last target.
    """
    return targets.masked_fill(documents[:, 1:] != documents[:, :-1], UNCOUNTED)
