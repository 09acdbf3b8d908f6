"""Triton's interpreter with the arithmetic of a GPU, and with checks that no GPU makes.

Its own arithmetic differs without a word: FP32 to BF16 truncates, a dot product of BF16 multiplies the bits as
integers, `tl.fma` rounds twice, `tl.minimum` of a number and NaN is NaN. Inline assembly it refuses.

A launch ends with an error if a program reads or writes outside of the arguments; if it stores two different values in
one place, or a value that differs from that of another program; if it reads what another program writes; if a hint of
`tl.multiple_of` is wrong. Every other launch runs its programs in the reverse order.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.interpreted import arithmetic
from tests.interpreted.arithmetic import F32, I32, U32, Array

SHARED = -1  # the writer of what several programs update


class Memory:
    """What the programs of a launch may touch, and which of them has written each byte (counted from 1; 0: none)."""

    def __init__(self) -> None:
        self.program = 0
        self.begins: list[int] = []
        self.writers: list[Array] = []

    def open(self, arguments: Iterable[Any]) -> None:
        """Begin a launch. Arguments that overlap are one range."""
        ranges: list[list[int]] = []
        for begin, end in sorted(_range_of(tensor) for tensor in arguments if hasattr(tensor, "data_ptr")):
            if ranges and begin < ranges[-1][1]:
                ranges[-1][1] = max(end, ranges[-1][1])
            elif begin < end:
                ranges.append([begin, end])
        self.begins = [begin for begin, _ in ranges]
        self.writers = [np.zeros(end - begin, I32) for begin, end in ranges]

    def accessed(self, pointers: Array, size: int) -> tuple[Array, Array]:
        """The writers of a range, and the places in it of the `size` bytes at each pointer."""
        first, last = int(pointers.min()), int(pointers.max())
        index = bisect.bisect(self.begins, first) - 1
        assert index >= 0 and last + size - self.begins[index] <= len(self.writers[index]), (
            "a program reads or writes outside of the arguments"
        )
        places = (pointers - np.uint64(self.begins[index])).astype(np.int64)
        return self.writers[index], places[:, None] + np.arange(size)

    def load(self, pointers: Array, size: int) -> None:
        writers, places = self.accessed(pointers, size)
        found = writers[places]
        assert ((found == 0) | (found == self.program)).all(), "a program reads what another one writes"

    def store(self, pointers: Array, values: Array) -> None:
        """Store values, one for each pointer."""
        writers, places = self.accessed(pointers, values.itemsize)
        found = writers[places]
        shared = ((found != 0) & (found != self.program)).any(-1)
        assert _same_bits(_load(pointers[shared], values.dtype), values[shared]), "two programs store different values"
        interpreter._interpreter.store(pointers, values, np.ones(pointers.shape, bool))
        assert _same_bits(_load(pointers, values.dtype), values), "a program stores different values in one place"
        writers[places] = self.program

    def update(self, pointers: Array, size: int) -> None:
        """Before an atomic operation."""
        writers, places = self.accessed(pointers, size)
        assert (writers[places] <= 0).all(), "a program updates what another one writes"
        writers[places] = SHARED


MEMORY = Memory()
LAUNCHES: Counter[str] = Counter()


def _range_of(tensor: Any) -> tuple[int, int]:
    tensor, begin = interpreter._unwrap_tensor(tensor), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def _load(pointers: Array, dtype: Any) -> Array:
    return interpreter._interpreter.load(
        pointers, np.ones(pointers.shape, bool), np.zeros(pointers.shape, dtype), np.dtype(dtype)
    )


def _same_bits(a: Array, b: Array) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


class Builder(InterpreterBuilder):
    """The operations that differ from those of Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # hashes overflow
        self.reverse = False

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        if self.reverse:
            x, y, z = (size - 1 - i for size, i in zip(self.grid_dim, (x, y, z), strict=True))
        self.grid_idx = (x, y, z)
        MEMORY.program = 1 + (x * self.grid_dim[1] + y) * self.grid_dim[2] + z

    def get_block_ty(self, element: Any, shape: Any) -> Any:
        return _block_of(element, shape)

    # Memory.

    def create_masked_load(self, pointers: Any, mask: Any, other: Any, *options: Any) -> TensorHandle:
        (data, mask), element = np.broadcast_arrays(pointers.data, mask.data), pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(element)
        if mask.any():
            MEMORY.load(data[mask], dtype.itemsize)
        filling = np.zeros(1, dtype) if other is None else other.data
        found = np.array(np.broadcast_to(filling, data.shape), dtype)
        found[mask] = _load(data[mask], dtype)
        return TensorHandle(found, element)

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *options: Any) -> None:
        data, values, mask = np.broadcast_arrays(pointers.data, value.data, mask.data)
        if mask.any():
            dtype = interpreter._get_np_dtype(pointers.get_element_ty())
            MEMORY.store(data[mask], values[mask].astype(dtype, copy=False))

    def create_atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> TensorHandle:
        MEMORY.update(pointers.data[mask.data], value.data.itemsize)
        return super().create_atomic_rmw(operation, pointers, value, mask, *options)

    # Arithmetic.

    def cast_impl(self, source: Any, target: Any) -> TensorHandle:
        data = arithmetic.from_bf16(source.data) if source.dtype.scalar == tl.bfloat16 else source.data
        if target.scalar == tl.bfloat16:
            return TensorHandle(arithmetic.bf16_bits(data.astype(F32)), tl.bfloat16)
        return TensorHandle(data.astype(interpreter._get_np_dtype(target)), target.scalar)

    def create_fp_to_fp(self, source: Any, target: Any, rounding: Any) -> TensorHandle:
        return self.cast_impl(source, target)

    def create_dot(self, a: Any, b: Any, total: Any, *options: Any) -> TensorHandle:
        a, b = (arithmetic.from_bf16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        return TensorHandle(np.matmul(a, b, dtype=total.data.dtype) + total.data, total.dtype.scalar)

    def create_fma(self, a: Any, b: Any, c: Any) -> TensorHandle:
        assert c.dtype.scalar == tl.float32, "only FP32 is emulated"
        return TensorHandle(arithmetic.fma_rn(a.data, b.data, c.data), tl.float32)

    def create_minnumf(self, a: Any, b: Any) -> TensorHandle:
        return self.binary_op(a, b, np.fmin)

    def create_maxnumf(self, a: Any, b: Any) -> TensorHandle:
        return self.binary_op(a, b, np.fmax)

    def create_inline_asm(self, assembly: str, constraints: str, values: Any, types: Any, *options: Any) -> Any:
        if assembly not in PTX:
            raise NotImplementedError(f"tests/interpreted/arithmetic.py lacks {assembly!r}")
        data = np.broadcast_arrays(*(value.data for value in values))
        result = np.ascontiguousarray(PTX[assembly](*map(np.ascontiguousarray, data)))
        dtype = interpreter._get_np_dtype(types[0].scalar)
        handle = TensorHandle(result.view(dtype), types[0].scalar)
        return SimpleNamespace(get_result=lambda index: handle)


def _store_low(pointers: Array, words: Array, dtype: Any) -> Array:
    MEMORY.store(pointers.view(np.uint64).ravel(), words.view(U32).ravel().astype(dtype))
    return np.zeros(pointers.shape, I32)


def _load_high(pointers: Array) -> Array:
    pointers = pointers.view(np.uint64)
    MEMORY.load(pointers.ravel(), 2)
    return _load(pointers, np.uint16).astype(U32) << U32(16)


PTX = {
    **arithmetic.PTX,
    "{ .reg .b16 h; ld.global.b16 h, [$1]; mov.b32 $0, {0, h}; }": _load_high,
    "st.global.b8 [$1], $2; mov.b32 $0, 0;": lambda p, word: _store_low(p, word, np.uint8),
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], l; mov.b32 $0, 0; }": lambda p, word: _store_low(
        p, word, np.uint16
    ),
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], h; mov.b32 $0, 0; }": lambda p, word: _store_low(
        p, word.view(U32) >> U32(16), np.uint16
    ),
}


