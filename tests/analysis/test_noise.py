"""How sure a mean of few numbers is."""

from __future__ import annotations

import pytest

from analysis.noise import Estimate, Pooled, estimate, pooled, share_cell, share_of, spread, student_quantile


def test_the_standard_error_is_that_of_the_mean():
    assert spread([1.0, 2.0, 3.0, 6.0]).error == pytest.approx((14 / 3) ** 0.5 / 2)
    assert (spread([5.0]).mean, spread([5.0]).deviation, spread([5.0]).error) == (5.0, None, None)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of published tables
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_of_students_t(freedom: int, quantile: float):
    assert student_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_groups_of_several_say_together_how_numbers_scatter():
    # Squares around the means: 2 with one degree of freedom, 2 with two.
    assert pooled([[1.0, 3.0], [10.0, 11.0, 12.0], [7.0]]) == Pooled((4 / 3) ** 0.5, 3)
    assert pooled([[1.0], [2.0]]) is None


def test_few_numbers_take_the_pooled_deviation_and_five_their_own():
    shared = Pooled(0.5, 8)
    assert estimate([2.0], shared) == Estimate(2.0, 0.5, 1, 8, shared=True)
    assert estimate([2.0, 4.0], shared) == Estimate(3.0, 0.5 / 2**0.5, 2, 8, shared=True)
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0], shared) == Estimate(3.0, pytest.approx(0.5**0.5), 5, 4)
    assert estimate([1.0, 2.0, 3.0], Pooled(1.0, 2)) == Estimate(2.0, pytest.approx(3**-0.5), 3, 2)  # of itself alone
    assert estimate([2.0, 4.0]) == Estimate(3.0, pytest.approx(1.0), 2, 1)
    alone = estimate([2.0])
    assert alone.error is alone.half_width is alone.beyond_noise is None


def test_beyond_the_noise_is_outside_of_students_interval():
    # Two standard errors of a normal distribution would call it a difference; three numbers do not.
    numbers = [1.0, 2.0, 3.0]
    assert estimate(numbers).mean / estimate(numbers).error == pytest.approx(3.46, abs=0.01)
    assert estimate(numbers).beyond_noise is False
    assert estimate([2.0, 2.5, 3.0]).beyond_noise is True and estimate([-2.0, -2.5, -3.0]).beyond_noise is True


def test_a_share_is_the_mean_of_the_ratios_of_pairs():
    share = share_of({"a": 1.0, "b": 3.0, "alone": 9.0}, {"b": 4.0, "a": 2.0, "other": 0.0})
    assert share is not None and (share.mean, share.count) == (pytest.approx(0.625), 2)
    assert share.error == pytest.approx(0.125) and share_cell(share) == "0.62 ± 0.12"
    assert share_cell(share_of({"a": 1.0}, {"a": 2.0})) == "0.50"  # of one pair nothing says how it scatters
    for others in ({"a": 0.0, "b": 4.0}, {"a": -1.0, "b": 4.0}, {}):
        assert share_of({"a": 1.0, "b": 3.0}, others) is None
    gaps, others = {"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 4.0}
    sure, unsure = Estimate(3.0, 0.1, 2, 1), Estimate(3.0, 1.0, 2, 1)
    assert share_of(gaps, others, sure) == share_of(gaps, others) and share_of(gaps, others, unsure) is None
    assert share_of(gaps, others, Estimate(3.0, None, 1)) is not None  # nothing says how sure it is
    assert share_cell(None) == "-"
