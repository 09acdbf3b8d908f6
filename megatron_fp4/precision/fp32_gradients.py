"""How an autograd function uses a parameter: the local part in the compute dtype in, an FP32 gradient out.

Parameters are DTensors: FP32 masters sharded by FSDP2, which hands the forward pass a BF16 copy. A function takes the
DTensor itself and returns its gradient as an FP32 DTensor, so that nothing is rounded to BF16 between the GEMM and the
optimizer; `to_local()` in front of the function would cast the gradient to the parameter's dtype.

A model that no other data-parallel rank shares has no FSDP2 (parallel/data_parallel.py): there the forward pass gets
the master itself, which says how it is to be rounded first (`Rounding`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True)
class Rounding:
    """How the forward pass rounds a master: to `dtype`. kept: rounded copies may be kept until the weights change."""

    dtype: torch.dtype
    kept: bool


def rounding_of(parameter: Tensor) -> Rounding | None:
    """How the forward pass is to round `parameter`; None: not at all, or FSDP2 did."""
    return getattr(parameter, "_rounding", None)


def set_rounding(parameter: Tensor, rounding: Rounding) -> None:
    """Let the forward pass round `parameter`. One that takes its place (`Module.to_empty`) does not inherit this."""
    parameter._rounding = rounding  # type: ignore[attr-defined]


def accept_fp32_gradient(parameter: Tensor) -> None:
    """Let autograd keep FP32 gradients of a parameter of any dtype. Before every use: FSDP2 makes new parameters."""
    if parameter.requires_grad and parameter.is_leaf and parameter.dtype != torch.float32:
        parameter.grad_dtype = torch.float32


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter (a DTensor or a plain tensor), without its graph."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


def gradient_spec(parameter: Tensor) -> DTensorSpec | None:
    """Where the gradient lies and of what global shape it is, for `gradient_of`; None: the parameter is no DTensor.

    Made once and kept with the parameter: there are a hundred in a backward pass, which Python must not hold up.
    """
    if not isinstance(parameter, DTensor):
        return None
    spec: DTensorSpec | None = getattr(parameter, "_gradient_spec", None)
    if spec is None:
        meta = parameter._spec.tensor_meta
        assert meta is not None
        spec = replace(parameter._spec, tensor_meta=meta._replace(dtype=torch.float32))
        parameter._gradient_spec = spec  # type: ignore[attr-defined]
    return spec


def gradient_of(local: Tensor, spec: DTensorSpec | None) -> Tensor:
    """The FP32 gradient of this rank's part, contiguous, as a DTensor by `spec`.

    Equal to `DTensor.from_local` without its own autograd function, which takes ten times as long; FSDP2 does the same
    with its shards.
    """
    if spec is None:
        return local
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
