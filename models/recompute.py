"""Selective activation checkpointing: keep what GEMMs return, compute everything between them again.

Between two GEMMs lie cheap functions: norms, squared ReLU, RoPE, Mamba-2's convolution and scan. Their results are as
large as the GEMMs' own, and a linear keeps its input for wgrad. So a cheap function keeps its inputs alone, and puts on
its result a promise to make it again; and whatever would keep that result, or a view of it, keeps the promise instead.

    norm = cheap(norm)
    with keeping_promises():        around a block
        x = norm(h, weight)         keeps h and weight; x bears a promise
        y = linear(x)               where it would keep x, it keeps the promise
        z = squared_relu(y)         (another cheap function) keeps y
        ...

In the backward pass whoever first needs x (the linear for wgrad, or the norm itself) has it computed again, once, and
the other uses the same. A linear that keeps 4-bit codes of x instead of x goes on keeping the codes, and what keeps a
copy of x, padded for instance, keeps the copy.

The cheap functions are pure functions of tensors: no parameters are gathered, no clock is read, no GEMM is run and no
random number drawn a second time, so gradients have the same bits as without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def cheap(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of tensors and constants, whose results (a tensor or a tuple of them) bear promises.

    Where no gradient is asked for, it is `function` and nothing else.
    """

    @functools.wraps(function)
    def promising(*arguments: Any) -> Any:
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)):
            return function(*arguments)  # type: ignore[call-arg]
        promise = _Promise(function, arguments)
        results = _Cheap.apply(promise, *arguments)
        for i, result in enumerate(_tuple(results)):
            result._promised = (promise, i)
        return results

    return promising  # type: ignore[return-value]


def keeping_promises() -> AbstractContextManager[Any]:
    """Inside, what autograd keeps of a result that bears a promise, or of a view of it, is the promise."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


class _Promise:
    """A cheap function, its arguments, and in the backward pass, for a while, its results."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
        self._made: tuple[Tensor, ...] | None = None

    def results(self) -> tuple[Tensor, ...]:
        """With the graph from `inputs` to them; computed once and kept until `forget`."""
        if self._made is None:
            with torch.enable_grad():
                self._made = _tuple(self.function(*self.inputs))
        return self._made

    def forget(self) -> None:
        """The gradient has passed through: nobody upstream needs the results."""
        self.inputs, self._made = [], None


@dataclass(frozen=True)
class _View:
    """A promised result as somebody saw it."""

    promise: _Promise
    result: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _pack(tensor: Tensor) -> Tensor | _View:
    for bearer in (tensor, tensor._base):
        if (promised := getattr(bearer, "_promised", None)) is not None:
            promise, result = promised
            return _View(promise, result, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return tensor


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    result = kept.promise.results()[kept.result].detach()
    return result.as_strided(kept.size, kept.stride, kept.offset)


class _Cheap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, promise: _Promise, *arguments: Any) -> Any:
        ctx.promise = promise
        ctx.set_materialize_grads(False)
        results = promise.function(*(a.detach() if isinstance(a, Tensor) else a for a in arguments))
        # Detached, a result is the base of its views, even if the function returned a view of something.
        return tuple(t.detach() for t in results) if isinstance(results, tuple) else results.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        promise: _Promise = ctx.promise
        wanted = [isinstance(a, Tensor) and a.requires_grad for a in promise.inputs]
        pairs = [(y, dy) for y, dy in zip(promise.results(), grad_outputs, strict=True) if dy is not None]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [a for a, needed in zip(promise.inputs, wanted, strict=True) if needed],
            [dy for _, dy in pairs],
            allow_unused=True,
        )
        gradients = iter(found)
        promise.forget()
        return None, *(next(gradients) if needed else None for needed in wanted)


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
