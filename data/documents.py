"""Which document each token of a sample belongs to, and which targets count.

A sample is a piece of a stream of documents laid end to end. Its documents are numbered from 0, in the order in which
they come, a document of which the sample holds only a part included. Empty documents have no number.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from data.bundle import TokenSource

if TYPE_CHECKING:  # loader workers do without
    import torch

UNCOUNTED = -1
"""A target that does not count: its token has no loss, and the mean is over the others."""


def document_numbers(source: TokenSource, start: int, length: int) -> np.ndarray:
    """The number, from 0, of the document of each of the tokens [start, start + length) of a stream: int32 [length].

    Looks at O(log documents) documents to find the first, and at those that begin here.
    """

    def offset(document: int) -> int:
        return int(source.document_offsets(document, document)[0])

    begins = np.zeros(length, dtype=np.int32)
    # Documents that begin behind the first token, in blocks, up to one that begins behind the last.
    block, end = 16, source.num_documents
    document = bisect_right(range(end + 1), start, key=offset)
    while document < end:
        offsets = source.document_offsets(document, min(document + block, end)) - start
        begins[offsets[offsets < length]] = 1
        if offsets[-1] >= length:
            break
        document, block = document + block, 4 * block
    return begins.cumsum(dtype=np.int32)


def without_boundaries(targets: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Targets (int64 [rows, length]) with `UNCOUNTED` wherever the target is of another document than its token.

    documents: int32 [rows, length + 1], of the tokens and of the last target.
    """
    return targets.masked_fill(documents[:, 1:] != documents[:, :-1], UNCOUNTED)
