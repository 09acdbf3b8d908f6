"""The order of Blackwell's sums, against exact fractions that are rounded one by one."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import probes
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.sums import blackwell_product
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
