"""Rounding to the element formats against tables; the random draws are frozen, independent and unbiased."""

import numpy as np
import pytest
import torch

from megatron_fp4.quantization.rounding import (
    Place,
    RoundingKey,
    Span,
    e2m1_codes,
    random_bits,
    random_uniform,
    round_e2m1_nearest,
    round_e2m1_stochastic,
    rounding_draws,
    rounding_key,
    to_e4m3,
    to_ue8m0_up,
    ue8m0_values,
)
from tests.quantization import oracle

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def around(points: np.ndarray) -> torch.Tensor:
    """Each point, its FP32 neighbours on both sides, and the negatives of these."""
    points = np.asarray(points, dtype=np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(1e30)), np.nextafter(points, np.float32(-1e30))])
    return torch.from_numpy(np.concatenate([near, -near]))


def test_e2m1_rounds_to_the_nearest_entry_of_the_table():
    ties = around(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *GRID[1:7]]))
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 5.9999995, -5.9999995, 6.0, -6.0])
    spread = torch.from_numpy(np.random.default_rng(0).uniform(-6, 6, 20000).astype(np.float32))
    x = torch.cat([ties, extremes, spread])
    assert np.array_equal(e2m1_codes(round_e2m1_nearest(x), x < 0).numpy(), oracle.e2m1(x.numpy()))


def test_e4m3_rounds_to_nearest_even_and_saturates():
    points = np.concatenate([oracle.E4M3, (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2])
    x = around(points[points > 0]).clamp(-448, 448)
    assert np.array_equal(to_e4m3(x).double().numpy(), oracle.e4m3(x.numpy()))
    assert to_e4m3(torch.tensor([449.0, 1e30, float("inf"), -1e30])).tolist() == [448, 448, 448, -448]
    assert to_e4m3(torch.tensor([float("nan")])).isnan().all()


def test_ue8m0_rounds_up_to_powers_of_two():
    powers = np.exp2(np.arange(-126, 128).astype(np.float64)).astype(np.float32)
    x = torch.from_numpy(np.concatenate([powers, np.nextafter(powers, np.float32(0))]))
    assert to_ue8m0_up(x).tolist() == 2 * list(range(1, 255))
    above = torch.from_numpy(np.nextafter(powers[:-1], np.float32(np.inf)))
    assert to_ue8m0_up(above).tolist() == list(range(2, 255))
    low = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-127 + 2.0**-149, 2.0**-126])
    assert to_ue8m0_up(low).tolist() == [0, 0, 0, 1, 1]
    assert to_ue8m0_up(torch.tensor([3.4e38, float("inf"), float("nan")])).tolist() == [254, 255, 255]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert np.array_equal(ue8m0_values(codes[:255]).double().numpy(), np.exp2(np.arange(255.0) - 127))
    assert ue8m0_values(codes[255:]).isnan().all()


