"""How a model runs: which kernels it uses, and what it recomputes in the backward pass.

The PyTorch path (`PLAIN`) runs anywhere and is the reference; the fused path differs from it by roundings to BF16.
`choose_execution` (models/pattern.py) chooses for a configuration and a machine.

    part                            torch                   fused (CUDA)
    Mamba-2's scan                  models/ssd.py, FP32     mamba-ssm, BF16 in and out, FP32 sums and states
    Mamba-2's convolution           models/mamba2.py, FP32  causal-conv1d, BF16 in and out
    attention (models/attention.py) PyTorch chooses         cuDNN, Triton or FlashAttention
    norms, squared ReLU, RoPE       eager                   torch.compile of the small pure functions
    softmax of the loss             eager                   Triton, in place

Selective activation checkpointing saves the results of GEMMs and attention, and recomputes what is between them: norms,
squared ReLU, RoPE, Mamba-2's convolution and scan. A recomputed function saves only its inputs, and marks its result
with a `_Recomputation`. Where autograd would save that result or a view of it, it saves the `_Recomputation` instead.

    norm = recomputed(norm)
    with recompute_saved():         around a block
        x = norm(h, weight)         saves h and weight; x is marked
        y = linear(x)               saves the recomputation of x instead of x
        z = squared_relu(y)         (another recomputed function) saves y
        ...

In the backward pass x is recomputed once, when it is first needed (by the linear for wgrad, or by the norm). A linear
that saves 4-bit codes of x still saves the codes, and a function that saves a copy of x (a padded one) saves the copy.

Recomputed functions are pure functions of tensors: they gather no parameters, read no clock, run no GEMM and draw no
random numbers, so gradients have the same bits as without recomputation. (Except with FP32 as the compute dtype: only
with recomputation, the parts of a norm's gradient are summed before the residual's is added. In BF16 they always are.)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class FusedKernel:
    """A kernel of another package that can replace a function in plain PyTorch.

    part: what it computes, the name by which a mixer asks for it; title: the same in words. package: its name for pip.
    refusal: called with the model's sizes and the tensor-parallel size; returns why the kernel does not support them,
    or None. optional: if it is refused, another fused kernel replaces it, so `train.kernels=fused` does not need it.
    """

    part: str
    title: str
    package: str
    function: Callable[..., Any]
    refusal: Callable[[ModelConfig, int], str | None]
    optional: bool = False


@dataclass(frozen=True)
class Execution:
    """How a model runs. It can be pickled, so that ranks can compare theirs.

    kernels: part -> the function that computes it instead of the one in plain PyTorch, with the same arguments: `scan`
    and `conv` of Mamba-2, `attention`, `loss`. (In a dry run these functions only allocate.) compile: makes one kernel
    of a small pure function, such as `torch_compile`; with it, attention prefers cuDNN and Triton computes the softmax
    of the loss. None: these functions run eagerly. recompute: `none`, `block` (a block saves only its input) or
    `selective` (it saves its input and the results of its GEMMs and attention).
    """

    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    recompute: str = "none"

    @property
    def compiled(self) -> bool:
        return self.compile is not None

    def kernel(self, part: str, plain: Callable[P, R]) -> Callable[P, R]:
        return self.kernels.get(part, plain)

    def pure(self, function: Callable[P, R], rows_vary: bool = False) -> Callable[P, R]:
        """`function`, compiled if this execution compiles. It must depend only on its arguments.

        rows_vary: the first dimension of its tensors is another one in every call.
        """
        if self.compile is None:
            return function
        compiled = self.compile(function)
        return _of_any_rows(compiled) if rows_vary else compiled

    def recomputed(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, recomputed in the backward pass if recomputation is selective.

        It must depend only on its arguments, which are tensors and constants, and return tensors.
        """
        return recomputed(function) if self.recompute == "selective" else function


PLAIN = Execution()

# At most this number of processes compile for a rank; a model has about fifteen kernels to compile.
_COMPILERS = 8


