"""Means over groups of tokens: the order of their sums written out once more, short groups, edges, what adds them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.group_means import add_by_group, group_means, group_sums, without_means
from megatron_fp4.quantization.group_means_cuda import split_means
from tests.quantization.kernel_layout import MXFP8Kernels


def biased(tokens: int, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, features, generator=generator) * torch.rand(features, generator=generator)
    return (x + 5 * torch.randn(features, generator=generator)).to(dtype)


def in_order(group: np.ndarray, size: int) -> np.ndarray:
    """The mean of one group [tokens, features] in FP32, term by term."""
    tokens = group.astype(np.float32)
    lanes = [np.zeros(group.shape[1], np.float32)] * 16
    for index in range(size):
        token = tokens[index] if index < len(tokens) else np.zeros_like(tokens[0])
        lanes[index % 16] = token if index < 16 else lanes[index % 16] + token
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0] * np.float32(1 / len(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "size"), [(32, 16), (128, 64), (7, 16), (75, 32), (200, 128)])
def test_every_group_in_its_order(tokens, size, dtype):
    x = biased(tokens, 24, dtype)
    expected = np.stack([in_order(x[first : first + size].float().numpy(), size) for first in range(0, tokens, size)])
    means = group_means(x, size)
    assert means.dtype == dtype
    assert torch.equal(means, torch.from_numpy(expected).to(dtype))
    rest = without_means(x, means, size)
    taken = means.float().repeat_interleave(size, dim=0)[:tokens]
    assert torch.equal(rest, (x.float() - taken).to(dtype))
    for group in range(len(means)):
        here = slice(group * size, (group + 1) * size)
        left = rest[here].double().sum(0).abs() / x[here].double().abs().sum(0)
        assert left.max() < (1e-6 if dtype == torch.float32 else 2.0**-8)  # what a mean and R are rounded by


def test_a_group_sees_no_other_and_its_order_of_tokens_hardly_matters():
    x = biased(96, 16)
    means = group_means(x, 32)
    other = x.clone()
    other[32:64] = torch.randn(32, 16)
    moved = group_means(other, 32)
    assert torch.equal(moved[0], means[0]) and torch.equal(moved[2], means[2]) and not torch.equal(moved[1], means[1])
    for part in range(3):  # rows of a micro-batch by themselves: what sits beside a sequence does not matter
        assert torch.equal(group_means(x[32 * part : 32 * part + 32], 32)[0], means[part])


def test_sums_are_the_tokens_added_up():
    x = biased(80, 16)
    means = group_means(x, 32)
    sums = group_sums(means, 80, 32)
    expected = torch.stack([x[:32].sum(0), x[32:64].sum(0), x[64:].sum(0)])
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(group_sums(means[:2], 64, 32), means[:2] * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_the_tokens_of_their_group(dtype):
    y, terms = biased(40, 16, dtype), torch.randn(3, 16)
    expected = y.clone()
    for token in range(40):
        expected[token] = (y[token].float() + terms[token // 16]).to(dtype)
    add_by_group(y, terms, 16)
    assert torch.equal(y, expected)


def test_what_is_not_finite_spoils_its_feature_of_its_group_alone():
    x = torch.ones(64, 16)
    x[20, 7], x[40, 9] = float("nan"), float("inf")
    means = group_means(x, 32)
    broken = torch.zeros_like(means, dtype=torch.bool)
    broken[0, 7] = broken[1, 9] = True
    assert torch.equal(~means.isfinite(), broken)
    assert torch.equal(~without_means(x, means, 32).isfinite(), broken.repeat_interleave(32, dim=0))


def test_constant_features_leave_nothing():
    x = torch.tensor([3.0, -7.25, 0.0, 1e30]).expand(64, 4)
    means = group_means(x, 16)
    assert torch.equal(means, x[:4])
    assert not without_means(x, means, 16).any()


def test_what_the_kernel_is_given():
    """A strided tensor, features that fill no program, and means alone."""
    x = biased(128, 2 * 136, torch.bfloat16)[:, ::2]
    expected = group_means(x, 64)
    with cuda.on(MXFP8Kernels([])):
        means, rest = split_means(x, 64)
        alone, same = split_means(x, 64, only_means=True)
    assert torch.equal(means, expected) and torch.equal(alone, expected)
    assert torch.equal(rest, without_means(x, expected, 64)) and torch.equal(same, x)
