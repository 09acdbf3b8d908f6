"""Data parallelism by FSDP2, for `parallel.reshard=true` and `parallel.reduce_gradients=each`.

FSDP2 gathers the parameters of one unit while another one computes, and reduces gradients beside the backward pass.
Its settings: `param_dtype` is the dtype of the parameters in the forward pass; `reduce_dtype` (FP32) is the dtype in
which gradients are summed over ranks and micro-batches; `cast_forward_inputs` is off, because token ids and FP32 losses
must not be cast.

Before a step FSDP2 is told what to send. It calls `fsdp_pre_all_gather` of a parameter's local shard, gathers the
tensors that it returns, and gives them to `fsdp_post_all_gather`. Here these two are attributes that are set on the
shard and deleted from it, not methods of a tensor subclass, so the optimizer and checkpoints see plain FP32 tensors.
Parameters that must stay FP32 (Mamba-2's A, D and dt bias) are gathered in FP32, and weights as codes if these are
enough (gathered_codes.py). Codes are gathered before a unit's first forward pass of a step, and freed in its last
backward pass: a unit all of whose linears are gathered as codes ignores `parallel.reshard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_fp4.parallel.fsdp_private import FsdpParameter, initialize_lazily, parameters_of
from megatron_fp4.parallel.gathered_codes import SharedMaxima, WeightCodes
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.reproducible import TreeReduceScatter, tree_all_reduce


class FsdpModel:
    """A model that FSDP2 shards in place, with the arguments of `apply_data_parallel`; also over one rank."""

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, units: list[nn.Module], fp32_units: Sequence[nn.Module],
        compute_dtype: torch.dtype, reshard: bool, ends: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fp32 = {id(module) for module in fp32_units}
        linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        specs = {id(one): one.weight._spec if isinstance(one.weight, DTensor) else None for one in linears}
        self._mesh, self._reshard, self._model, self._modules = mesh, reshard, model, [model, *units, *ends]
        self._in_fp32: list[_GatheredInFP32] = []
        self._units: list[tuple[FSDPModule, list[GatheredWeight]]] = []
        for module in (*units, *ends, model):
            fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard and module in units)
            assert isinstance(module, FSDPModule)
            parameters = parameters_of(module)
            self._in_fp32 += [_GatheredInFP32(one) for one in parameters if id(one.module) in fp32]
            # Weights of experts, [experts, out, in], are gathered in BF16.
            weights = [
                GatheredWeight(one, specs[id(one.module)], mesh.shards, compute_dtype)
                for one in parameters
                if id(one.module) in specs and len(one.size) == 2
            ]
            if weights and mesh.shards.size() > 1:
                self._units.append((module, weights))
            module.set_gradient_divide_factor(1.0)
            # Otherwise FSDP2 reduces with premultiplication by the factor, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
            if mesh.reproducible:
                module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
                if mesh.replica is not None:
                    module.set_all_reduce_hook(partial(tree_all_reduce, group=mesh.replica.group))
        self._weights = [weight for _, weights in self._units for weight in weights]
        self.codes, self.gathered = [weight.codes for weight in self._weights], False
        self.reasons: list[Any] | None = None  # what the current forms follow from
        self._maxima = SharedMaxima([], mesh.shards)

    @torch.no_grad()
    def gather(self, weights_version: int | None = None) -> None:
        """Before the model runs: decide what FSDP2 gathers, and measure the maxima of blocks. A collective."""
        initialize_lazily(self._modules[0])  # type: ignore[arg-type]  # it may replace shards, so hooks are set after it
        reasons = [codes.reasons for codes in self.codes]
        if reasons != self.reasons:
            for unit, weights in self._units:
                for weight in weights:
                    weight.decide()
                only_codes = all(weight.as_codes for weight in weights)
                unit.set_reshard_after_forward(self._reshard and not only_codes, recurse=False)
            as_codes = [weight.codes for weight in self._weights if weight.as_codes]
            self._maxima, self.reasons = SharedMaxima(as_codes, self._mesh.shards), reasons
        # Set again each time, because loading may have replaced a shard.
        for gathered in (*self._in_fp32, *(weight for weight in self._weights if weight.as_codes)):
            gathered.parameter.set_hooks(gathered)
        self._maxima.measure()

    def prepare(self, is_first: bool, is_last: bool) -> None:
        """Set what FSDP2 reduces and frees in the next backward pass of a step."""
        model, mesh = self._modules[0], self._mesh
        assert isinstance(model, FSDPModule)
        if is_first or is_last:
            model.set_requires_gradient_sync(is_last or mesh.reduce_each)
            model.set_requires_all_reduce(is_last)  # replicas exchange only the sum over micro-batches
            model.set_is_last_backward(is_last)
            # The optimizer updates shards, so the last backward must leave only them.
            model.set_reshard_after_backward(is_last or self._reshard)
            for unit, weights in self._units:
                if all(weight.as_codes for weight in weights):
                    unit.set_reshard_after_backward(is_last, recurse=False)

    def release(self) -> None:
        """Leave only the shards: without a backward pass, FSDP2 keeps the parameters gathered."""
        for module in self._modules:
            module.reshard()  # type: ignore[operator]


class _GatheredInFP32:
    """A parameter that is gathered in FP32."""

    def __init__(self, parameter: FsdpParameter) -> None:
        self.parameter = parameter

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return (self.parameter.padded_shard,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return outputs[0], ()


class GatheredWeight:
    """The weight of one linear, gathered as codes if `as_codes`, else in BF16 by FSDP2."""

    def __init__(self, parameter: FsdpParameter, spec: Any, shards: DeviceMesh, dtype: torch.dtype) -> None:
        self.parameter, self.as_codes = parameter, False
        assert isinstance(parameter.module, QuantizedLinear)
        context, rows = parameter.module.context, lambda: parameter.shard.detach()
        self.codes = WeightCodes(context, parameter.size, spec, shards, dtype, rows)
        self._gathered: nn.Parameter | None = None

    def decide(self) -> None:
        """Choose the form of the next all-gather. The parameter must be sharded now, and have no gradient."""
        as_codes = self.codes.context.gathers_codes
        self.codes.context.weight_cache = None  # its codes change, or the memory they are in
        if (as_codes and self.codes.follow_recipe()) or as_codes != self.as_codes:
            trained = self.parameter.sharded.requires_grad
            self._gathered = self.codes.placeholder(trained) if as_codes else None
            self.parameter.gather_into(self._gathered)
        self.as_codes = as_codes
        if not as_codes:
            self.parameter.set_hooks(None)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return self.codes.quantized_rows(), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        assert self._gathered is not None and out is self._gathered
        self.codes.attach(self._gathered, outputs)