@pytest.mark.parametrize("below", range(7))
def test_stochastic_rounding_is_unbiased_between_adjacent_values(below):
    low, high, num_draws = GRID[below], GRID[below + 1], 2**16
    for index, fraction in enumerate((2**-7, 0.3, 0.5, 1 - 2**-7)):
        value = torch.tensor(low + fraction * (high - low))
        probability = (value.item() - low) / (high - low)
        uniform = rounding_draws(RoundingKey(1000 * below + 10 * index), 256, num_draws // 256, "cpu")
        for sign in (1, -1):
            rounded = round_e2m1_stochastic((sign * value).expand(256, num_draws // 256).contiguous(), uniform)
            assert set(rounded.unique().tolist()) == {sign * low, sign * high}
            error = (rounded == sign * high).double().mean().item() - probability
            assert abs(error) < 4 * (probability * (1 - probability) / num_draws) ** 0.5


# Draws.

COORDINATES = (1234, 7, 3, "blocks.2.mixer.in_proj", "dgrad_gradient")


def unsigned(bits: torch.Tensor) -> np.ndarray:
    return bits.long().numpy() & 0xFFFFFFFF


def is_uniform(samples: np.ndarray, num_bins: int) -> bool:
    """Whether the chi-square statistic of integers 0..num_bins - 1 is within five standard deviations of its mean."""
    expected = samples.size / num_bins
    statistic = ((np.bincount(samples.ravel(), minlength=num_bins) - expected) ** 2 / expected).sum()
    return bool(abs(statistic - (num_bins - 1)) < 5 * (2 * (num_bins - 1)) ** 0.5)


def are_independent(one: np.ndarray, other: np.ndarray, shifts: tuple[int, ...]) -> bool:
    """Judged by their correlation, and by the joint distribution of the four bits from each shift on."""
    correlation = np.corrcoef(one.ravel().astype(float), other.ravel().astype(float))[0, 1]
    pairs = (((one >> shift) & 15) * 16 + ((other >> shift) & 15) for shift in shifts)
    return abs(correlation) * one.size**0.5 < 4.5 and all(is_uniform(pair, 256) for pair in pairs)


def test_draws_are_frozen():
    """They equal a second implementation, in Python integers. Runs cannot be reproduced if these numbers change."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    assert rounding_key(*COORDINATES).key == 12551157338171298465
    key, row = RoundingKey(0xDEADBEEFCAFEF00D), Span(2**31 - 3)
    rows = [mix(((2**31 - 3 + i) * 0x9E3779B9 + 0xCAFEF00D) & 0xFFFFFFFF) for i in range(6)]
    columns = [mix(((2**32 - 5 + i) * 0x9E3779B9 + 0xDEADBEEF) & 0xFFFFFFFF) for i in range(7)]
    bits = [[mix(r ^ c) for c in columns] for r in rows]
    assert unsigned(random_bits(key.at(Place(row, Span(2**32 - 5))), 6, 7, "cpu")).tolist() == bits
    assert (random_uniform(key.at(Place(row, Span(2**32 - 5))), 6, 7, "cpu") * 2**22).tolist() == [
        [bit >> 10 for bit in row] for row in bits
    ]
    # In draws for rounding, two columns share a hash: that of the pair's number.
    pairs = [mix((((2**32 - 6) // 2 + i) * 0x9E3779B9 + 0xDEADBEEF) & 0xFFFFFFFF) for i in range(4)]
    words = [[mix(r ^ c) for c in pairs] for r in rows]
    halves = [[half | 1 for word in row for half in (word & 0xFFFF, word >> 16)] for row in words]
    draws = rounding_draws(key.at(Place(row, Span(2**32 - 6))), 6, 8, "cpu")
    assert (draws * 2**16).tolist() == halves


@pytest.mark.parametrize("function", [random_bits, random_uniform, rounding_draws])
def test_draws_depend_only_on_key_and_global_position(function):
    """In any order: tokens of an expert, of several micro-batches, do not come in pairs."""
    whole = function(RoundingKey(99), 64, 96, "cpu")
    for row, column, height, width in ((0, 0, 64, 96), (16, 32, 48, 64), (63, 94, 1, 2), (5, 0, 2, 96)):
        shard = function(RoundingKey(99, Place(Span(row), Span(column))), height, width, "cpu")
        assert torch.equal(shard, whole[row : row + height, column : column + width])
    rows, columns = torch.randperm(64)[:20], torch.randperm(96)[:31]
    place = Place(Span(rows), Span(columns))
    assert torch.equal(function(RoundingKey(99, place), 20, 31, "cpu"), whole[rows][:, columns])
    transposed = function(RoundingKey(99), 96, 64, "cpu")
    assert torch.equal(function(RoundingKey(99, place.t()), 31, 20, "cpu"), transposed[columns][:, rows])


def test_draws_for_rounding_are_uniform_and_those_of_neighbours_independent():
    draws = rounding_draws(rounding_key(0), 1024, 1024, "cpu")
    numerators = (draws * 2**16).numpy().astype(np.int64)
    assert (numerators % 2 == 1).all() and draws.min() > 0 and draws.max() < 1  # 15 random bits, and the last bit is 1
    assert abs(draws.double().mean().item() - 0.5) < 4 * (1 / 12) ** 0.5 / 1024
    assert is_uniform((numerators >> 1) & 1023, 1024)
    left, right = numerators[:, 0::2], numerators[:, 1::2]
    for one, other in ((left, right), (right[:, :-1], left[:, 1:]), (left[1:], right[:-1])):
        assert are_independent(one, other, (1, 6, 12))


def test_draws_of_keys_that_differ_in_one_coordinate_are_independent():
    draws = unsigned(random_bits(rounding_key(*COORDINATES), 512, 512, "cpu"))
    for index, changed in enumerate((1235, 8, 4, "blocks.3.mixer.in_proj", "wgrad_gradient")):
        coordinates = (*COORDINATES[:index], changed, *COORDINATES[index + 1 :])
        others = unsigned(random_bits(rounding_key(*coordinates), 512, 512, "cpu"))
        for one, other in ((draws, others), (draws, others.T), (draws[1:], others[:-1])):
            assert are_independent(one, other, (0, 28))
