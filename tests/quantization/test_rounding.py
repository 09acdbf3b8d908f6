import numpy as np
import pytest
import torch

from megatron_fp4.quantization.rounding import (
    RoundingKey,
    random_bits,
    random_uniform,
    rounding_draws,
    rounding_key,
)

ROWS, COLUMNS = 512, 512
COORDINATES = (1234, 7, 3, "blocks.2.mixer.in_proj", "dgrad_gradient")


def unsigned(bits: torch.Tensor) -> np.ndarray:
    return bits.long().numpy() & 0xFFFFFFFF


def chi_square_z(samples: np.ndarray, num_bins: int) -> float:
    """Standard deviations by which the chi-square statistic of a uniform distribution is off."""
    counts = np.bincount(samples.ravel(), minlength=num_bins)
    expected = samples.size / num_bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return (statistic - (num_bins - 1)) / (2 * (num_bins - 1)) ** 0.5


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation in units of its standard error."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * a.size**0.5)


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    return unsigned(random_bits(rounding_key(*COORDINATES), ROWS, COLUMNS, "cpu"))


def test_frozen_values():
    # Runs are reproduced by these numbers: a change of the generator must be deliberate.
    assert rounding_key(*COORDINATES).key == 12551157338171298465
    assert unsigned(random_bits(RoundingKey(0x0123456789ABCDEF), 2, 4, "cpu")).tolist() == [
        [3807668871, 3809269288, 3589561367, 2744733583],
        [1140517120, 1541774008, 3325128299, 388761209],
    ]
    assert unsigned(random_bits(RoundingKey(0xFEDCBA9876543210, 10**6, 3), 1, 2, "cpu")).tolist() == [
        [2307730339, 3433861231]
    ]
    assert (random_uniform(RoundingKey(42), 1, 3, "cpu") * 2**22).tolist() == [[1574654, 3780994, 847853]]
    assert (rounding_draws(RoundingKey(42, 0, 6), 1, 4, "cpu") * 2**16).tolist() == [[65371, 45577, 12293, 19057]]


