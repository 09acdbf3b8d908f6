"""Data parallelism: ranks compute other micro-batches, and hold other rows of every parameter.

Where parameters fit, a step gathers once and reduces once, and its micro-batches run as on one GPU, without
messages between them:

    before the first micro-batch   fill the buffers with the parameters of all ranks, as codes, BF16 or FP32
    micro-batches                  read the buffers, which keep their addresses, so that CUDA graphs can
    after the last one             add up the FP32 gradients over ranks, each rank those of its rows

Between steps the modules have the shards: FP32 masters, which the optimizer and checkpoints see, as DTensors. While
`gathered_parameters` is entered, the modules have parameters in the buffers. Mamba-2's A, D and dt bias are gathered in
FP32, weights of quantized linears as 4-bit codes if nothing reads more of them (gathered_codes.py).

With `parallel.reshard=true` or `parallel.reduce_gradients=each`, messages go beside computation instead
(`OverlappedModel`): each unit (a block, the embedding, the head) is gathered while the one before it computes, and its
gradients are reduced while the next one computes.

With one data-parallel rank there is neither: the parameters stay FP32 masters, and each one says how the forward pass
rounds it (`Rounding`).

With expert parallelism, each rank of an `ep` group gathers the rows of its own experts only, over `dp`, and reduces
their gradients there: these are of the rows that all ranks of the group sent (expert_parallel.py).

Gradients are summed, not averaged: the loss of every micro-batch is divided by the number of micro-batches of the
global batch before its backward pass, so this pass is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_fp4.parallel.gathered_codes import GatheredModel, WeightCodes
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh, axes_of
from megatron_fp4.parallel.parameters import copy_axes, gathered_parameter
from megatron_fp4.parallel.reproducible import GradientTree, tree_all_reduce, tree_reduce_scatter
from megatron_fp4.precision.fp32_gradients import Rounding, gradient_of, local_part, set_rounding
from megatron_fp4.precision.messages import start_all_gather, start_reduce_scatter

# Parameters that share a message: a small model's host needs as long for a message as for a block.
_BUCKET_ELEMENTS = 2**25
_NOW = nullcontext()


def apply_data_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: list[nn.Module],
    fp32_units: list[nn.Module],
    compute_dtype: torch.dtype,
    reshard: bool,
    ends: Sequence[nn.Module] = (),
) -> None:
    """Shard `model` over the data-parallel axis, in place. Gradients are summed over its ranks.

    units: the blocks. ends: modules at the model's ends (embedding and head). If messages go beside computation, each
    of these is gathered as a whole, ends until their backward pass, and other parameters (of the final norm) first.
    fp32_units: small modules, inside units or not, whose own parameters must never be rounded.
    reshard: free the gathered parameters after the forward pass and gather them again for the backward pass; with one
    rank: keep no rounded copies between micro-batches.

    Raises ValueError for a parameter that has no rows, or lies on an axis that the mesh does not name.
    """
    gathered: GatheredModel
    if mesh.batch.size == 1:
        _set_rounding_at_first_forward(model, Rounding(compute_dtype, kept=not reshard), fp32_units)
        gathered = GatheredModel(GradientTree([lambda: [*model.parameters()]]) if mesh.reproducible else None)
    elif reshard or mesh.reduce_each:
        gathered = OverlappedModel(model, mesh, fp32_units, compute_dtype, units, ends, reshard)
    else:
        gathered = ShardedModel(model, mesh, fp32_units, compute_dtype)
    model._gathered_model = gathered  # type: ignore[assignment]
    if mesh.batch.size > 1:
        model.register_forward_pre_hook(_assert_gathered)


def gathered_model_of(model: nn.Module) -> GatheredModel:
    """What gathers the parameters of `model` and reduces gradients; if nothing does, its methods do nothing."""
    return getattr(model, "_gathered_model", None) or GatheredModel()


@contextmanager
def gathered_parameters(model: nn.Module, weights_version: int | None = None) -> Iterator[GatheredModel]:
    """Inside, `model` can run. Afterwards its parameters are the shards, also after an error. A collective.

    weights_version: of the shards; if `gather_ahead` gathered these, they are not gathered again. Yields
    `gathered_model_of(model)`.
    """
    gathered = gathered_model_of(model)
    try:
        gathered.gather(weights_version)
        gathered.gathered = True
        yield gathered
    finally:
        gathered.release()
        gathered.gathered = False


def _assert_gathered(model: nn.Module, *_: Any) -> None:
    gathered = gathered_model_of(model)
    assert gathered.gathered, "a sharded model runs only inside `gathered_parameters`"
    assert gathered.unchanged(), "nothing that decides about codes changes inside `gathered_parameters`"


class ShardedParameter:
    """A parameter: this rank's shard of its rows, and the buffers into which all rows are gathered.

    module, name: where it is. shards: the ranks that hold its other rows. dtype: of the gathered values. codes: of the
    weight of a quantized linear. gathered: the parameter in the buffers, padded to `chunk` rows of every rank.
    """

    def __init__(self, module: nn.Module, name: str, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        parameter = module._parameters[name]
        assert parameter is not None
        if not parameter.dim():
            raise ValueError(f"the parameter {name} has no rows to shard; give it one dimension")
        self.module, self.name, self.dtype = module, name, dtype
        local, self.shards = local_part(parameter), _shards_of(parameter, mesh)
        ranks, rank = self.shards.size(), self.shards.get_local_rank()
        self.size, self.num_rows, self.chunk = local.shape, len(local), -(-len(local) // ranks)
        self.spec = parameter._spec if isinstance(parameter, DTensor) else None
        self.shard_spec = _sharded_spec(parameter, mesh)
        rows = local[self.chunk * rank : self.chunk * (rank + 1)].clone()
        self.shard = nn.Parameter(gradient_of(rows, self.shard_spec), parameter.requires_grad)
        self.show(self.shard)
        self.codes: WeightCodes | None = None
        if isinstance(module, QuantizedLinear) and local.dim() == 2:  # weights of experts have values
            self.codes = WeightCodes(module.context, self.size, self.spec, mesh.shards, dtype, lambda: self.rows)
        # By `as_codes`. Codes stay while values are gathered for a probe, because CUDA graphs read them.
        self._gathered: dict[bool, tuple[nn.Parameter, list[Tensor]]] = {}

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the FP32 master."""
        return local_part(self.shard)

    @property
    def as_codes(self) -> bool:
        return self.codes is not None and self.codes.as_codes

    @property
    def gathered(self) -> nn.Parameter:
        return self._gathered[self.as_codes][0]

    def show(self, parameter: nn.Parameter) -> None:
        """Give the module this parameter."""
        self.module._parameters[self.name] = parameter

    def decide(self) -> None:
        """Choose between codes and values, after what this follows from has changed."""
        if self.codes is None:
            return
        context, is_new = self.codes.context, self.codes.decide()
        if self.as_codes:
            self._gathered.pop(False, None)
        if is_new or not (self.as_codes or context.probe or context.watcher):
            self._gathered.pop(True, None)

    def message(self) -> list[Tensor]:
        """This rank's rows as they are gathered, padded to `chunk` rows."""
        if self.as_codes:
            assert self.codes is not None
            return [*self.codes.quantized_rows()]
        rows = self.rows.to(self.dtype)
        missing = self.chunk - len(rows)
        return [torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows]

    def buffers(self) -> list[Tensor]:
        """The memory that the messages of all ranks are gathered into; made once, and again after `free`."""
        codes, trained = self.codes if self.as_codes else None, self.shard.requires_grad
        if self.as_codes not in self._gathered:
            num_rows = self.shards.size() * self.chunk
            if codes is not None:
                self._gathered[True] = codes.placeholder(trained), [*codes.empty(num_rows)]
            else:
                buffer = torch.empty(num_rows, *self.size[1:], dtype=self.dtype, device=self.rows.device)
                parameter = gathered_parameter(buffer[: self.num_rows], self.spec, trained)
                self._gathered[False] = parameter, [buffer]
        parameter, buffers = self._gathered[self.as_codes]
        for buffer in buffers:
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(buffer.nbytes)
        if codes is not None:
            codes.attach(parameter, buffers)
        return buffers

    def free(self) -> None:
        """Free the memory of the buffers, which stay the same tensors, as those that autograd has saved."""
        for _, buffers in self._gathered.values():
            for buffer in buffers:
                buffer.untyped_storage().resize_(0)

    def add_gradient(self, rows: Tensor) -> None:
        """Add to the shard's gradient. rows: flat, padded to `chunk` rows."""
        rows = rows.view(self.chunk, *self.size[1:])[: len(self.rows)]
        if self.shard.grad is None:
            self.shard.grad = gradient_of(rows, self.shard_spec)
        else:
            local_part(self.shard.grad).add_(rows)


