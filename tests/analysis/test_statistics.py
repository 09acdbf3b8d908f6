"""Confidence intervals from few numbers."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.statistics import BLOCKS, block_estimate, estimate, estimates, pooled, share_text
from tests.programs import ROOT


def test_an_interval_is_that_of_students_t() -> None:
    found = estimate([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3) and found.half_width == pytest.approx(4.302653 * 0.8819171)
    assert not found.beyond_noise and found.text() == "+2.33% [-1.46, +6.13]"
    assert estimate([-1.0]).text() == "-1.00% (no interval)" and not estimate([-1.0]).beyond_noise


def test_small_groups_pool_their_variance() -> None:
    groups = {"a": [1.0, 3.0], "b": [5.0, 6.0, 7.0], "c": [9.0], "own": [0.0, 1.0, 2.0, 3.0, 4.0], "none": []}
    shared = pooled(groups.values())
    assert shared is not None and shared.freedom == 7 and shared.deviation == pytest.approx(np.sqrt(14 / 7))
    found = estimates(pd.DataFrame({name: pd.Series(numbers, dtype=float) for name, numbers in groups.items()}))
    assert list(found) == ["a", "b", "c", "own"]
    assert found["c"].error == pytest.approx(np.sqrt(2)) and found["c"].text().endswith("*")
    assert found["own"].error == pytest.approx(np.sqrt(2.5 / 5)) and not found["own"].shared


def test_neighbouring_steps_are_averaged_in_blocks() -> None:
    """The noise is the same for eight steps in a row. Taken as independent, its intervals would be too narrow."""
    rng, contain = np.random.default_rng(0), []
    for _ in range(500):
        found = block_estimate(list(np.repeat(rng.normal(0, 1, 24), 8)))
        contain.append(abs(found.mean) < found.half_width)
    assert np.mean(contain) == pytest.approx(0.95, abs=0.03)
    assert block_estimate([1.0] * (2 * BLOCKS - 1)).error is None


def test_a_share_is_computed_from_gaps_above_zero() -> None:
    gaps = pd.DataFrame({"best": [0.5, 1.0, 0.5, 1.0, 0.75, 9.0], "all": [1.0] * 5 + [np.nan], "below": [-1.0] * 6})
    assert share_text(gaps, "best", "all") == "0.75 ± 0.11" and share_text(gaps, "all", "all") == "1.00 ± 0.00"
    assert [share_text(gaps, "best", other) for other in ("below", "none", None)] == ["-"] * 3
    noisy = gaps.assign(all=[1.0, 40.0, 1.0, -1.0, 1.0, np.nan])
    assert share_text(noisy, "best", "all") == "-"


def test_without_its_packages_the_command_names_the_extra() -> None:
    code = (
        "import sys, runpy; sys.modules['pandas'] = None; sys.argv = ['compare.py', 'runs', 'a', 'b']; "
        "sys.path[0] = 'scripts'; runpy.run_path('scripts/compare.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and 'pip install -e ".[analysis]"' in done.stderr
