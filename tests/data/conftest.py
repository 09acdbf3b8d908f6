from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedDataset, IndexedDatasetWriter

VOCAB_SIZE = 1000


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Write and open a dataset of random documents: make_dataset("code", num_tokens=500)."""

    def make(name: str, num_tokens: int = 500, vocab_size: int = VOCAB_SIZE) -> IndexedDataset:
        rng = np.random.default_rng([num_tokens, *name.encode()])
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            left = num_tokens
            while left:
                length = min(left, int(rng.integers(1, 60)))
                writer.add_document(rng.integers(0, vocab_size, length))
                left -= length
        return IndexedDataset(tmp_path / name)

    return make