class Reduce(interpreter.ReduceOps):
    """Reductions by functions of kernels, slice after slice instead of element after element."""

    def generic_reduce(self, inputs: Any) -> list[Any]:
        inputs, axis = self.unravel(inputs, self.axis)
        slices = [
            tuple(self.to_tensor(part, x.dtype) for x, part in zip(inputs, parts, strict=True))
            for parts in zip(*(np.moveaxis(x.handle.data, axis, 0) for x in inputs), strict=True)
        ]
        total = slices[0]
        for one in slices[1:]:
            total = self.combine_fn(*total, *one)
            total = total if isinstance(total, tuple) else (total,)
        data = [x.handle.data for x in total]
        if self.keep_dims:
            data = [np.expand_dims(x, axis) for x in data]
        return [self.to_tensor(x, each.dtype) for x, each in zip(data, inputs, strict=True)]


# Triton makes the type of every result anew, which takes most of the time of an operation. These do the same faster.


@functools.cache
def _block_type(element: str, *shape: int) -> Any:
    return tl.block_type(ELEMENTS[element], list(shape))


ELEMENTS: dict[str, Any] = {}


def _block_of(element: Any, shape: Iterable[int]) -> Any:
    """The block type [shape] of `element`: one object for all."""
    ELEMENTS.setdefault(element.name, element)
    return _block_type(element.name, *shape)


