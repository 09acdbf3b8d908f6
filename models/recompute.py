"""Selective activation checkpointing: keep what GEMMs return, compute everything between them again.

Between two GEMMs lie cheap functions: norms, squared ReLU, RoPE, Mamba-2's convolution and scan. Their results are as
large as the GEMMs' own, and a linear keeps its input for wgrad. So the mixers run those functions through
`Recompute.cheap` and their linears and attention through `Recompute.expensive`:

    x = recompute.cheap(norm, h, weight)          keeps h and weight
    y = recompute.expensive(linear, x)            keeps y; where the linear keeps x, it keeps a promise of x instead
    z = recompute.cheap(squared_relu, y)          keeps y
    ...

In the backward pass whoever first needs x (the linear for wgrad, or the norm itself) has it computed again, once, and
the other uses the same. A linear that keeps 4-bit codes of x instead of x goes on keeping the codes.

The cheap functions are pure functions of tensors: no parameters are gathered, no clock is read, no GEMM is run and no
random number drawn a second time, so gradients have the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Recompute:
    """Of one block. Not enabled, it calls the functions and does nothing else."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._promised: list[_Promise] = []

    def cheap(self, function: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        """function(*tensors), a tensor or a tuple of tensors, to be computed again in the backward pass."""
        if not (self.enabled and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return function(*tensors)
        promise = _Promise(function, tensors)
        outputs = _Cheap.apply(promise, *tensors)
        promise.storages = [t.untyped_storage()._cdata for t in _tuple(outputs)]
        self._promised.append(promise)
        return outputs

    def expensive(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """function(*tensors), which keeps promises of what `cheap` returned, not the tensors."""
        if not self._promised:
            return function(*tensors)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return function(*tensors)
        finally:
            self._promised.clear()

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        for promise in self._promised:
            if tensor.numel() and storage in promise.storages:
                output = promise.storages.index(storage)
                return _View(promise, output, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor


class _Promise:
    """A cheap function, its inputs, and in the backward pass, for a while, its outputs."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
        self.function = function
        self.inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        self.storages: list[int] = []
        self._made: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        """With the graph from `inputs` to them; computed once and kept until `forget`."""
        if self._made is None:
            with torch.enable_grad():
                self._made = _tuple(self.function(*self.inputs))
        return self._made

    def forget(self) -> None:
        """The gradient has passed through: nobody upstream needs the outputs."""
        self.inputs, self._made = [], None


@dataclass(frozen=True)
class _View:
    """A tensor in the storage of a promise's output."""

    promise: _Promise
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    output = kept.promise.outputs()[kept.output].detach()
    return output.as_strided(kept.size, kept.stride, kept.offset)


class _Cheap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, promise: _Promise, *tensors: Tensor) -> Any:
        ctx.promise = promise
        ctx.set_materialize_grads(False)
        return promise.function(*(t.detach() for t in tensors))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        promise: _Promise = ctx.promise
        wanted = [t for t in promise.inputs if t.requires_grad]
        pairs = [(y, dy) for y, dy in zip(promise.outputs(), grad_outputs, strict=True) if dy is not None]
        found = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
        gradients = iter(found)
        result = (None, *(next(gradients) if t.requires_grad else None for t in promise.inputs))
        promise.forget()
        return result


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
