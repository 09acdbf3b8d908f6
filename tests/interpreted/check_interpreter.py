"""The interpreter against definitions written anew here, so that a change of Triton does not pass in silence; and three
mutations of kernels, which the tests of tests/gpu find."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
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

N = 2**16


def random_floats(seed: int) -> Tensor:
    """FP32 numbers of all magnitudes, with zeros, subnormals, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (N,), generator=torch.Generator().manual_seed(seed))
    x = torch.where(bits % 3 == 0, (bits % 4096 - 2048).float(), bits.to(torch.int32).view(torch.float32))
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("nan"), 1e-45, -3e38])
    return x.roll(3 * seed)


def same(a: Tensor, b: Tensor, zeros: bool = False) -> bool:
    """Equal bits; NaN equals NaN. zeros: +0 equals -0, too."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    equal = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool((equal | (a == b) if zeros else equal).all())


def dropping_nan(a: Tensor, b: Tensor) -> Tensor:
    """The smaller number; the other one if one is NaN. (`torch.fmin` of a signaling NaN is NaN.)"""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.minimum(a, b)))


def c_fma(a: Tensor, b: Tensor, c: Tensor, rounding: int = 0) -> Tensor:
    """fmaf of the C library. rounding: 0 to nearest, 0x400 towards minus infinity (x86)."""
    library = ctypes.CDLL("libm.so.6")
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    library.fesetround(rounding)
    try:
        return torch.tensor([library.fmaf(*each) for each in zip(*(x.tolist() for x in (a, b, c)), strict=True)])
    finally:
        library.fesetround(0)


A, B, C = (random_floats(seed) for seed in range(3))
C[::2] = -(A * B)[::2] * (1 + 2.0**-20)  # cancels almost all of the product
X, Y, Z = (x.bfloat16() for x in (A, B, random_floats(2)))
P, Q = A.view(torch.int32), B.view(torch.int32)
SIGNS = sum((x >> shift & 1) * 255 << 8 * i for i, (shift, x) in enumerate([(15, P), (15, Q), (31, P), (31, Q)]))
# How an instruction begins: its operands, and its result, each as FP32, pairs of BF16, or bits.
INSTRUCTIONS: dict[str, tuple[Any, Any]] = {
    "fma.rm.f32": ([A, B, C], c_fma(A, B, C, rounding=0x400)),
    "rcp.rn.f32": ([A], A.reciprocal()),
    "abs.f32": ([A], A.abs()),
    "cvt.rn.bf16x2": ([A[::2], A[1::2]], X),
    "abs.bf16x2": ([X], X.abs()),
    "max.NaN.bf16x2": ([X, Y], torch.maximum(X, Y)),
    "min.bf16x2": ([X, Y], dropping_nan(X, Y)),
    "prmt.b32 $0, $1, $2, 0x7632": ([P, Q], ((P >> 16) & 0xFFFF) | (Q & -65536)),
    "prmt.b32 $0, $1, $2, 0xFBD9": ([P, Q], SIGNS),
    "prmt.b32 $0, $1, 0, 0x4104": ([P], (P & 0xFFFF) << 8),
    "prmt.b32 $0, $1, 0, 0x4324": ([P], ((P >> 16) & 0xFFFF) << 8),
    "mad.lo.s32": ([P, Q], P * 16 + Q),
}


def run(name: str, *values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One instruction: the one of PTX that begins with `name`."""
    (function,) = (function for text, function in PTX.items() if text.startswith(name))
    arrays = [(x.view(torch.int32) if x.dtype == torch.bfloat16 else x.contiguous()).numpy() for x in values]
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(*arrays))).view(dtype)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions(name: str) -> None:
    operands, expected = INSTRUCTIONS[name]
    assert same(run(name, *operands, dtype=expected.dtype), expected, zeros=name[:3] in ("max", "min"))


def test_an_approximate_reciprocal_is_off_by_one_bit() -> None:
    normal = A[(A.abs() > 2.0**-120) & (A.abs() < 2.0**120)]
    error = run("rcp.approx", normal).view(torch.int32) - normal.reciprocal().view(torch.int32)
    assert error.unique().tolist() == [-1, 0, 1]
    of_limits = run("rcp.approx", torch.tensor([0.0, -1e-40, float("inf"), 3e38]))
    assert of_limits.tolist() == [float("inf"), float("-inf"), 0.0, 0.0]


