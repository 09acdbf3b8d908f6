"""The order of Blackwell's sums, against exact fractions that are rounded one by one."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import probes
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.sums import blackwell_product, sums
from tests.distributed.hybrid import watched_gemms
from tests.precision import reference as ref
from tests.quantization.oracle import E2M1, E4M3


def rounded(x: Fraction, toward_zero: bool = False) -> Fraction:
    """`x` rounded to FP32, to nearest (ties to even) or toward zero."""
    if not x:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return (math.trunc(x / unit) if toward_zero else round(x / unit)) * unit


def in_order(a: Tensor, b: Tensor) -> Fraction:
    """The sum of the products of two rows, as published."""
    products = [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    total = Fraction(0)
    for first in range(0, len(products), 64):
        total = rounded(total + rounded(sum(products[first : first + 64], Fraction(0))), toward_zero=True)
    return total


def random_values(rows: int, k: int, seed: int) -> Tensor:
    """`code * scale` of all codes and scales of NVFP4, BF16 [rows, k]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor(E2M1)[torch.randint(0, 16, (rows, k), generator=generator)]
    scales = torch.tensor(E4M3)[torch.randint(0, 127, (rows, k // 16), generator=generator)]
    return (codes * scales.repeat_interleave(16, 1)).bfloat16()


# Products by their places among 144, and their sum.
WITNESSES: dict[str, tuple[dict[int, float], float]] = {
    "a group loses nothing": ({0: 2.0**20, 1: 2.0**-20, 63: -(2.0**20)}, 2.0**-20),
    "it ends after 64": ({0: 2.0**20, 1: 2.0**-20, 64: -(2.0**20)}, 0),
    "the next one begins there": ({0: 2.0**20, 64: -(2.0**20), 65: 2.0**-20}, 0),
    "a group is rounded to even": ({0: 2.0**24, 5: 1}, 2.0**24),
    "and up": ({0: 2.0**24, 5: 3}, 2.0**24 + 4),
    "and beyond a tie": ({0: 2.0**24, 5: 1, 9: 2.0**-20}, 2.0**24 + 2),
    "groups add up toward zero": ({0: 2.0**24, 70: 3}, 2.0**24 + 2),
    "from below, too": ({0: -(2.0**24), 70: -3}, -(2.0**24) - 2),
    "and lose what is small": ({0: 2.0**24, 70: -(2.0**-20)}, 2.0**24 - 1),
    "in ascending order": ({0: 2.0**24, 64: 1, 128: -(2.0**24)}, 0),
    "and in no other": ({0: 2.0**24, 64: -(2.0**24), 128: 1}, 1),
}


@pytest.mark.parametrize("name", WITNESSES)
def test_witnesses(name: str) -> None:
    a, (products, expected) = torch.zeros(1, 144), WITNESSES[name]
    for place, product in products.items():
        a[0, place] = product
    assert sums(a, torch.ones(1, 144)).item() == expected


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [None, RowGroups(padded=8, kept=5)])
def test_products_have_the_bits_of_exact_fractions(groups: RowGroups | None, out_dtype: torch.dtype) -> None:
    """Of every code and scale, so that sums of 64 need up to 49 bits; also if they are added to a gradient."""
    a, b, alpha = random_values(16, 336, 1), random_values(8, 336, 2), torch.tensor(1.2345678e-5)
    a[3, 5], a[4, 9] = float("nan"), float("inf")
    rows = [row for row in range(16) if groups is None or row % 8 < 5]
    finite = [i for i, row in enumerate(rows) if row not in (3, 4)]
    unscaled = [[in_order(a[rows[i]], b_row) for b_row in b] for i in finite]
    before = (torch.randn(len(rows), 8) * 3e3).to(out_dtype)
    product, total = blackwell_product(a, b, alpha, out_dtype, None, groups), before.clone()
    assert blackwell_product(a, b, alpha, out_dtype, total, groups) is total

    def expected(i: int, j: int, earlier: float) -> float:
        return float(rounded(Fraction(alpha.item()) * unscaled[i][j] + Fraction(earlier)))

    for result, of in ((product, torch.zeros_like(before)), (total, before)):
        right = torch.tensor([[expected(i, j, of[row, j].item()) for j in range(8)] for i, row in enumerate(finite)])
        assert torch.equal(result[finite], right.to(out_dtype))
        assert result[rows.index(3)].isnan().all() and not result[rows.index(4)].isfinite().any()


@pytest.mark.parametrize("wgrad_rht", [0, 16])
def test_a_linear_of_8192_tokens(wgrad_rht: int) -> None:
    """With loud tokens most sums of wgrad have other bits in FP32's order. Both micro-batches add to one gradient."""
    tokens, gemms = 8192, list[tuple[Any, Any]]()
    x, w, dy = ref.tensors(tokens, 32, 48, dtype=torch.bfloat16)
    x[::97] *= 50
    dy[::31] *= 200
    recipe = ref.changed(ref.NVFP4, wgrad_rht=wgrad_rht)
    gradients = {}
    for order in ("fp32", "blackwell"):
        context, weight = ref.context_of(recipe, backend=EmulatedBackend(order)), w.float().requires_grad_()
        with watched_gemms(lambda a, b: gemms.append((a, b))):
            for _ in range(2):
                ref.quantized_linear(x, weight, context).backward(dy)
        gradients[order] = weight.grad
    a, b = next((a, b) for a, b in reversed(gemms) if a.values.shape[1] == tokens)
    alpha, places = Fraction((a.scale * b.scale).item()), [(0, 0), (7, 31), (20, 3), (47, 16)]
    for i, j in places:
        unscaled = in_order(a.values[i], b.values[j])
        twice = rounded(alpha * unscaled + rounded(alpha * unscaled))
        assert gradients["blackwell"][i, j].item() == float(twice)
    assert (gradients["fp32"] != gradients["blackwell"]).float().mean() > 0.1
    assert (gradients["fp32"] - gradients["blackwell"]).norm() < 1e-5 * gradients["fp32"].norm()


def hoppers_fp8(a: Tensor, b: Tensor, alpha: float, total: Tensor | None) -> Tensor:
    """The diagonal of a GEMM. 32 products and the earlier total are aligned with the largest, and cut to 14 bits."""
    c = torch.zeros(a.shape[0], 1, dtype=torch.float64)
    for part in (a.double() * b.double()).split(32, 1):
        terms = torch.cat((part, c), 1)
        unit = 2.0 ** (terms.abs().amax(-1, keepdim=True).log2().floor() - 13)
        c = torch.where(unit > 0, (terms / unit).trunc() * unit, 0.0).sum(1, keepdim=True)
    return (c[:, 0].float().double() * alpha + (0 if total is None else total.diagonal())).float().diag()


def test_probes_read_an_order() -> None:
    found = probes.describe(probes.Gemm("hopper's FP8", hoppers_fp8), torch.device("cpu"))
    for word in ("32", "toward zero, 14 bits", "one rounding"):
        assert any(word in cell for cell in found.values()), found
    assert found != probes.BLACKWELL


def test_probes_read_blackwells_order_of_the_emulation() -> None:
    gemm = probes.of_backend(EmulatedBackend("blackwell"), "emulated")
    assert probes.describe(gemm, torch.device("cpu")) == probes.BLACKWELL
