"""The interpreter against definitions written anew here, so that a change of Triton does not pass in silence; and three
mutations of kernels, which the tests of tests/gpu find."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.fp4 import FusedFP4
from megatron_fp4.quantization.kernels import arithmetic, fp4
from megatron_fp4.quantization.rounding import rounding_key
from tests.gpu.test_quantizers import check
from tests.interpreted.arithmetic import PTX

EVERY_BF16 = torch.arange(2**16, dtype=torch.int32) << 16  # as the bits of FP32
N = 2**16


def random_floats(seed: int) -> Tensor:
    """FP32 numbers of all magnitudes, with zeros, subnormals, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (N,), generator=torch.Generator().manual_seed(seed))
    x = torch.where(bits % 3 == 0, (bits % 4096 - 2048).float(), bits.to(torch.int32).view(torch.float32))
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("nan"), 1e-45, -3e38])
    return x.roll(3 * seed)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN equals NaN."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal numbers; NaN equals NaN, +0 equals -0."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def dropping_nan(a: Tensor, b: Tensor) -> Tensor:
    """The smaller number; the other one if one is NaN. (`torch.fmin` of a signaling NaN is NaN.)"""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.minimum(a, b)))


@triton.jit
def convert_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_conversions_of_all_patterns(low: int) -> None:
    x = (EVERY_BF16 | low).view(torch.float32)
    shorter, longer = torch.empty(N, dtype=torch.bfloat16), torch.empty(N)
    convert_kernel[(1,)](x, shorter, N)
    assert same(shorter, x.bfloat16())
    convert_kernel[(1,)](shorter, longer, N)
    assert same(longer, shorter.float())


@triton.jit
def three_kernel(a_ptr, b_ptr, c_ptr, fma_ptr, minimum_ptr, nan_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c = tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(c_ptr + i)
    tl.store(fma_ptr + i, tl.fma(a, b, c))
    tl.store(minimum_ptr + i, tl.minimum(a, b))
    tl.store(nan_ptr + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))


def c_fma(a: Tensor, b: Tensor, c: Tensor, rounding: int = 0) -> Tensor:
    """fmaf of the C library. rounding: 0 to nearest, 0x400 towards minus infinity (x86)."""
    library = ctypes.CDLL("libm.so.6")
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    library.fesetround(rounding)
    try:
        return torch.tensor([library.fmaf(*each) for each in zip(*(x.tolist() for x in (a, b, c)), strict=True)])
    finally:
        library.fesetround(0)


def test_fma_and_minimum() -> None:
    a, b, c = (random_floats(seed) for seed in range(3))
    c[::2] = -(a * b)[::2] * (1 + 2.0**-20)  # cancels almost all of the product
    fma, minimum, with_nan = (torch.empty(N) for _ in range(3))
    three_kernel[(1,)](a, b, c, fma, minimum, with_nan, N)
    assert same(fma, c_fma(a, b, c))
    assert not same(fma, a * b + c)
    assert equal(minimum, dropping_nan(a, b)) and equal(with_nan, torch.minimum(a, b))


def run(name: str, *values: Tensor) -> Tensor:
    """One instruction: the first of PTX that begins with `name`."""
    (function,) = (function for text, function in PTX.items() if text.startswith(name))
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(*(value.numpy() for value in values))))


def test_instructions_on_fp32() -> None:
    a, b, c = (random_floats(seed) for seed in range(3))
    c[::2] = -(a * b)[::2] * (1 + 2.0**-20)
    assert same(run("fma.rm.f32", a, b, c), c_fma(a, b, c, rounding=0x400))
    assert same(run("rcp.rn.f32", a), a.reciprocal())
    assert same(run("abs.f32", a), a.abs())
    normal = a[(a.abs() > 2.0**-120) & (a.abs() < 2.0**120)]
    error = run("rcp.approx", normal).view(torch.int32) - normal.reciprocal().view(torch.int32)
    assert error.unique().tolist() == [-1, 0, 1]
    assert run("rcp.approx", torch.tensor([0.0, -1e-40, float("inf"), 3e38])).tolist() == [
        *map(float, ("inf", "-inf", 0, 0))
    ]


def test_instructions_on_pairs() -> None:
    a, b, c = (random_floats(seed) for seed in range(3))
    pairs = [x.bfloat16().view(torch.int32) for x in (a, b, c)]

    def on_bf16(result: Tensor) -> Tensor:
        return result.view(torch.bfloat16)

    x, y, z = (pair.view(torch.bfloat16) for pair in pairs)
    assert same(on_bf16(run("cvt.rn.bf16x2", a[::2].contiguous(), a[1::2].contiguous())), a.bfloat16())
    assert same(on_bf16(run("abs.bf16x2", pairs[0])), x.abs())
    assert equal(on_bf16(run("max.NaN", *pairs[:2])), torch.maximum(x, y))
    assert equal(on_bf16(run("min.bf16x2", *pairs[:2])), dropping_nan(x, y))
    # Where the exponents are close, the sum in FP64 is exact. The result is the nearest number, or the even one of two.
    exact = x.double() * y.double() + z.double()
    found = on_bf16(run("fma.rn.bf16x2", *pairs))
    small = torch.stack([n.double().abs().log2().abs() < 12 for n in (x, y, z)]).all(0)
    assert small.sum() > 2000
    error = (found.double() - exact).abs()
    for step in (-1, 1):
        beside = (found.view(torch.int16) + step).view(torch.bfloat16).double()
        even = found.view(torch.int16) % 2 == 0
        closer = (error < (beside - exact).abs()) | ((error == (beside - exact).abs()) & even)
        assert (closer | (found == 0))[small].all()


