"""Faults of memory that the interpreter finds and no GPU tells; and three mutations of kernels, which the tests of
tests/gpu find. That the arithmetic is a GPU's, the same tests show: kernels have the bits of the reference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.fp4 import FusedFP4
from megatron_fp4.quantization.kernels import arithmetic, fp4
from megatron_fp4.quantization.rounding import rounding_key
from tests.gpu.test_quantizers import check


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
    "load": "outside of the arguments", "store": "outside of the arguments", "hint": "multiple_of",
    "programs": "two programs store different values", "lanes": "different values in one place",
    "order": "reads what another one writes", "assembly": "lacks 'rsqrt.approx", "none": "",
}  # fmt: skip


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
