"""What a GPU's instructions compute, in NumPy, where NumPy or Triton's interpreter computes something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32, F64, I32, U32, I64 = np.float32, np.float64, np.int32, np.uint32, np.int64


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of FP32 numbers in FP64, rounded to odd: rounding it once more, to FP32 or BF16, is as rounding once
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57, 2008)."""
    product, c = np.asarray(a.astype(F64) * b), np.asarray(c, F64)  # 48 bits: exact
    total = np.asarray(product + c)
    moved = total - product
    error = (product - (total - moved)) + (c - moved)
    bits = total.view(I64)
    between = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(between, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(F64)


def fma_rn(a: Array, b: Array, c: Array) -> Array:
    """`fma.rn.f32`: to nearest, ties to even."""
    return fma(a, b, c).astype(F32)


def fma_rm(a: Array, b: Array, c: Array) -> Array:
    """`fma.rm.f32`: towards minus infinity, where x - x is -0."""
    exact, opposite = fma(a, b, c), np.signbit(a) ^ np.signbit(b) ^ np.signbit(c)
    nearest = exact.astype(F32)
    down = np.where(nearest > exact, np.nextafter(nearest, F32(-np.inf)), nearest)
    return np.where((exact == 0) & opposite, F32(-0.0), down)


def add_rz(a: Array, b: Array) -> Array:
    """`add.rz.f32`: toward zero."""
    exact = fma(a, np.ones_like(a), b)
    nearest = exact.astype(F32)
    return np.where(abs(nearest) > abs(exact), np.nextafter(nearest, F32(0)), nearest)


def bf16_bits(x: Array) -> Array:
    """uint16 bits of FP32 or FP64 numbers rounded to BF16, to nearest, ties to even; NaN is 0x7FFF."""
    if x.dtype == F64:  # to FP32 by rounding to odd
        nearest = x.astype(F32)
        bits = nearest.view(I32)
        bits = np.where(np.isfinite(nearest) & (nearest != x), (bits - (abs(nearest) > abs(x))) | 1, bits)
        return bf16_bits(bits.astype(I32).view(F32))
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """FP32 numbers of BF16 bits."""
    return (bits.astype(U32) << U32(16)).view(F32)


def halves(pairs: Array) -> tuple[Array, Array]:
    """The FP32 numbers of pairs of BF16 in 32 bits: low halves, high halves."""
    bits = pairs.view(U32)
    return (bits << U32(16)).view(F32), (bits & U32(0xFFFF0000)).view(F32)


def pair_of(low: Array, high: Array) -> Array:
    """Two FP32 numbers, rounded to BF16, as int32."""
    return (bf16_bits(low) | (bf16_bits(high).astype(U32) << U32(16))).view(I32)


def on_halves(function: Callable[..., Array]) -> Callable[..., Array]:
    """An instruction on pairs of BF16 from a function of FP32 numbers."""
    return lambda *pairs: pair_of(*(function(*numbers) for numbers in zip(*map(halves, pairs), strict=True)))


def prmt(selector: int) -> Callable[..., Array]:
    """`prmt.b32`: four of the eight bytes of a and b, or, where bit 3 of a nibble is set, copies of the byte's sign."""
    nibbles = [(selector >> shift) & 15 for shift in (0, 4, 8, 12)]

    def permute(a: Array, b: Array | None = None) -> Array:
        source = np.stack([a, np.zeros_like(a) if b is None else b], -1).view(np.int8)
        chosen = source[..., [nibble & 7 for nibble in nibbles]]
        permuted = np.where([nibble & 8 for nibble in nibbles], chosen >> 7, chosen)
        return np.ascontiguousarray(permuted).view(U32)[..., 0]

    return permute


def flushed(x: Array) -> Array:
    """Subnormal numbers as zeros with their sign (`.ftz`)."""
    return np.where(abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def approximate_reciprocal(x: Array) -> Array:
    """`rcp.approx.ftz.f32`, whose error is up to one unit in the last place: here -1, 0 or 1, by a hash of the bits."""
    exact = flushed(F32(1) / flushed(x))
    error = ((exact.view(U32) * U32(0x9E3779B9)) >> U32(16)).astype(I32) % 3 - 1
    return np.where(np.isfinite(exact) & (exact != 0), exact.view(I32) + error, exact.view(I32)).astype(I32).view(F32)


PTX: dict[str, Callable[..., Array]] = {
    "rcp.rn.f32 $0, $1;": lambda x: F32(1) / x,
    "rcp.approx.ftz.f32 $0, $1;": approximate_reciprocal,
    "abs.f32 $0, $1;": abs,
    "fma.rm.f32 $0, $1, $2, $3;": fma_rm,
    "add.rz.f32 $0, $1, $2;": add_rz,
    "mad.lo.s32 $0, $1, 16, $2;": lambda a, b: a * I32(16) + b,
    "prmt.b32 $0, $1, $2, 0x7632;": prmt(0x7632),
    "prmt.b32 $0, $1, $2, 0xFBD9;": prmt(0xFBD9),
    "prmt.b32 $0, $1, 0, 0x4104;": prmt(0x4104),
    "prmt.b32 $0, $1, 0, 0x4324;": prmt(0x4324),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": pair_of,
    "fma.rn.bf16x2 $0, $1, $2, $3;": on_halves(fma),
    "abs.bf16x2 $0, $1;": lambda pair: pair & I32(0x7FFF7FFF),
    "max.NaN.bf16x2 $0, $1, $2;": on_halves(np.maximum),
    "min.bf16x2 $0, $1, $2;": on_halves(np.fmin),
}
"""The assembly of the kernels, by its text; loads and stores are in interpreter.py."""
