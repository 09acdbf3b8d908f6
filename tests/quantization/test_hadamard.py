"""The random Hadamard transform against the oracle's matrix, and its signs."""

import numpy as np
import pytest
import torch

from megatron_fp4.quantization import random_hadamard_transform, rounding_key
from megatron_fp4.quantization.hadamard import HADAMARD_SIZES, fixed_signs, random_signs
from tests.quantization import oracle


def test_fixed_signs_are_frozen_begin_with_the_papers_and_are_shared_by_all_sizes():
    longest = fixed_signs(128)
    for size in HADAMARD_SIZES:
        assert torch.equal(fixed_signs(size), longest[:size])
    assert longest[:16].tolist() == oracle.PAPER_SIGNS.tolist() and set(longest.tolist()) == {1.0, -1.0}
    mask = sum(1 << i for i, sign in enumerate(longest.tolist()) if sign < 0)
    assert mask == 0xD2CB698E823CE4903FC9A9133115D7E8


def test_random_signs_are_balanced_and_depend_only_on_the_key():
    drawn = torch.stack([random_signs(128, rounding_key(step)) for step in range(256)])
    assert set(drawn.unique().tolist()) == {1.0, -1.0}
    assert abs(drawn.mean().item()) < 4 / (256 * 128) ** 0.5
    assert drawn.mean(0).abs().max() < 5 / 256**0.5
    assert len({tuple(row) for row in drawn.tolist()}) == 256
    assert torch.equal(random_signs(128, rounding_key(3)), drawn[3])
    assert torch.equal(random_signs(16, rounding_key(3)), drawn[3, :16])


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_fp64_transform_is_a_product_with_the_oracles_matrix(size):
    x = torch.randn(5, 256, dtype=torch.float64)
    signs = fixed_signs(size).double().numpy()
    for given, expected in ((None, signs), (torch.ones(size), np.ones(size)), (-fixed_signs(size), -signs)):
        actual = random_hadamard_transform(x, size, given).numpy()
        assert np.abs(actual - oracle.rht(x.numpy(), expected)).max() < 1e-13


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_bf16_transform_is_the_exact_one_rounded_once(size):
    """Except where an FP32 sum, within the bound of its error, may round to another BF16 number.

    Sums are exact if the magnitudes of a tile add up to less than 2^24 units in the last place of the smallest one.
    """
    signs = fixed_signs(size).double().numpy()
    rng = np.random.default_rng(0)
    for values in (rng.standard_normal((64, 256)), rng.standard_t(2, (64, 256)), rng.standard_normal((64, 256)) * 1e-6):
        x = torch.from_numpy(values).bfloat16()
        exact = oracle.rht(x.double().numpy(), signs).reshape(-1, size)
        magnitudes = np.abs(x.double().numpy()).reshape(-1, size)
        total = magnitudes.sum(axis=1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(magnitudes.min(axis=1, keepdims=True))) - 7)
        bound = np.where(total < 2.0**24 * unit, 0, total / np.sqrt(size) * np.log2(size) * 2.0**-24)
        if int(np.log2(size)) % 2:  # the factor is irrational, so it is rounded, and so is the product
            bound = bound + np.abs(exact) * 2.0**-23
        decided = oracle.bfloat16(exact - bound) == oracle.bfloat16(exact + bound)
        assert decided.mean() > 0.98
        actual = random_hadamard_transform(x, size)
        assert actual.dtype == torch.bfloat16
        actual = actual.double().numpy().reshape(-1, size)
        assert np.array_equal(actual[decided], oracle.bfloat16(exact)[decided])
