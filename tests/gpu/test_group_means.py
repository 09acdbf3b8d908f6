"""Means over groups of tokens by the kernel: the bits of the CPU, at any shape, and for values that are not finite."""

import pytest
import torch

from megatron_fp4.quantization.group_means import group_means, without_means
from megatron_fp4.quantization.group_means_cuda import split_means

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "features", "size"),
    [(16, 16, 16), (256, 640, 128), (384, 200, 64), (4096, 2064, 2048), (200, 130, 32), (8192, 8, 8192)],
)
def test_the_bits_of_the_cpu(tokens, features, size, dtype):
    generator = torch.Generator().manual_seed(tokens + features)
    x = torch.randn(tokens, features, generator=generator) * torch.randn(features, generator=generator).exp()
    x = (x + 3 * torch.randn(features, generator=generator)).to(dtype)
    expected = group_means(x, size)
    means, rest = split_means(x.cuda(), size)
    assert torch.equal(means.cpu(), expected)
    assert torch.equal(rest.cpu(), without_means(x, expected, size))
    assert torch.equal(split_means(x.cuda(), size, only_means=True)[0].cpu(), expected)


def test_what_is_not_finite_stays_in_its_group_and_feature():
    x = torch.ones(64, 256, device="cuda", dtype=torch.bfloat16)
    x[20, 7], x[40, 9] = float("nan"), float("inf")
    means, rest = split_means(x, 32)
    broken = torch.zeros_like(means, dtype=torch.bool)
    broken[0, 7] = broken[1, 9] = True
    assert torch.equal(~means.isfinite(), broken)
    assert torch.equal(~rest.isfinite(), broken.repeat_interleave(32, dim=0))
