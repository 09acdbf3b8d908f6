"""How far a backend's products are from FP64 on the backend's own operands."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.precision.comparison import operand_scale, operand_values

# Largest relative error of a product (Frobenius norm), and of one element in units of the root mean square: BF16
# rounds by 2^-9; Hopper's FP8 tensor cores add 128 products with 14 bits.
PRODUCT_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
ELEMENT_ERROR = {torch.bfloat16: 0.05, torch.float32: 0.01}
_ROWS = 256
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class ProductErrors:
    """How far rows of a product are from FP64.

    total: relative, Frobenius norm. worst: of one element, in units of the root mean square of all. peak: the largest
    element in these units. condition: how much larger sums of magnitudes are than sums of random signs would have them
    (1 or less where nothing cancels beyond that); computed only for products beyond the plain bounds.
    """

    total: float
    worst: float
    peak: float
    condition: float
    dtype: torch.dtype

    @property
    def fault(self) -> str:
        """What is beyond the bounds, or an empty string. NaN passes no comparison, and so is a fault."""
        if self._within(max(1.0, self.condition)):
            return ""
        return f"relative error {self.total:.2e}, worst element {self.worst:.2e} of the root mean square"

    def _within(self, factor: float) -> bool:
        element = factor * ELEMENT_ERROR[self.dtype] + 2**-8 * self.peak
        return self.total <= factor * PRODUCT_ERROR[self.dtype] and self.worst <= element


def product_rows(product: Tensor, count: int = _ROWS) -> Tensor:
    """Evenly spaced rows of a product, `count` at most."""
    return torch.linspace(0, product.shape[0] - 1, min(count, product.shape[0]), device=product.device).long()


def product_errors(product: Tensor, a: object, b: object, rows: Tensor, *, cancelling: bool = False) -> ProductErrors:
    """`rows` of the product a b^T against FP64 on the operands' own values.

    cancelling: the tensors are a run's, and sums may cancel further than those of random numbers.
    """
    left, right = operand_values(a)[rows].to(torch.float64), operand_values(b)
    scale = operand_scale(a) * operand_scale(b)
    expected = _in_fp64(left, right) * scale
    if product.shape[1] != expected.shape[1]:
        return ProductErrors(math.inf, math.inf, 0.0, 1.0, product.dtype)
    finite = expected.isfinite()
    if not finite.all():
        # A step that is not finite is for others to handle; here NaN and inf must only not disappear.
        lost = math.inf if product[rows][~finite].isfinite().any() else 0.0
        return ProductErrors(lost, lost, 0.0, 1.0, product.dtype)
    error = product[rows].to(torch.float64) - expected
    norm, root = expected.norm().item(), expected.square().mean().sqrt().item()
    if norm == 0:
        total = worst = 0.0 if not error.any() else math.inf
        return ProductErrors(total, worst, 0.0, 1.0, product.dtype)
    total, worst = error.norm().item() / norm, error.abs().amax().item() / root
    found = ProductErrors(total, worst, expected.abs().amax().item() / root, 1.0, product.dtype)
    if not cancelling or not found.fault:
        return found
    magnitudes = (_in_fp64(left.abs(), right.abs()) * scale).norm().item()
    return replace(found, condition=magnitudes / norm / left.shape[1] ** 0.5)


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    """left right^T for FP64 [m, k] and [n, k] of any type, converted piece by piece."""
    size = max(1, _CHUNK_ELEMENTS // right.shape[1])
    return torch.cat([left @ part.to(torch.float64).t() for part in right.split(size)], dim=1)
