"""Silent data corruption: one micro-batch computed twice, every number compared.

A processor that sometimes computes wrongly says nothing; the run only gets worse (Dixit et al., "Silent Data
Corruptions at Scale", arXiv:2102.11245; Llama 3, arXiv:2407.21783, section 3.3.4, counts six in 54 days). With
deterministic kernels the same computation gives the same bits, so a difference between two is a fault of the machine.

Before a step is trained on, each rank runs forward and backward over the first of its micro-batches twice and keeps a
checksum of everything that it made itself, in the order of execution: its shards of the weights; inputs, results and
gradients of modules; of linears also what their GEMMs were given and gave before any collective; gradients of
parameters before they are reduced. Collectives carry a wrong number to other ranks, so the rank is named whose first
difference comes earliest. Ranks agree on that by one all-reduce of a number; only a difference costs more.

Nothing of the run changes: gradients are dropped, and nothing draws from a generator. It costs two micro-batches of
compute, and reading what is checked. It cannot see a fault that repeats itself exactly, nor what happens outside of
these two computations: the reduction of gradients and the update.
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

from megatron_fp4.measure.diagnosis import tensors_in
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.linear import LinearCall
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.runtime.errors import WrongNumbersError
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import GlobalBatch, accumulate, global_batch_of

_WIDTH = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplayError(WrongNumbersError):
    """A rank computed the same thing twice and differently; the message is the same on all ranks."""


@dataclass(frozen=True)
class Difference:
    """What one rank found. first, in order of execution: its place there, and what it is."""

    rank: int
    where: str
    micro_batch: int
    place: int
    first: str
    count: int


@dataclass(frozen=True)
class Replayed:
    """One micro-batch of each rank in `step` (from 0). differences: of all ranks, those first to differ in front; the
    same on all ranks. checked: checksums compared on this rank."""

    step: int
    checked: int
    differences: list[Difference]

    @property
    def culprits(self) -> list[Difference]:
        """The ranks whose first difference comes before any other's."""
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
    # Divided as in the step: the computation is the one that is about to be trained on.
    whole = global_batch_of(micro_batches, mesh)
    once, again = (compute(model, micro_batches[0], whole, mesh, controller) for _ in range(2))
    assert once.names == again.names, "the same computation took another course"
    step, checked = controller.step_state.step, len(once.names)
    differs = (torch.stack(once.sums) != torch.stack(again.sums)).any(1)
    first = torch.where(differs, torch.arange(checked, device=differs.device), checked).min()
    earliest = first.clone()
    dist.all_reduce(earliest, op=dist.ReduceOp.MIN)
    if int(earliest) == checked:
        return Replayed(step, checked, [])
    mine, place = None, int(first)
    if place < checked:
        where = f"{socket.gethostname()}, {mesh.device}"
        mine = Difference(mesh.rank, where, micro_batches[0].index, place, once.names[place], int(differs.sum()))
    of_ranks: list[Difference | None] = [None] * mesh.world_size
    dist.all_gather_object(of_ranks, mine)
    found = sorted((one for one in of_ranks if one is not None), key=lambda one: (one.place, one.rank))
    return Replayed(step, checked, found)


def compute(
    model: nn.Module, micro_batch: MicroBatch, whole: GlobalBatch, mesh: ParallelMesh, controller: PrecisionController
) -> Trace:
    """Run forward and backward of a micro-batch that is a part of `whole`; checksums of all that was made."""
    trace = Trace()

    def forget() -> None:
        """Drop gradients, and the codes that linears keep of their weights: they would not be made a second time."""
        for parameter in model.parameters():
            parameter.grad = None
        for context in controller.linears.values():
            context.weight_cache = None

    for name, parameter in model.named_parameters():
        trace.add(f"weights of {name}", parameter)
    forget()
    with trace.of(model):
        accumulate(model, [micro_batch], mesh, controller.step_state, whole=whole)
    forget()
    return trace


class Trace:
    """Names and checksums (int64 [3], on the device) of what one computation made, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[Tensor] = []

    def add(self, name: str, *tensors: Tensor) -> None:
        """Keep the checksums of this rank's parts of tensors."""
        for tensor in tensors:
            self.names.append(name)
            self.sums.append(checksum(local_part(tensor)))

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """A context in which everything that `model` computes is added."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    stack.callback(module.register_forward_pre_hook(partial(self._see_inputs, name)).remove)
                    probe, module.context.probe = module.context.probe, _LinearTrace(self, name)
                    stack.callback(setattr, module.context, "probe", probe)
                gathers = isinstance(module, FSDPModule) or module is model
                if gathers:  # only here are the parameters those of the forward pass
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
    """Sees the GEMMs of a linear: what they are given and what they give, before any collective."""

    trace: Trace
    name: str
    reads_weights: ClassVar[bool] = False

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> _LinearTrace:
        self.trace.add(f"what fprop of {self.name} is given", x)
        self.trace.add(f"the fprop product of {self.name}", y)
        return self

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        self.trace.add(f"what dgrad and wgrad of {self.name} are given", dy)
        for gemm, product in (("dgrad", dx), ("wgrad", dw)):
            if product is not None:
                self.trace.add(f"the {gemm} product of {self.name}", product)


def checksum(tensor: Tensor) -> Tensor:
    """int64 [3] on the tensor's device, modulo 2**64: the sum of its bits as integers, and two sums in which each
    counts by its place. One number that changes always shows in the first, two that are exchanged in the others.

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
    """The sum of each number times its place, from 1."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