@functools.cache
def torch_compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled by torch.compile; the same object in every call."""
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # The ranks of a machine share its cores, but each would start min(cores, 32) compilers.
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        config.compile_threads = min(max(cores, 1), _COMPILERS)
    # A micro-batch has the same shapes in the whole run, and kernels for dynamic shapes would be slower.
    return torch.compile(function, dynamic=False)


def _of_any_rows(compiled: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(compiled)
    def marking(*arguments: Any) -> Any:
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*arguments)  # type: ignore[call-arg]

    return marking  # type: ignore[return-value]


def recomputed(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of tensors and constants, recomputed in the backward pass. If a gradient is needed, its results (a
    tensor or a tuple of tensors) are marked for `recompute_saved`."""

    @functools.wraps(function)
    def marking(*arguments: Any) -> Any:
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)):
            return function(*arguments)  # type: ignore[call-arg]
        recomputation = _Recomputation(function, arguments)
        results = _Recomputed.apply(recomputation, *arguments)
        for i, result in enumerate(_tuple(results)):
            result._recomputation = (recomputation, i)
        return results

    return marking  # type: ignore[return-value]


def recompute_saved() -> AbstractContextManager[Any]:
    """A context in which autograd saves the recomputation of a marked result, or of a view of one, instead of it."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


# Inside a forward pass that will be recomputed: keeps what is decided. Inside the recomputation: gives it back.
_kept_decisions: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("kept_decisions", default=None)


def decided(decide: Callable[[], R]) -> R:
    """The result of `decide`. If this is the recomputation of a forward pass, the result that it had there, without
    calling `decide`: a router must not count twice, nor choose other experts after other roundings."""
    keep = _kept_decisions.get()
    return decide() if keep is None else keep(decide)


def contexts_of_decisions() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a forward pass and of its recomputation, for torch's `checkpoint`."""
    decisions = list[Any]()

    def keep(decide: Callable[[], Any]) -> Any:
        decisions.append(decide())
        return decisions[-1]

    return _deciding_by(keep), _deciding_by(lambda decide: decisions.pop(0))


@contextmanager
def _deciding_by(keep: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _kept_decisions.set(keep)
    try:
        yield
    finally:
        _kept_decisions.reset(token)


class _Recomputation:
    """A recomputed function, its arguments, and during the backward pass its results."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
        self._results: tuple[Tensor, ...] | None = None

    def results(self) -> tuple[Tensor, ...]:
        """The results with their graph from `inputs`; computed once and kept until `free`."""
        if self._results is None:
            with torch.enable_grad():
                self._results = _tuple(self.function(*self.inputs))
        return self._results

    def free(self) -> None:
        """Drop inputs and results. Called after the gradient of the inputs: nothing needs them any more."""
        self.inputs, self._results = [], None


def _pack(tensor: Tensor) -> Any:
    """The tensor, or if it is a marked result or a view of one: its recomputation, index, and shape and strides."""
    for marked in (tensor, tensor._base):
        if (recomputation_and_index := getattr(marked, "_recomputation", None)) is not None:
            return *recomputation_and_index, tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return tensor


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    recomputation, index, *layout = saved
    return recomputation.results()[index].detach().as_strided(*layout)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recomputation: _Recomputation, *arguments: Any) -> Any:
        ctx.recomputation = recomputation
        ctx.set_materialize_grads(False)
        results = recomputation.function(*(a.detach() if isinstance(a, Tensor) else a for a in arguments))
        # Detached, so that a result is the base of its views, even if the function returned a view.
        return tuple(t.detach() for t in results) if isinstance(results, tuple) else results.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        recomputation: _Recomputation = ctx.recomputation
        needs_gradient = [isinstance(a, Tensor) and a.requires_grad for a in recomputation.inputs]
        pairs = [(y, dy) for y, dy in zip(recomputation.results(), grad_outputs, strict=True) if dy is not None]
        inputs = [a for a, needed in zip(recomputation.inputs, needs_gradient, strict=True) if needed]
        results, dresults = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(results, inputs, dresults, allow_unused=True))
        recomputation.free()
        return None, *(next(gradients) if needed else None for needed in needs_gradient)


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