def test_the_hash_is_lowbias32_of_both_coordinates():
    """The generator once more, in Python integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = RoundingKey(0xDEADBEEFCAFEF00D, 2**31 - 3, 2**32 - 5)
    rows = [mix(((2**31 - 3 + i) * 0x9E3779B9 + 0xCAFEF00D) & 0xFFFFFFFF) for i in range(6)]
    columns = [mix(((2**32 - 5 + i) * 0x9E3779B9 + 0xDEADBEEF) & 0xFFFFFFFF) for i in range(7)]
    expected = [[mix(r ^ c) for c in columns] for r in rows]
    assert unsigned(random_bits(key, 6, 7, "cpu")).tolist() == expected

    # Two columns of a draw for rounding share a hash: that of the pair's number.
    pairs = [mix((((2**32 - 6) // 2 + i) * 0x9E3779B9 + 0xDEADBEEF) & 0xFFFFFFFF) for i in range(4)]
    shared = [[mix(r ^ c) for c in pairs] for r in rows]
    halves = [[half | 1 for both in row for half in (both & 0xFFFF, both >> 16)] for row in shared]
    draws = rounding_draws(RoundingKey(key.key, key.row_offset, 2**32 - 6), 6, 8, "cpu")
    assert (draws * 2**16).tolist() == halves


def test_a_draw_is_a_function_of_key_and_global_position():
    whole = random_bits(RoundingKey(99), 64, 96, "cpu")
    again = random_bits(RoundingKey(99), 64, 96, "cpu")
    assert torch.equal(whole, again)
    for row, column, height, width in ((0, 0, 16, 16), (16, 32, 48, 64), (63, 95, 1, 1), (5, 0, 2, 96)):
        shard = random_bits(RoundingKey(99, row, column), height, width, "cpu")
        assert torch.equal(shard, whole[row : row + height, column : column + width])
        uniform = random_uniform(RoundingKey(99, row, column), height, width, "cpu")
        part = random_uniform(RoundingKey(99), 64, 96, "cpu")[row : row + height, column : column + width]
        assert torch.equal(uniform, part)
    whole = rounding_draws(RoundingKey(99), 64, 96, "cpu")
    for row, column, height, width in ((0, 0, 16, 16), (16, 32, 48, 64), (63, 94, 1, 2)):
        shard = rounding_draws(RoundingKey(99, row, column), height, width, "cpu")
        assert torch.equal(shard, whole[row : row + height, column : column + width])


def test_draws_for_rounding_are_centred_and_leave_room_at_both_ends():
    draws = rounding_draws(rounding_key(0), 1024, 1024, "cpu")
    assert draws.dtype == torch.float32
    numerators = draws * 2**16
    assert torch.equal(numerators % 2, torch.ones_like(draws))  # odd: 15 random bits and a half
    assert draws.min() > 0
    assert draws.max() < 1
    assert abs(draws.double().mean().item() - 0.5) < 4 * (1 / 12) ** 0.5 / 1024
    assert abs(chi_square_z((numerators.numpy().astype(np.int64) >> 1) & 1023, 1024)) < 5
    left, right = (numerators.numpy().astype(np.int64)[:, i::2] for i in (0, 1))
    for shift in (1, 6, 12):
        together = ((left >> shift) & 15) * 16 + ((right >> shift) & 15)
        assert abs(chi_square_z(together, 256)) < 5
        across = ((right[:, :-1] >> shift) & 15) * 16 + ((left[:, 1:] >> shift) & 15)
        assert abs(chi_square_z(across, 256)) < 5
    assert abs(correlation(left, right)) < 4.5
    assert abs(correlation(left[1:], right[:-1])) < 4.5


@pytest.mark.parametrize("shift", [0, 4, 10, 18, 28])
def test_neighbours_in_rows_and_columns_are_independent(draws, shift):
    nibble = (draws >> shift) & 15
    above_diagonal = np.triu_indices(ROWS, 1)
    for near, far in (
        (nibble[:-1], nibble[1:]),
        (nibble[:, :-1], nibble[:, 1:]),
        (nibble[:-1, :-1], nibble[1:, 1:]),
        (nibble[:-16], nibble[16:]),
        (nibble[:, :-16], nibble[:, 16:]),
        (nibble[above_diagonal], nibble.T[above_diagonal]),
    ):
        assert abs(chi_square_z(near * 16 + far, 256)) < 5


@pytest.mark.parametrize(
    "other",
    [
        (1235, 7, 3, "blocks.2.mixer.in_proj", "dgrad_gradient"),
        (1234, 8, 3, "blocks.2.mixer.in_proj", "dgrad_gradient"),
        (1234, 7, 4, "blocks.2.mixer.in_proj", "dgrad_gradient"),
        (1234, 3, 7, "blocks.2.mixer.in_proj", "dgrad_gradient"),
        (1234, 7, 3, "blocks.3.mixer.in_proj", "dgrad_gradient"),
        (1234, 7, 3, "blocks.2.mixer.in_proj", "wgrad_gradient"),
    ],
    ids=["seed", "step", "micro_batch", "step_and_micro_batch_exchanged", "linear", "operand"],
)
def test_other_coordinates_give_independent_draws(draws, other):
    others = unsigned(random_bits(rounding_key(*other), ROWS, COLUMNS, "cpu"))
    for mine, theirs in ((draws, others), (draws, others.T), (draws[1:], others[:-1]), (draws[:, 1:], others[:, :-1])):
        assert abs(correlation(mine.astype(float), theirs.astype(float))) < 4.5
        assert abs(chi_square_z((mine & 15) * 16 + (theirs & 15), 256)) < 5
        assert abs(chi_square_z((mine >> 28) * 16 + (theirs >> 28), 256)) < 5
