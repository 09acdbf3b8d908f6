"""How an autograd function uses a parameter: it computes with the local part and returns an FP32 gradient.

Parameters are DTensors: FP32 master weights, of which the forward pass gets a gathered BF16 copy. A function
takes the DTensor itself and returns its gradient as an FP32 DTensor, so that nothing is rounded to BF16 between the
GEMM and the optimizer; `to_local()` before the function would cast the gradient to the parameter's dtype.

With one data-parallel rank nothing is gathered (parallel/data_parallel.py). The forward pass then gets the master
itself, which has an attribute that says how to round it first (`Rounding`).
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
    """The forward pass rounds a master weight to `dtype`. kept: it may keep the rounded copy until weights change."""

    dtype: torch.dtype
    kept: bool


def rounding_of(parameter: Tensor) -> Rounding | None:
    """How the forward pass must round `parameter`; None: it must not, or it was gathered rounded."""
    return getattr(parameter, "_rounding", None)


def set_rounding(parameter: Tensor, rounding: Rounding) -> None:
    """Make the forward pass round `parameter`. A parameter that replaces it (`Module.to_empty`) loses this."""
    parameter._rounding = rounding  # type: ignore[attr-defined]


def accept_fp32_gradient(parameter: Tensor) -> None:
    """Make autograd keep FP32 gradients of a parameter of any dtype. Call it before every use: FSDP2 makes new ones."""
    if parameter.requires_grad and parameter.is_leaf and parameter.dtype != torch.float32:
        parameter.grad_dtype = torch.float32


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter (a DTensor or a plain tensor), detached from the graph."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


def gradient_spec(parameter: Tensor) -> DTensorSpec | None:
    """Placement and global shape of the gradient, for `gradient_of`; None: the parameter is no DTensor.

    It is made once and kept with the parameter: a backward pass needs a hundred, and Python must not delay it.
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
    """The FP32 gradient of this rank's part, contiguous, as a DTensor placed by `spec`.

    The result equals that of `DTensor.from_local`, whose autograd function takes ten times as long.
    """
    if spec is None:
        return local
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