def test_fma_of_pairs() -> None:
    """The nearest number, or the even one of two, where exponents are close, so that the sum in FP64 is exact."""
    exact, found = X.double() * Y.double() + Z.double(), run("fma.rn.bf16x2", X, Y, Z, dtype=torch.bfloat16)
    small = torch.stack([n.double().abs().log2().abs() < 12 for n in (X, Y, Z)]).all(0)
    assert small.sum() > 2000
    error, bits = (found.double() - exact).abs(), found.view(torch.int16)
    for step in (-1, 1):
        of_other = ((bits + step).view(torch.bfloat16).double() - exact).abs()
        assert ((error < of_other) | ((error == of_other) & (bits % 2 == 0)) | (found == 0))[small].all()


@triton.jit
def convert_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_conversions_of_all_patterns(low: int) -> None:
    x = ((torch.arange(N, dtype=torch.int32) << 16) | low).view(torch.float32)
    shorter, longer = torch.empty(N, dtype=torch.bfloat16), torch.empty(N)
    convert_kernel[(1,)](x, shorter, N)
    convert_kernel[(1,)](shorter, longer, N)
    assert same(shorter, x.bfloat16()) and same(longer, shorter.float())


@triton.jit
def three_kernel(a_ptr, b_ptr, c_ptr, fma_ptr, minimum_ptr, nan_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c = tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(c_ptr + i)
    tl.store(fma_ptr + i, tl.fma(a, b, c))
    tl.store(minimum_ptr + i, tl.minimum(a, b))
    tl.store(nan_ptr + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))


def test_fma_and_minimum() -> None:
    fma, minimum, with_nan = (torch.empty(N) for _ in range(3))
    three_kernel[(1,)](A, B, C, fma, minimum, with_nan, N)
    assert same(fma, c_fma(A, B, C)) and not same(fma, A * B + C)
    assert same(minimum, dropping_nan(A, B), zeros=True) and same(with_nan, torch.minimum(A, B), zeros=True)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out_ptr + i * N + j, tl.dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j)))


def test_dot_of_bf16() -> None:
    a, b = torch.randint(-8, 9, (2, 32, 32)).bfloat16()
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    assert torch.equal(out, a.float() @ b.float())


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


FAULTS = {
    "load": "outside of the arguments",
    "store": "outside of the arguments",
    "programs": "two programs store different values",
    "lanes": "different values in one place",
    "order": "reads what another one writes",
    "hint": "multiple_of",
    "assembly": "lacks 'rsqrt.approx",
    "none": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_no_gpu_tells_are_found(fault: str) -> None:
    with pytest.raises(InterpreterError, match=FAULTS[fault]) if FAULTS[fault] else nullcontext():
        for _ in range(2):  # programs in both orders
            faulty_kernel[(2,)](torch.zeros(16), torch.zeros(16), fault)


BEYOND = pytest.raises(InterpreterError, match="outside of the arguments")
MUTATIONS: dict[str, tuple[Any, str, str, Any]] = {  # a function of a kernel, a part of its text, instead, what happens
    "none": (arithmetic.position_hash, "x >> 15", "x >> 15", nullcontext()),
    "another hash": (arithmetic.position_hash, "x >> 15", "x >> 14", pytest.raises(AssertionError)),
    "a block beyond the last": (fp4.quantize_columns_kernel, "num_blocks - 1)", "num_blocks)", BEYOND),
    "no correction": (arithmetic.block_encode, "tl.fma(-x, estimate, 1.0)", "0.0", pytest.raises(AssertionError)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(name: str) -> None:
    # Half-way between codes, in blocks of many scales.
    steps = torch.randint(-24, 25, (32, 224), generator=torch.Generator().manual_seed(0))
    x = (steps * 0.125 * 2.0 ** -(torch.arange(32) % 13)[:, None]).bfloat16()
    function, old, new, found = MUTATIONS[name]
    source_of = function.rewriter._prepare_source

    def mutated(lines: list[str]) -> str:
        source = source_of(lines)
        assert source.count(old) == 1
        return source.replace(old, new)

    rewritten = {other: text for other, text in InterpretedFunction.rewritten_fn.items() if other != function.fn}
    with (
        mock.patch.object(function.rewriter, "_prepare_source", mutated),
        mock.patch.object(InterpretedFunction, "rewritten_fn", rewritten),
        found,
    ):
        for key in (None, rounding_key(1, "a")):
            side = Side("nvfp4", (1, 16), key=key)
            check(FusedFP4, x, "columns", side, side)