NP_DTYPES: dict[str, Any] = {}


def _np_dtype(name: str, kind: Any) -> Any:
    if name not in NP_DTYPES:
        NP_DTYPES[name] = GET_NP_DTYPE(kind)
    return NP_DTYPES[name]


GET_NP_DTYPE = interpreter._get_np_dtype


class Semantic(interpreter.TritonSemantic):
    """Broadcasting that leaves most to NumPy; two numbers of one type need no check."""

    def binary_op_type_checking_impl(self, a: Any, b: Any, *options: Any, **named: Any) -> Any:
        if type(a) is type(b) is tl.tensor and a.type is b.type and a.dtype.name in ("int32", "uint32", "fp32"):
            return a, b
        return super().binary_op_type_checking_impl(a, b, *options, **named)

    def broadcast_impl_value(self, a: Any, b: Any) -> Any:
        (one, other), blocks = (a.type, b.type), (a.type.is_block(), b.type.is_block())
        if blocks == (False, False) or (all(blocks) and one.shape.values == other.shape.values):
            return a, b
        if not all(blocks):  # data of one element
            shape = (one if blocks[0] else other).shape
            return tuple(x if x.type.is_block() else tl.tensor(x.handle, _block_of(x.dtype, shape)) for x in (a, b))
        return super().broadcast_impl_value(a, b)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(*type.shape) if type.is_block() else _shape_of()


@functools.cache
def _shape_of(*sizes: int) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def multiple_of(x: Any, values: Any) -> Any:
    """Check the hint: a number is a multiple, or every run of `value` neighbours begins with one."""
    if isinstance(x, tl.tensor):
        value = int(getattr(values, "value", values))
        first = x.handle.data if x.handle.data.size == 1 else x.handle.data[..., ::value]
        assert (first % value == 0).all(), f"tl.multiple_of: not multiples of {value}"
    return x


def _launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """`kernel[grid](...)` on the memory of the arguments; Triton's launch would copy them, and patch its language for
    the time of the launch."""
    arguments = tuple(_plain(argument) for argument in arguments)
    options = {name: value for name, value in options.items() if name in self.arg_names}
    MEMORY.open([*arguments, *options.values()])
    name = f"{self.fn.__module__}.{self.fn.__name__}"
    LAUNCHES[name] += 1
    BUILDER.reverse = LAUNCHES[name] % 2 == 0
    with np.errstate(all="ignore"):
        interpreter.GridExecutor(self.rewrite(), self.arg_names, grid)(*arguments, **options)


def _plain(argument: Any) -> Any:
    return argument.as_subclass(torch.Tensor) if isinstance(argument, torch.Tensor) else argument


BUILDER = Builder()


def install() -> None:
    """Change Triton's interpreter, for the rest of the process."""
    interpreter.interpreter_builder = BUILDER
    interpreter.interpreter_semantic = Semantic(BUILDER)
    interpreter.TritonSemantic = Semantic
    interpreter._get_np_dtype = lambda kind: _np_dtype(kind.scalar.name, kind)
    tl.tensor.__init__ = _init_tensor
    tl.block_type.with_element_ty = lambda self, element: _block_of(element, self.shape)
    interpreter.ReduceOps = Reduce
    # One patch of Triton's language, here, instead of one for each launch and each call of a function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.multiple_of = tl.core.multiple_of = multiple_of
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())  # Triton 3.6's needs an older NumPy
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    interpreter.InterpretedFunction.__call__ = lambda self, *arguments, **options: self.rewrite()(*arguments, **options)
    interpreter.InterpretedFunction.run = _launch
