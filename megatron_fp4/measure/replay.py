"""Detect silent data corruption: compute one micro-batch twice and compare every number.

A processor that sometimes computes wrong numbers reports no error; the run only gets worse (Dixit et al., "Silent Data
Corruptions at Scale", arXiv:2102.11245; Llama 3, arXiv:2407.21783, section 3.3.4, counts six in 54 days). With
deterministic kernels the same computation gives the same bits, so any difference is a fault of the machine.

Before a training step, each rank runs forward and backward over its first micro-batch twice. It keeps a checksum of
everything that it computes itself, in the order of execution: its shards of the weights; inputs, outputs and gradients
of modules; inputs and outputs of the GEMMs of linears, before any collective; gradients of parameters before they are
reduced. Collectives carry a wrong number to other ranks, so the rank whose first difference comes earliest is named.
Ranks find it by one all-reduce of a number; only after a difference they exchange more.

The run does not change: gradients are dropped, and nothing draws from a generator. The check costs the compute of two
micro-batches and one read of everything that is checked. It cannot detect a fault that repeats itself exactly, or one
outside these two computations: in the reduction of gradients or the update.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.operands import LinearCall
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import GlobalBatch, accumulate, global_batch_of

_WIDTH = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The differences on one rank. where: its host and device. place, first: the first differing number's place in the
    order of execution, and its name. count: how many checksums differ."""

    rank: int
    where: str
    micro_batch: int
    place: int
    first: str
    count: int


@dataclass(frozen=True)
class Replayed:
    """The result for one micro-batch of each rank in `step` (from 0).

    differences: of all ranks, the earliest first. checked: how many checksums this rank compared.
    """

    step: int
    checked: int
    differences: list[Difference]

    @property
    def culprits(self) -> list[Difference]:
        """The ranks whose first difference comes earliest."""
        return [one for one in self.differences if one.place == self.differences[0].place]

    def __str__(self) -> str:
        what = f"one micro-batch of step {self.step + 1} computed twice"
        if not self.differences:
            return f"{what}: {self.checked} checksums, no difference"
        named = "; ".join(
            f"rank {one.rank} ({one.where}), micro-batch {one.micro_batch}: first {one.first}" for one in self.culprits
        )
        later = len(self.differences) - len(self.culprits)
        follows = f" ({later} more ranks differ later, which may come from that)" if later else ""
        return f"{what} DIFFERS: {named}{follows}"


def replay(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, controller: PrecisionController
) -> Replayed:
    """Compute the first of this rank's micro-batches of the controller's step twice. A collective."""
    # The loss is divided as in the step, so that the computation is the same.
    global_batch = global_batch_of(micro_batches, mesh)
    once, again = (compute(model, micro_batches[0], global_batch, mesh, controller) for _ in range(2))
    assert once.names == again.names, "the second computation ran other modules"
    step, checked = controller.step_state.step, len(once.names)
    differs = (torch.stack(once.sums) != torch.stack(again.sums)).any(1)
    mine, place = None, int(torch.where(differs, torch.arange(checked, device=differs.device), checked).min())
    if place < checked:
        where = f"{socket.gethostname()}, {mesh.device}"
        mine = Difference(mesh.rank, where, micro_batches[0].index, place, once.names[place], int(differs.sum()))
    of_ranks: list[Difference | None] = [None] * mesh.world_size
    dist.all_gather_object(of_ranks, mine)
    found = sorted((one for one in of_ranks if one is not None), key=lambda one: (one.place, one.rank))
    return Replayed(step, checked, found)


def compute(
    model: nn.Module, batch: MicroBatch, global_batch: GlobalBatch, mesh: ParallelMesh, controller: PrecisionController
) -> Trace:
    """Run forward and backward of a micro-batch of the step's `global_batch`; returns checksums of all results."""
    trace = Trace()

    def forget() -> None:
        """Drop gradients and the codes of weights that linears keep, so that the next computation makes them again."""
        model.zero_grad()
        for context in controller.linears.values():
            context.weight_cache = None

    for name, parameter in model.named_parameters():
        trace.add(f"weights of {name}", parameter)
    forget()
    with trace.of(model):
        accumulate(model, [batch], mesh, controller.step_state, global_batch=global_batch)
    forget()
    return trace


class Trace:
    """Names and checksums (int64 [3], on the device) of all results of one computation, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[Tensor] = []

    def add(self, name: str, *tensors: Tensor) -> None:
        """Add the checksums of this rank's parts of tensors."""
        for tensor in tensors:
            self.names.append(name)
            self.sums.append(checksum(local_part(tensor)))

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Inside, everything that `model` computes is added."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    stack.callback(module.register_forward_pre_hook(partial(self._see_inputs, name)).remove)
                    for context in module.context.parts or (module.context,):
                        stack.callback(setattr, context, "probe", context.probe)
                        context.probe = _LinearTrace(self, context.name)
                gathers = isinstance(module, FSDPModule) or module is model
                if gathers:  # hooks on parameters must be set here, where they are gathered
                    see = partial(self._see_gradients, f"{name}." if name else "", set(), stack)
                    stack.callback(module.register_forward_pre_hook(see).remove)
                see_outputs = partial(self._see_outputs, name or "the model (its loss)")
                stack.callback(module.register_forward_hook(see_outputs).remove)
            yield

    def _see_inputs(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.add(f"the input of {name}", *tensors_in(inputs))

    def _see_outputs(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            self.add(f"the output of {name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self.add, f"the gradient of the output of {name}"))

    def _see_gradients(
        self, prefix: str, hooked: set[nn.Parameter], stack: ExitStack, module: nn.Module, inputs: Any
    ) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in hooked:
                hooked.add(parameter)
                see = partial(self.add, f"the gradient of {prefix}{name} on this rank")
                stack.callback(parameter.register_hook(see).remove)


@dataclass
class _LinearTrace:
    """Adds the inputs and products of a linear's GEMMs, before any collective."""

    trace: Trace
    name: str
    reads_weights: ClassVar[bool] = False

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> _LinearTrace:
        self.trace.add(f"the input of fprop of {self.name}", x)
        self.trace.add(f"the fprop product of {self.name}", y)
        return self

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        self.trace.add(f"the input of dgrad and wgrad of {self.name}", dy)
        for gemm, product in (("dgrad", dx), ("wgrad", dw)):
            if product is not None:
                self.trace.add(f"the {gemm} product of {self.name}", product)


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of the tensor's bits: int64 [3] on its device, modulo 2**64.

    The first number is the sum of the elements' bits, read as integers; the others are sums weighted by the element's
    column and row. One changed element always changes the first number, two exchanged elements change the others.
    Sums of integers are exact in any order. Large tensors are read twice and not copied.
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    whole = bits.numel() // _WIDTH * _WIDTH
    rows, rest = bits[:whole].view(-1, _WIDTH), bits[whole:].to(torch.int64)
    of_columns, of_rows = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
    total = rest.sum()
    by_column, by_row = _weighted(of_columns) + _weighted(rest), _weighted(of_rows) - total
    return torch.stack((of_rows.sum() + total, by_column, by_row))


def _weighted(numbers: Tensor) -> Tensor:
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among a module's inputs or outputs: a tensor, or nested tuples and lists of tensors."""
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, (tuple, list)) else []