def test_instructions_on_bits() -> None:
    a, b = (random_floats(seed).view(torch.int32) for seed in range(2))
    low, high = a & 0xFFFF, (a >> 16) & 0xFFFF
    signs = [(x >> shift & 1) * 255 for shift in (15, 31) for x in (a, b)]
    assert torch.equal(run("prmt.b32 $0, $1, $2, 0x7632", a, b).view(torch.int32), high | (b & -65536))
    assert torch.equal(
        run("prmt.b32 $0, $1, $2, 0xFBD9", a, b).view(torch.int32), sum(sign << 8 * i for i, sign in enumerate(signs))
    )
    assert torch.equal(run("prmt.b32 $0, $1, 0, 0x4104", a).view(torch.int32), low << 8)
    assert torch.equal(run("prmt.b32 $0, $1, 0, 0x4324", a).view(torch.int32), high << 8)
    assert torch.equal(run("mad.lo.s32", a, b), a * 16 + b)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out_ptr + i * N + j, tl.dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j)))


def test_dot_of_bf16() -> None:
    a, b = (torch.randint(-8, 9, (32, 32)).bfloat16() for _ in range(2))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    assert torch.equal(out, a.float() @ b.float())


# What no GPU tells.


@triton.jit
def faulty_kernel(x_ptr, out_ptr, FAULT: tl.constexpr):
    program, i = tl.program_id(0), tl.arange(0, 4)
    if FAULT == "load":
        tl.store(out_ptr + program, tl.load(x_ptr + 14 + i + program).to(tl.float32))
    if FAULT == "store":
        tl.store(out_ptr + i + 14, 0.0)
    if FAULT == "programs":
        tl.store(out_ptr + i, program.to(tl.float32) + i)
    if FAULT == "lanes":
        tl.store(out_ptr + i // 2, i.to(tl.float32))
    if FAULT == "order":
        tl.store(out_ptr + program, tl.load(out_ptr + program + 1) + 1)
    if FAULT == "hint":
        tl.store(out_ptr + tl.multiple_of(i * 3 + 1, 4), 0.0)
    if FAULT == "assembly":
        tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [i.to(tl.float32)], tl.float32, True, 1)
    if FAULT == "none":
        tl.store(out_ptr + i, i.to(tl.float32))
        tl.store(out_ptr + 8 + program, tl.load(out_ptr + 8 + program) + 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load", "outside of the arguments"),
        ("store", "outside of the arguments"),
        ("programs", "two programs store different values"),
        ("lanes", "different values in one place"),
        ("order", "reads what another one writes"),
        ("hint", "multiple_of"),
        ("assembly", "lacks 'rsqrt.approx"),
        ("none", None),
    ],
)
def test_faults_are_found(fault: str, words: str | None) -> None:
    x, out = torch.zeros(16), torch.zeros(16)
    if words is None:
        faulty_kernel[(2,)](x, out, fault)
        return
    with pytest.raises(InterpreterError, match=words):
        for _ in range(2):  # programs in both orders
            faulty_kernel[(2,)](x, out, fault)


# Mutations.


@contextmanager
def mutated(function: Any, old: str, new: str) -> Iterator[None]:
    """A function of a kernel with a part of its text replaced."""
    source_of, known = function.rewriter._prepare_source, dict(InterpretedFunction.rewritten_fn)

    def prepare(lines: list[str]) -> str:
        source = source_of(lines)
        assert source.count(old) == 1
        return source.replace(old, new)

    known.pop(function.fn, None)
    with (
        mock.patch.object(function.rewriter, "_prepare_source", prepare),
        mock.patch.object(InterpretedFunction, "rewritten_fn", known),
    ):
        yield


MUTATIONS = {
    "none": (arithmetic.position_hash, "x >> 15", "x >> 15", nullcontext()),
    "another hash": (arithmetic.position_hash, "x >> 15", "x >> 14", pytest.raises(AssertionError)),
    "a block beyond the last": (
        *(fp4.quantize_columns_kernel, "num_blocks - 1)", "num_blocks)"),
        pytest.raises(InterpreterError, match="outside of the arguments"),
    ),
    "the reciprocal is not corrected": (
        *(arithmetic.block_encode, "tl.fma(-x, estimate, 1.0)", "0.0"),
        pytest.raises(AssertionError),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(name: str) -> None:
    # Half-way between codes, in blocks of many scales.
    steps = torch.randint(-24, 25, (32, 224), generator=torch.Generator().manual_seed(0))
    x = (steps * 0.125 * 2.0 ** -(torch.arange(32) % 13)[:, None]).bfloat16()
    *mutation, found = MUTATIONS[name]
    with mutated(*mutation), found:
        for key in (None, rounding_key(1, "a")):
            side = Side("nvfp4", (1, 16), key=key)
            check(FusedFP4, x, "columns", side, side)
