from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedDataset
from tests.data.streams import write


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Write and open a dataset of random documents: make_dataset("code", num_tokens=500)."""

    def make(name: str, num_tokens: int = 500) -> IndexedDataset:
        rng = np.random.default_rng([num_tokens, *name.encode()])
        borders = np.cumsum(rng.integers(1, 60, num_tokens))
        return write(tmp_path / name, np.split(rng.integers(0, 1000, num_tokens), borders[borders < num_tokens]))

    return make
