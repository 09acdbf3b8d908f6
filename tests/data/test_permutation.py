from __future__ import annotations

import numpy as np
import pytest

from data.order import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_is_a_bijection(size: int) -> None:
    permutation = Permutation(size, "key")
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_is_a_pure_function_of_size_and_key() -> None:
    a, b, c = Permutation(1000, "a"), Permutation(1000, "a"), Permutation(1000, "b")
    order = [a(i) for i in range(1000)]
    assert [b(i) for i in reversed(range(1000))] == order[::-1]
    assert sum(c(i) == order[i] for i in range(1000)) < 10


def test_order_of_a_checkpoint_never_changes() -> None:
    """A change here reorders the data of every run that is to be resumed."""
    assert [Permutation(1000, "seed")(i) for i in range(8)] == [784, 472, 946, 203, 4, 264, 436, 221]


def test_looks_shuffled() -> None:
    """Neighbours land far apart, as often before as after, and no position is favoured over many keys."""
    size = 2000
    order = np.array([Permutation(size, "x")(i) for i in range(size)])
    steps = np.diff(order)
    assert 0.45 < (steps > 0).mean() < 0.55
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.08
    assert 0.30 * size < np.abs(steps).mean() < 0.37 * size  # a third, for uniform draws
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.08
    firsts = np.array([Permutation(10, f"{k}")(3) for k in range(4000)])
    counts = np.bincount(firsts, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001
