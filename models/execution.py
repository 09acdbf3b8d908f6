"""How a model computes what it computes: which kernels, and what it computes again in the backward pass.

The PyTorch path (`PLAIN`) runs anywhere and is the reference; the fused path differs from it by roundings to BF16.
`choose_execution` (models/pattern.py) chooses for a configuration and a machine.

    part                            torch                   fused (CUDA)
    Mamba-2's scan                  models/ssd.py, FP32     mamba-ssm, BF16 in and out, FP32 sums and states
    Mamba-2's convolution           models/mamba2.py, FP32  causal-conv1d, BF16 in and out
    attention (models/attention.py) PyTorch's own choice    cuDNN, Triton or FlashAttention
    norms, squared ReLU, RoPE       eager                   torch.compile of the small pure functions
    softmax of the loss             eager                   Triton, in place

Selective activation checkpointing keeps what GEMMs return, and computes everything between them again: norms, squared
ReLU, RoPE, Mamba-2's convolution and scan. A recomputed function keeps its inputs alone, and puts on its result a
promise to make it again; whatever would keep that result, or a view of it, keeps the promise instead.

    norm = recomputed(norm)
    with recompute_saved():         around a block
        x = norm(h, weight)         keeps h and weight; x bears a promise
        y = linear(x)               where it would keep x, it keeps the promise
        z = squared_relu(y)         (another recomputed function) keeps y
        ...

In the backward pass whatever first needs x (the linear for wgrad, or the norm itself) has it computed again, once.
A linear that keeps 4-bit codes of x keeps the codes, and what keeps a copy of x, padded for instance, keeps the copy.

Recomputed functions are pure functions of tensors: they gather no parameters, read no clock, run no GEMM and draw no
random number, so gradients have the same bits as without. (Not with FP32 as the compute dtype: the parts of a norm's
gradient are added up before the residual's then, as they are in BF16 anyway.)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class FusedKernel:
    """A kernel of another package that can take the place of a function in plain PyTorch.

    part: what it computes, the name under which a mixer asks for it; title: the same in words. package: as pip knows
    it. refusal: why it does not take a model's sizes at a tensor-parallel size, or None. optional: whether another
    fused kernel takes its place then, so that `train.kernels=fused` goes without it.
    """

    part: str
    title: str
    package: str
    function: Callable[..., Any]
    refusal: Callable[[ModelConfig, int], str | None]
    optional: bool = False


@dataclass(frozen=True)
class Execution:
    """The choices. Everything in it can be pickled, for ranks to compare theirs.

    kernels: part -> what computes it in place of the function in plain PyTorch, with the same arguments: `scan` and
    `conv` of Mamba-2, `attention`, `loss`. (A dry run puts functions here that only allocate.)
    compile: makes one kernel of a small pure function (norms, squared ReLU, RoPE), such as `torch_compile`; with it,
    attention prefers cuDNN and the loss's softmax is Triton's. None: such functions run as they are.
    recompute: `none`, `block` (a block keeps only its input) or `selective` (it keeps its input and what its GEMMs and
    attention return).
    """

    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    recompute: str = "none"

    @property
    def compiled(self) -> bool:
        """Whether small pure functions are compiled."""
        return self.compile is not None

    def kernel(self, part: str, plain: Callable[P, R]) -> Callable[P, R]:
        """What computes `part`: the kernel if there is one, else `plain`."""
        return self.kernels.get(part, plain)

    def pure(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, compiled if this execution compiles. It must depend on nothing but its arguments."""
        return function if self.compile is None else self.compile(function)

    def recomputed(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, computed again in the backward pass if recomputation is selective.

        It must depend on nothing but its arguments, which are tensors and constants, and return tensors.
        """
        return recomputed(function) if self.recompute == "selective" else function


PLAIN = Execution()

# Processes of one rank that compile, at most; a model has some fifteen such kernels.
_COMPILERS = 8


@functools.cache
def torch_compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function` through torch.compile; the same one every time."""
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # The ranks of a machine share its cores: each would start as many compilers as there are cores, or 32.
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        config.compile_threads = min(max(cores, 1), _COMPILERS)
    # Shapes are those of one micro-batch for the whole run; compiled for any shape the kernels would be slower.
    return torch.compile(function, dynamic=False)


def recomputed(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of tensors and constants, whose results (a tensor or a tuple of them) bear promises, if a gradient is
    asked for."""

    @functools.wraps(function)
    def promising(*arguments: Any) -> Any:
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)):
            return function(*arguments)  # type: ignore[call-arg]
        promise = _Promise(function, arguments)
        results = _Recomputed.apply(promise, *arguments)
        for i, result in enumerate(_tuple(results)):
            result._promised = (promise, i)
        return results

    return promising  # type: ignore[return-value]


def recompute_saved() -> AbstractContextManager[Any]:
    """Inside, what autograd keeps of a result that bears a promise, or of a view of it, is the promise."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


class _Promise:
    """A recomputed function, its arguments, and in the backward pass, for a while, its results."""

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
        """The gradient has passed through: nothing upstream needs the results."""
        self.inputs, self._made = [], None


def _pack(tensor: Tensor) -> Any:
    """The tensor, or the promise that it is part of, which of its results, and how it lies there."""
    for bearer in (tensor, tensor._base):
        if (promised := getattr(bearer, "_promised", None)) is not None:
            return *promised, tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return tensor


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    promise, result, *place = kept
    return promise.results()[result].detach().as_strided(*place)


class _Recomputed(torch.autograd.Function):
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
        inputs = [a for a, needed in zip(promise.inputs, wanted, strict=True) if needed]
        results, gradients = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(results, inputs, gradients, allow_unused=True))
        promise.forget()
        return None, *(next(found) if needed else None for needed in wanted)


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