def _shards_of(parameter: nn.Parameter, mesh: ParallelMesh) -> DeviceMesh:
    names = set(parameter._spec.mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()
    return mesh.shards if names.isdisjoint(axes_of(mesh.device_mesh, "experts")) else mesh.expert_shards


def _sharded_spec(parameter: nn.Parameter, mesh: ParallelMesh) -> DTensorSpec:
    """How the shards of `parameter` are placed: over replicas, rows, and the axes that the parameter lies on."""
    replicas = [] if mesh.reproducible else axes_of(mesh.device_mesh, "batch", without="rows")
    names = (*replicas, *(_shards_of(parameter, mesh).mesh_dim_names or ()))
    placements, parts = tuple[Placement, ...](), 1
    meta: Any = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
    if isinstance(parameter, DTensor):
        names, placements = (*names, *(parameter._spec.mesh.mesh_dim_names or ())), parameter.placements
        meta, parts = parameter._spec.tensor_meta, parameter._spec.num_shards_map[0]
    copy_axes(parameter, mesh)  # refuses axes that the mesh has not
    rows = _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    replicated = [Replicate()] * (len(names) - len(placements) - 1)
    return DTensorSpec(mesh.joined(*names), (*replicated, rows, *placements), tensor_meta=meta)


class Bucket:
    """Parameters that share messages.

    partial: this rank's rows of their gradients, not yet summed over replicas.
    """

    def __init__(self, parameters: list[ShardedParameter], mesh: ParallelMesh) -> None:
        self.parameters, self._mesh = parameters, mesh
        self._group, self._ranks = parameters[0].shards.get_group(), parameters[0].shards.size()
        self.partial: Tensor | None = None

    def sharded(self) -> list[nn.Parameter]:
        return [parameter.shard for parameter in self.parameters]

    def gathered(self) -> list[nn.Parameter]:
        return [parameter.gathered for parameter in self.parameters]

    def gather(self, beside: AbstractContextManager[None] = _NOW) -> None:
        """Fill the buffers, inside `beside`. A collective."""
        buffers = [buffer for parameter in self.parameters for buffer in parameter.buffers()]
        with beside:
            parts = [part.flatten().view(torch.uint8) for parameter in self.parameters for part in parameter.message()]
            sizes, message = [len(part) for part in parts], torch.cat(parts)
            received = start_all_gather(message, self._group, async_op=False).wait()
            # By `data`, because autograd refuses saved tensors that were written; they get the same values again.
            out = [buffer.data.view(-1).view(torch.uint8).view(self._ranks, -1) for buffer in buffers]
            torch.split_with_sizes_copy(received.view(self._ranks, -1), sizes, dim=1, out=out)

    def reduce(self, beside: AbstractContextManager[None] = _NOW, over_replicas: bool = True) -> list[Tensor]:
        """Drop the gradients, and inside `beside` add those of all ranks to those of the shards. A collective.

        over_replicas: if not, they are kept as `partial` for the next call. Returns the tensors that must be kept until
        what was launched in `beside` has run.
        """
        trained = [parameter for parameter in self.parameters if parameter.gathered.grad is not None]
        if not trained:  # the same on all ranks
            return []
        mesh, device = self._mesh, self._mesh.device
        gradients = [local_part(parameter.gathered.grad) for parameter in trained]  # type: ignore[arg-type]
        sizes = [parameter.chunk * parameter.size[1:].numel() for parameter in trained]
        message = torch.empty(self._ranks, sum(sizes), device=device)
        torch._chunk_cat(gradients, dim=0, num_chunks=self._ranks, out=message)
        del gradients
        for parameter in trained:
            parameter.gathered.grad = None
        total = torch.empty(sum(sizes), device=device)
        kept = [message, total]
        with beside:
            if mesh.reproducible:
                total.copy_(tree_reduce_scatter(message.view(-1), self._group))
            else:
                start_reduce_scatter(message.view(-1), self._group, async_op=False, out=total)
            if self.partial is not None:
                total = self.partial.add_(total)
            self.partial = None if over_replicas or mesh.replica is None else total
            if self.partial is None:
                if mesh.replica is not None:
                    all_reduce = tree_all_reduce if mesh.reproducible else dist.all_reduce
                    all_reduce(total, group=mesh.replica.group)
                for parameter, part in zip(trained, total.split(sizes), strict=True):
                    parameter.add_gradient(part)
        return kept


class ShardedModel(GatheredModel):
    """Gathers the parameters of a model, and reduces their gradients, by buckets. The arguments are those of
    `apply_data_parallel`."""

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, fp32_units: Sequence[nn.Module], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.mesh, fp32 = mesh, {id(unit) for unit in fp32_units}
        self.parameters = [
            ShardedParameter(module, name, mesh, torch.float32 if id(module) in fp32 else dtype)
            for module in model.modules()
            for name in [name for name, parameter in module._parameters.items() if parameter is not None]
        ]
        self._buckets: Sequence[Bucket] = [Bucket(parameters, mesh) for parameters in _by_size(self.parameters)]
        self.codes = [parameter.codes for parameter in self.parameters if parameter.codes is not None]
        if mesh.reproducible:
            self.tree = GradientTree([bucket.gathered for bucket in self._buckets])

    @torch.no_grad()
    def gather(self, weights_version: int | None = None) -> None:
        """Fill the buffers, unless `gather_ahead` has, and give the modules the parameters in them. A collective."""
        for parameter in self.parameters:  # initialization and loading may have replaced the shards
            parameter.shard = parameter.module._parameters[parameter.name]  # type: ignore[assignment]
        ahead, self.ahead = self.ahead, None
        if self._follow_reasons() or ahead is None or ahead != weights_version:
            self.gather_ahead()
        for parameter in self.parameters:
            parameter.show(parameter.gathered)

    def _decide(self) -> None:
        for parameter in self.parameters:
            parameter.decide()

    @torch.no_grad()
    def gather_ahead(self) -> None:
        """Fill the buffers with the parameters of all ranks. A collective. If weights do not change before the next
        step, its caller sets `ahead` to their version."""
        self._maxima.measure()
        for bucket in self._buckets:
            bucket.gather()

    def release(self) -> None:
        """Give the modules the shards, and drop what a failed step left of gradients. The buffers stay."""
        for parameter in self.parameters:
            parameter.show(parameter.shard)
            for gathered, _ in parameter._gathered.values():
                gathered.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the gradients of all ranks to those of the shards, and drop them. A collective."""
        super().reduce()
        for bucket in reversed(self._buckets):
            bucket.reduce()


def _by_size(parameters: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    buckets: list[list[ShardedParameter]] = []
    filling: dict[DeviceMesh, list[ShardedParameter]] = {}
    for parameter in parameters:
        bucket = filling.get(parameter.shards)
        if bucket is None or sum(one.size.numel() for one in (*bucket, parameter)) > _BUCKET_ELEMENTS:
            bucket = filling[parameter.shards] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets


class Unit(Bucket):
    """The parameters of a module that are gathered before its forward pass.

    is_block: whether with `parallel.reshard` they are freed after it. filled: whether the buffers have their values, or
    get them until `arrived`.
    """

    def __init__(self, parameters: list[ShardedParameter], mesh: ParallelMesh, is_block: bool) -> None:
        super().__init__(parameters, mesh)
        self.is_block, self.filled = is_block, False
        self.arrived: torch.cuda.Event | None = None

    @property
    def only_codes(self) -> bool:
        """Whether all weights that can be codes are codes now, and one is."""
        weights = [parameter for parameter in self.parameters if parameter.codes is not None]
        return bool(weights) and all(parameter.as_codes for parameter in weights)

    def free(self) -> None:
        self.filled, self.arrived = False, None
        for parameter in self.parameters:
            parameter.free()


class OverlappedModel(ShardedModel):
    """Gathers parameters and reduces gradients beside computation, by units, in which hooks on modules and their
    outputs say what comes next.

        forward     unit i computes | unit i + 1 is gathered
        backward    unit i computes | gradients of unit i + 1 are reduced, unit i - 1 is gathered

    All messages go through one stream. It begins each one when what was launched before on the stream of the
    computation is done, so memory that was freed there can be used here. Memory that this stream reads or writes is not
    freed before the computation waits for it.

    With `reshard`, blocks are freed after their forward pass, and all units after their backward pass; else in a step's
    last backward pass. Codes are gathered once a step: a unit all of whose linears are codes ignores `reshard`.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, fp32_units: Sequence[nn.Module], dtype: torch.dtype,
        blocks: Sequence[nn.Module], ends: Sequence[nn.Module], reshard: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, mesh, fp32_units, dtype)
        self._reshard, self._is_last = reshard, True
        self._stream = torch.cuda.Stream(mesh.device, priority=-1) if mesh.device.type == "cuda" else None
        self._uses: list[int] = []  # of units in this forward pass whose backward pass is not done
        self._reducing: tuple[torch.cuda.Event | None, list[Tensor]] = (None, [])  # what the last reduction uses
        named = {*blocks, *ends}
        modules = [model, *(module for module in model.modules() if module in named)]  # in the order of execution
        unit_of = {part: module for module in modules for part in module.modules()}
        self._units: list[Unit] = []
        for module in modules:
            parameters = [parameter for parameter in self.parameters if unit_of[parameter.module] is module]
            if not parameters:
                continue
            module.register_forward_pre_hook(partial(self._before_forward, len(self._units)))
            if module is not model:
                module.register_forward_hook(partial(self._after_forward, len(self._units)))
            self._units.append(Unit(parameters, mesh, module in blocks))
        self._buckets = self._units
        if mesh.reproducible:
            groups = [unit.sharded if mesh.reduce_each else unit.gathered for unit in self._units]
            self.tree = GradientTree(groups, self._finish_backward)

    def _decide(self) -> None:
        self._free_all()
        super()._decide()
        for parameter in self.parameters:
            parameter.buffers()  # makes the gathered parameter
            parameter.free()

    @torch.no_grad()
    def gather_ahead(self) -> None:
        """Gather the first units. A collective, as in `ShardedModel`."""
        self._maxima.measure()
        self._free_all()
        for number in range(min(3, len(self._units))):
            self._start(number)

    def prepare(self, is_first: bool, is_last: bool) -> None:
        """Before a micro-batch of a step: finish the one before."""
        self._finish_backward()
        self._is_last = is_last

    def reduce(self) -> None:
        """Finish adding the gradients of all ranks to those of the shards. A collective."""
        self._finish_backward()
        super().reduce()

    def release(self) -> None:
        """Give the modules the shards, and free all buffers, also after an error."""
        super().release()
        self._free_all()
        self._uses.clear()
        self._reducing = None, []
        for unit in self._units:
            unit.partial = None

    def _before_forward(self, number: int, *_: Any) -> None:
        self._receive(number)
        if number + 1 < len(self._units):
            self._start(number + 1)
        if torch.is_grad_enabled():
            self._uses.append(number)

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._units[number].is_block:
            self._free_between(number)
        hidden = output[0] if isinstance(output, tuple) else output  # auxiliary losses are computed before it
        if hidden.requires_grad:
            hidden.register_hook(partial(self._before_backward, len(self._uses) - 1))

    def _before_backward(self, position: int, gradient: Tensor) -> None:
        """Before the first backward function of a use. Autograd calls functions in the reverse order of their forward
        pass, so all later uses are done."""
        self._finish_uses(position + 1)
        number = self._uses[position]
        self._receive(number)
        if number:
            self._start(number - 1)

    @torch.no_grad()
    def _finish_uses(self, start: int) -> None:
        """After the backward pass of the uses from `start` on: free and reduce units that have no other use."""
        done, self._uses[start:] = self._uses[start:], []
        for number in dict.fromkeys(reversed(done)):
            if number in self._uses:
                continue
            if self._is_last:
                self._units[number].free()
            else:
                self._free_between(number)
            if self._is_last or self.mesh.reduce_each:
                if self.tree is not None and not self.mesh.reduce_each:
                    self.tree.finish_group(number)
                self._wait_for_reduction()
                kept = self._units[number].reduce(self._beside(), self._is_last or self.mesh.reproducible)
                self._reducing = self._launched(), kept

    def _finish_backward(self) -> None:
        """After a backward pass; afterwards the gradients can be read."""
        self._finish_uses(0)
        self._wait_for_reduction()

    def _free_between(self, number: int) -> None:
        if self._reshard and not self._units[number].only_codes:
            self._units[number].free()

    def _free_all(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for unit in self._units:
            unit.free()

    @torch.no_grad()
    def _start(self, number: int) -> None:
        unit = self._units[number]
        if not unit.filled:
            unit.gather(self._beside())
            unit.filled, unit.arrived = True, self._launched()

    def _receive(self, number: int) -> None:
        self._start(number)
        self._wait_for(self._units[number].arrived)

    def _wait_for_reduction(self) -> None:
        event, kept = self._reducing
        self._wait_for(event)
        kept.clear()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _launched(self) -> torch.cuda.Event | None:
        """When what was launched on the stream of messages is done."""
        return None if self._stream is None else self._stream.record_event()

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _set_rounding_at_first_forward(model: nn.Module, rounding: Rounding, fp32_units: list[nn.Module]) -> None:
    """Let the forward pass round the parameters of `model`, except those of `fp32_units`."""

    def set_roundings(*_: Any) -> None:
        hook.remove()
        exempt = {id(parameter) for unit in fp32_units for parameter in unit.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in exempt:
                set_rounding(parameter, rounding)

    # Not earlier, because initialization replaces the parameters.
    hook = model.register_forward_pre_hook(set_roundings)
