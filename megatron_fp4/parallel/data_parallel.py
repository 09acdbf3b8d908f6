"""Data parallelism: ranks compute other micro-batches, and hold other rows of every parameter.

Where parameters fit, a step gathers once and reduces once, and its micro-batches run as on one GPU, without
messages between them:

    before the first micro-batch   fill the buffers with the parameters of all ranks, as codes, BF16 or FP32
    micro-batches                  read the buffers, which keep their addresses, so that CUDA graphs can
    after the last one             add up the FP32 gradients over ranks, each rank those of its rows

Between steps the modules have the shards: FP32 masters, which the optimizer and checkpoints see, as DTensors placed as
FSDP2 places them. While `gathered_parameters` is entered, the modules have parameters in the buffers. Mamba-2's A, D
and dt bias are gathered in FP32, weights of quantized linears as 4-bit codes if nothing reads more of them
(gathered_codes.py).

FSDP2 does both instead (fsdp.py) with `parallel.reshard=true`, which gathers in every micro-batch, or with
`parallel.reduce_gradients=each`, which reduces in every one. With one data-parallel rank there is neither: the
parameters stay FP32 masters, and each one says how the forward pass rounds it (`Rounding`).

With expert parallelism, each rank of an `ep` group gathers the rows of its own experts only, over `dp`, and reduces
their gradients there: these are of the rows that all ranks of the group sent (expert_parallel.py).

Gradients are summed, not averaged: the loss of every micro-batch is divided by the number of micro-batches of the
global batch before its backward pass, so this pass is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_fp4.parallel.fsdp import FsdpModel
from megatron_fp4.parallel.gathered_codes import GatheredModel, WeightCodes
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh, axes_of
from megatron_fp4.parallel.parameters import copy_axes, gathered_parameter
from megatron_fp4.parallel.reproducible import GradientTree, tree_all_reduce, tree_reduce_scatter
from megatron_fp4.precision.fp32_gradients import Rounding, gradient_of, local_part, set_rounding
from megatron_fp4.precision.messages import start_all_gather, start_reduce_scatter

# Parameters that share a message: a small model's host needs as long for a message as for a block.
_BUCKET_ELEMENTS = 2**25


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

    units: the blocks. ends: modules at the model's ends (embedding and head). FSDP2 gathers each of these as a whole,
    ends until their backward pass, and other parameters (of the final norm) first.
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
        gathered = FsdpModel(model, mesh, units, fp32_units, compute_dtype, reshard, ends)
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

    def buffers(self, num_rows: int) -> list[Tensor]:
        """The memory that the messages of all ranks are gathered into, `num_rows` rows; made once."""
        codes, trained = self.codes if self.as_codes else None, self.shard.requires_grad
        if self.as_codes not in self._gathered:
            if codes is not None:
                self._gathered[True] = codes.placeholder(trained), [*codes.empty(num_rows)]
            else:
                buffer = torch.empty(num_rows, *self.size[1:], dtype=self.dtype, device=self.rows.device)
                parameter = gathered_parameter(buffer[: self.num_rows], self.spec, trained)
                self._gathered[False] = parameter, [buffer]
        parameter, buffers = self._gathered[self.as_codes]
        if codes is not None:
            codes.attach(parameter, buffers)
        return buffers

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
    replicas = (mesh.fsdp.mesh_dim_names or ())[:-1]
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


class ShardedModel(GatheredModel):
    """Gathers the parameters of a model, and reduces their gradients, by buckets of parameters that share a message.
    The arguments are those of `apply_data_parallel`."""

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
        self._buckets: list[list[ShardedParameter]] = []
        filling: dict[DeviceMesh, list[ShardedParameter]] = {}
        for parameter in self.parameters:
            bucket = filling.get(parameter.shards)
            if bucket is None or sum(one.size.numel() for one in (*bucket, parameter)) > _BUCKET_ELEMENTS:
                bucket = filling[parameter.shards] = []
                self._buckets.append(bucket)
            bucket.append(parameter)
        self.codes = [parameter.codes for parameter in self.parameters if parameter.codes is not None]
        if mesh.reproducible:
            self.tree = GradientTree([partial(_gathered_of, bucket) for bucket in self._buckets])

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
            group, ranks = bucket[0].shards.get_group(), bucket[0].shards.size()
            parts = [part.flatten().view(torch.uint8) for parameter in bucket for part in parameter.message()]
            sizes, message = [len(part) for part in parts], torch.cat(parts)
            received = start_all_gather(message, group, async_op=False).wait()
            buffers = [buffer for parameter in bucket for buffer in parameter.buffers(ranks * parameter.chunk)]
            out = [buffer.view(-1).view(torch.uint8).view(ranks, -1) for buffer in buffers]
            torch.split_with_sizes_copy(received.view(ranks, -1), sizes, dim=1, out=out)

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
            group, ranks = bucket[0].shards.get_group(), bucket[0].shards.size()
            # Which have a gradient is the same on all ranks.
            trained = [parameter for parameter in bucket if parameter.gathered.grad is not None]
            if not trained:
                continue
            gradients = [local_part(parameter.gathered.grad) for parameter in trained]  # type: ignore[arg-type]
            sizes = [parameter.chunk * parameter.size[1:].numel() for parameter in trained]
            message = torch.empty(ranks, sum(sizes), device=self.mesh.device)
            torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=message)
            del gradients
            for parameter in trained:
                parameter.gathered.grad = None
            if self.mesh.reproducible:
                total = tree_reduce_scatter(message.view(-1), group)
            else:
                total = start_reduce_scatter(message.view(-1), group, async_op=False).wait()
            if self.mesh.replica is not None:
                all_reduce = tree_all_reduce if self.mesh.reproducible else dist.all_reduce
                all_reduce(total, group=self.mesh.replica.group)
            for parameter, rows in zip(trained, total.split(sizes), strict=True):
                parameter.add_gradient(rows)


def _gathered_of(bucket: Sequence[ShardedParameter]) -> list[nn.Parameter]:
    return [parameter.gathered for parameter in bucket]


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
