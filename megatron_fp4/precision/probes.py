"""Read from a GEMM in which order it adds its products.

A witness is a dot product whose products are zero but for a few powers of two: a large L, -L, and a small u, which FP32
loses beside L. What is left of u shows which products were added before which; 2^24 half units and 1 or 3 more show how
a sum is rounded. `sums.py` says what this finds on Blackwell.

Each product stands in a slot of its own: one product, or for NVFP4 a block of 16, which gives it a scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fp4.precision import gemm_cuda
from megatron_fp4.precision.backend import Backend, OperandRequest
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS
from megatron_fp4.quantization.rounding import E2M1_MAX, E4M3_MAX, WHOLE

# Products are 1 or 3 times a power of two, with factors between E4M3's smallest and largest.
_LARGE, _SMALL, _BASE, _SMALLEST_EXPONENT = 2.0**15, 2.0**-17, 2.0**12, -9
_LONG, _SLOTS, _ROWS = 8192, 128, 128
# What 1, 3, -1 and -3 half units become beside a large number of their sign, in half units.
_ROUNDINGS: dict[tuple[int, ...], str] = {
    (0, 4, 0, -4): "to nearest",
    (0, 2, 0, -2): "toward zero",
    (2, 4, -2, -4): "away from zero",
    (0, 2, -2, -4): "down",
    (2, 4, 0, -2): "up",
}

Witness = Mapping[int, float]  # slot -> product
# alpha * (a b^T) in FP32, of FP32 factors [n, k] of both sides; added to FP32 `total` if there is one.
Multiply = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]


@dataclass(frozen=True)
class Gemm:
    """A GEMM to probe. slot: products of a slot. adds: whether `multiply` takes `total`; scales: alpha too."""

    name: str
    multiply: Multiply
    slot: int = 1
    adds: bool = True
    scales: bool = True

    def sums(self, witnesses: Sequence[Witness], device: torch.device, alpha: float = 1, before: float = 0) -> Tensor:
        """FP64 [witnesses]: alpha times the sum of each, added to `before` if that is not zero."""
        slots, rows = max(map(max, witnesses)) + 2, -(-len(witnesses) // _ROWS) * _ROWS
        a, b = (torch.zeros(rows, -(-slots * self.slot // 128) * 128) for _ in range(2))
        for row, witness in enumerate(witnesses):
            for slot, product in witness.items():
                fraction, exponent = math.frexp(product / 4)  # the fraction is 0.5 or 0.75
                scale_a = 2.0 ** max(_SMALLEST_EXPONENT, exponent // 2)
                place, scale_b = slot * self.slot, 2.0**exponent / scale_a
                a[row, place], b[row, place] = 4 * fraction * scale_a, scale_b
                if self.slot > 1:  # the largest value of a block makes its scale; its product is zero
                    a[row, place + 15], b[row, place + 14] = E2M1_MAX * scale_a, E2M1_MAX * scale_b
        if self.slot > 1:  # the largest value of a tensor makes its scale: 1
            a[0, -1], b[0, -2] = E2M1_MAX * E4M3_MAX, E2M1_MAX * E4M3_MAX
        total = torch.full((rows, rows), before, device=device) if before else None
        outputs = self.multiply(a.to(device), b.to(device), alpha, total)
        return outputs.diagonal()[: len(witnesses)].to("cpu", torch.float64)


def describe(gemm: Gemm, device: torch.device) -> dict[str, str]:
    """The order in which `gemm` adds up to 8,192 products. Sums are rounded to FP32, or as told."""

    def left(*witnesses: Witness) -> list[float]:
        return list(gemm.sums(witnesses, device).tolist())

    def first(found: Sequence[bool]) -> int | None:
        return next((2 + i for i, holds in enumerate(found) if holds), None)

    others = range(2, _SLOTS)
    apart = left(*({0: _LARGE, 1: _SMALL, j: -_LARGE} for j in others))
    exact = apart[0] == _SMALL
    together = left(*({0: _LARGE, 1: -_LARGE, j: _SMALL} for j in others))
    slots = first([u != _SMALL for u in apart]) if exact else first([u == _SMALL for u in together])
    if slots is None:
        return {"group": f"{_SLOTS * gemm.slot} or more"}
    if not exact and slots == 2:
        return {"group": "at most 2"}

    def rounding(place: int) -> str:
        bits = 24
        if not (exact and place == 1):
            kept = left(*({0: _LARGE, place: _LARGE / 2**b, 2 * place: -_LARGE} for b in range(1, 26)))
            bits = 1 + max((b for b, u in enumerate(kept, 1) if u), default=0)
        half = _BASE / 2**bits
        sums = left(*({0: sign * _BASE, place: sign * odd * half} for sign in (1, -1) for odd in (1, 3)))
        moved = tuple(round((x - sign * _BASE) / half) for x, sign in zip(sums, (1, 1, -1, -1), strict=True))
        return _ROUNDINGS.get(moved, f"{moved} half units") + ("" if bits == 24 else f", {bits} bits")

    ascending, lost, descending = left(
        {0: _LARGE, slots: -_LARGE, 2 * slots: _SMALL},
        {0: _LARGE, slots: _SMALL, 2 * slots: -_LARGE},
        {0: _SMALL, slots: _LARGE, 2 * slots: -_LARGE},
    )
    orders = {(True, False, False): "ascending", (False, False, True): "descending"}
    order = orders.get((ascending == _SMALL, lost == _SMALL, descending == _SMALL), "other")
    # Where one chain ends and another begins, L and -L do not meet before one of them meets u.
    last = _LONG // gemm.slot - slots
    across = left(*({i: _LARGE, i + slots: -_LARGE, last: _SMALL} for i in range(0, last - slots, slots)))
    chains = 1 + sum(u != _SMALL for u in across)
    return {
        "group": str(slots * gemm.slot),
        "its sum": f"{'exact, ' if exact else ''}{rounding(1)}",
        "groups are added": rounding(slots),
        "order": f"{order}, {'one chain' if chains == 1 else f'{chains} chains'}",
        "added to an output": _of_addition(gemm, device),
    }


def _of_addition(gemm: Gemm, device: torch.device) -> str:
    if not gemm.adds:
        return "-"
    half, moved = _BASE / 2**24, list[int]()
    for sign in (1, -1):
        found = gemm.sums([{0: sign * half}, {0: sign * 3 * half}], device, before=sign * _BASE)
        moved += [round((x - sign * _BASE) / half) for x in found.tolist()]
    rounded = _ROUNDINGS.get(tuple(moved), f"{moved} half units")
    if not gemm.scales:
        return rounded
    # (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24, and 0 if the product is rounded to FP32 first.
    (one,) = gemm.sums([{0: 1, 1: 2.0**-12}], device, 1 + 2.0**-12, -(1 + 2.0**-11)).tolist()
    return f"{rounded}, {'one rounding' if one == 2.0**-24 else 'two roundings'}"


BLACKWELL = {
    "group": "64",
    "its sum": "exact, to nearest",
    "groups are added": "toward zero",
    "order": "ascending, one chain",
    "added to an output": "to nearest, one rounding",
}
"""`describe` of what `precision.sums=blackwell` computes."""


def of_backend(backend: Backend, name: str) -> Gemm:
    """The NVFP4 GEMM of a backend that runs here."""
    request = OperandRequest(Operand("nvfp4", NVFP4_BLOCKS[0]))

    def multiply(a: Tensor, b: Tensor, alpha: float, total: Tensor | None) -> Tensor:
        left, right = (
            make() for make in (backend.operands(x.bfloat16(), WHOLE, request, None)[0] for x in (a, b)) if make
        )
        if alpha != 1:
            left = replace(left, scale=torch.full_like(left.scale, alpha))
        return backend.gemm(left, right, torch.float32, total)

    return Gemm(name, multiply, 16, scales=backend.name != "transformer_engine")


def of_libraries(device: torch.device) -> Iterator[Gemm]:
    """The BF16 and FP8 GEMMs of cuBLAS on a CUDA `device`."""

    def bf16(a: Tensor, b: Tensor, alpha: float, total: Tensor | None) -> Tensor:
        factor = torch.full((), alpha, device=device)
        return gemm_cuda.scaled_matmul(a.bfloat16(), b.bfloat16().t(), factor, torch.float32, total)

    def fp8(a: Tensor, b: Tensor, fast: bool) -> Tensor:
        one = torch.ones((), device=device)
        left, right = (t.to(torch.float8_e4m3fn) for t in (a, b))
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)

    yield Gemm("BF16, cuBLAS", bf16)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        yield Gemm("FP8, torch._scaled_mm", lambda a, b, *_: fp8(a, b, False), adds=False)
        yield Gemm("FP8, with use_fast_accum", lambda a, b, *_: fp8(a, b, True), adds=False)
