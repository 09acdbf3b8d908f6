"""Parameters as DTensors on the tensor-parallel axis, and how layers access their local part.

A parameter is created as an FP32 DTensor: `Shard(0)`, `Shard(1)` or `Replicate()` over `tp`. Weights of experts are
`Shard(0)` over `ep` too, if there is expert parallelism. With several data-parallel ranks a parameter is then also
sharded over `dp`, and the forward pass gets a gathered copy in the compute dtype. Layers work on the local tensor. The
functions that take it (here, in `precision/linear.py` and in `cross_entropy.py`) round a master, and return the
gradient as an FP32 DTensor, so that gradients are summed over micro-batches and ranks in FP32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron_fp4.parallel.mesh import ParallelMesh, axes_of
from megatron_fp4.precision.fp32_gradients import (
    accept_fp32_gradient,
    gradient_of,
    gradient_spec,
    local_part,
    rounding_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def new_parameter(
    shape: tuple[int, ...], mesh: ParallelMesh, shard_dim: int | None = None, of_experts: bool = False
) -> nn.Parameter:
    """An uninitialized FP32 parameter of global `shape`, sharded over `tp` along `shard_dim` (None: replicated), and if
    it is `of_experts`, over `mesh.experts` along its first dimension.

    Created on the default device (under `torch.device("meta")`: on the meta device).
    """
    local = list(shape)
    placement: Placement = Replicate()
    if shard_dim is not None:
        assert shape[shard_dim] % mesh.tensor.size == 0, (shape, mesh.tensor.size)
        local[shard_dim] //= mesh.tensor.size
        placement = Shard(shard_dim)
    axes, placements = mesh.layers, [placement]
    if of_experts and mesh.experts is not None:
        assert local[0] % mesh.experts.size == 0, (shape, mesh.experts.size, mesh.tensor.size)
        local[0] //= mesh.experts.size
        axes = mesh.joined(*axes_of(mesh.device_mesh, "experts"), *mesh.layers.mesh_dim_names or ())
        placements = [Shard(0), placement]
    data = torch.empty(local, dtype=torch.float32)
    return nn.Parameter(DTensor.from_local(data, axes, placements, run_check=False))


def gathered_parameter(local: Tensor, spec: DTensorSpec | None, requires_grad: bool) -> nn.Parameter:
    """A parameter whose local part is `local`, of any dtype, placed by `spec` (None: it is no DTensor)."""
    if spec is not None:
        assert spec.tensor_meta is not None
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return nn.Parameter(gradient_of(local, spec), requires_grad)


def local_parameter(parameter: Tensor) -> Tensor:
    """The local part of a parameter, rounded as the forward pass needs it, as FP32; its gradient is FP32."""
    accept_fp32_gradient(parameter)
    return _LocalParameter.apply(parameter)  # type: ignore[return-value]


def lookup(parameter: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (int64, any shape) of the local part of a [rows, dim] parameter, [*index, dim].

    If a row is looked up several times, its gradients are summed in FP32. (`F.embedding` of a BF16 table would sum them
    in BF16, and frequent tokens would lose most of their gradient.)
    """
    accept_fp32_gradient(parameter)
    return _Lookup.apply(parameter, index)  # type: ignore[return-value]


class _LocalParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.spec, local, rounding = gradient_spec(parameter), local_part(parameter), rounding_of(parameter)
        return (local if rounding is None else local.to(rounding.dtype)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return gradient_of(grad_outputs[0].contiguous(), ctx.spec)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor) -> Tensor:
        ctx.spec, local = gradient_spec(parameter), local_part(parameter)
        ctx.num_rows = local.shape[0]
        ctx.save_for_backward(index)
        rows, rounding = torch.nn.functional.embedding(index, local), rounding_of(parameter)
        return rows if rounding is None else rows.to(rounding.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        gradient = torch.ops.aten.embedding_dense_backward(
            grad_outputs[0].to(torch.float32), index, ctx.num_rows, -1, False
        )
        return gradient_of(gradient, ctx.spec), None


def copy_axes(tensor: Tensor, mesh: ParallelMesh) -> list[str]:
    """The axes of `mesh` whose ranks hold copies of `tensor`, a parameter or what is placed like it.

    Raises ValueError if it lies on an axis that the mesh does not name.
    """
    placements: dict[str, Placement] = {}
    if isinstance(tensor, DTensor):
        assert not any(placement.is_partial() for placement in tensor.placements)
        for name, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
            placements |= dict.fromkeys(mesh.axes_in(name), placement)
    if unknown := placements.keys() - mesh.sizes.keys():
        raise ValueError(f"a parameter lies on the axis {min(unknown)}, and the mesh has only {', '.join(mesh.sizes)}")
    return [name for name in mesh.sizes if name not in placements or placements[name].is_replicate()]


def holds_first_copy(tensor: Tensor, mesh: ParallelMesh) -> bool:
    """Whether this rank is the first of those that hold the same part of `tensor`. Raises as `copy_axes`."""
    return all(mesh.place[name] == 0 for name in copy_axes(tensor, mesh))


def global_offsets(parameter: Tensor) -> tuple[int, ...]:
    """Where the local part of a (possibly sharded) parameter starts in the global tensor, per dimension."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    (chunk,) = parameter.__create_chunk_list__()  # torch's method for checkpoints
    return tuple(chunk.offsets)
