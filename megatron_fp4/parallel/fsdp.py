"""Data parallelism by FSDP2, for `parallel.reshard=true` and `parallel.reduce_gradients=each`.

FSDP2 gathers the parameters of one unit while another one computes, and reduces gradients beside the backward pass.
Its settings: `param_dtype` is the dtype of the parameters in the forward pass; `reduce_dtype` (FP32) is the dtype in
which gradients are summed over ranks and micro-batches; `cast_forward_inputs` is off, because token ids and FP32 losses
must not be cast. Parameters that must stay FP32 (Mamba-2's A, D and dt bias) are gathered in FP32 with their block.

    root's forward pass, weights changed    maxima of the shards' blocks; one MAX all-reduce of those that ranks share
    unit's forward pass                     codes and scales of its shards; FSDP gathers them as bytes, with the unit's
                                            other parameters
    last backward pass                      codes are freed; gradients are the usual ones: FP32, reduced by FSDP

If all linears of a unit are gathered as codes (gathered_codes.py), the unit ignores `parallel.reshard`.

FSDP2 calls `fsdp_pre_all_gather` of a parameter's local shard, gathers the tensors that it returns, and gives them to
`fsdp_post_all_gather`. Here these two are attributes that are set on the shard and deleted from it, not methods of a
tensor subclass, so the optimizer and checkpoints see plain FP32 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_fp4.parallel.fsdp_private import ShardedParameter, initialize_lazily, is_last_backward, parameters_of
from megatron_fp4.parallel.gathered_codes import SharedMaxima, WeightCodes
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.reproducible import TreeReduceScatter, tree_all_reduce


def shard(
    model: nn.Module, mesh: ParallelMesh, units: list[nn.Module], fp32_units: list[nn.Module],
    compute_dtype: torch.dtype, reshard: bool, ends: Sequence[nn.Module] = (),
) -> None:  # fmt: skip
    """`apply_data_parallel` with FSDP2, also for one rank."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    specs = _weight_specs(units)
    for module in (*units, *ends, model):
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard and module in units)
        assert isinstance(module, FSDPModule)
        _gather_in_fp32(module, fp32_units)
        if module is model and mesh.shards.size() > 1:
            _gather_codes(model, units, specs, mesh.shards, compute_dtype, reshard)
        module.set_gradient_divide_factor(1.0)
        # Otherwise FSDP2 reduces with premultiplication by the factor, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)
        if mesh.reproducible:
            module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
            if mesh.replica is not None:
                module.set_all_reduce_hook(partial(tree_all_reduce, group=mesh.replica.group))


def prepare(model: nn.Module, mesh: ParallelMesh, is_first: bool, is_last: bool, reshard: bool) -> None:
    """Set what FSDP2 reduces and frees in the next backward pass of a step, if it shards `model`."""
    if isinstance(model, FSDPModule) and (is_first or is_last):
        model.set_requires_gradient_sync(is_last or mesh.reduce_each)
        model.set_requires_all_reduce(is_last)  # replicas exchange only the sum over micro-batches
        model.set_is_last_backward(is_last)
        # The optimizer updates shards, so the last backward must leave only them.
        model.set_reshard_after_backward(is_last or reshard)


def _gather_in_fp32(unit: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Let `unit` gather in FP32 those of its parameters that belong to `modules`."""
    ids = {id(module) for module in modules}
    in_fp32 = [_GatheredInFP32(parameter) for parameter in parameters_of(unit) if id(parameter.module) in ids]

    def before_forward(*_: Any) -> None:
        initialize_lazily(unit)  # it may replace shards, so the hooks are set after it
        for gathered in in_fp32:
            gathered.parameter.set_hooks(gathered)

    if in_fp32:
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(before_forward, prepend=True)


def _weight_specs(units: Iterable[nn.Module]) -> dict[QuantizedLinear, Any]:
    """The DTensor specs of the quantized linears' weights in `units`, before FSDP shards them (None: no DTensor).
    Without those of experts, [experts, out, in], which are gathered in BF16."""
    linears = [module for unit in units for module in unit.modules() if isinstance(module, QuantizedLinear)]
    matrices = (linear for linear in linears if linear.weight.dim() == 2)
    return {linear: linear.weight._spec if isinstance(linear.weight, DTensor) else None for linear in matrices}


def _gather_codes(
    model: nn.Module,
    units: Sequence[nn.Module],
    specs: dict[QuantizedLinear, Any],
    shards: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard: bool,
) -> None:
    """Let the `units` of a sharded `model` gather codes of the weights whose linears need only codes.

    specs: from `_weight_specs`. shards: the axis that FSDP shards over, of several ranks. reshard: applies to units
    that gather anything else.
    """
    weights_of_units = []
    for unit in units:
        assert isinstance(unit, FSDPModule)
        weights = []
        for parameter in parameters_of(unit):
            if isinstance(linear := parameter.module, QuantizedLinear) and linear in specs:
                weights.append(GatheredWeight(parameter, linear, specs[linear], shards, compute_dtype))
        if weights:
            weights_of_units.append((unit, weights))
    if weights_of_units:
        codes = _GatheredCodes(model, weights_of_units, shards, reshard)
        # Before FSDP's own hook, which gathers.
        model.register_forward_pre_hook(codes.before_forward, prepend=True)


class _GatheredInFP32:
    """A parameter that is gathered in FP32."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = parameter

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return (self.parameter.padded_shard,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return outputs[0], ()


class GatheredWeight:
    """The weight of one linear, gathered as codes if `as_codes`, else in BF16 by FSDP."""

    def __init__(
        self, parameter: ShardedParameter, linear: QuantizedLinear, spec: Any, shards: DeviceMesh, dtype: torch.dtype
    ) -> None:
        self.parameter, self.as_codes = parameter, False
        # Initialization and loading may replace the shard.
        rows = lambda: parameter.shard.detach()  # noqa: E731
        self.codes = WeightCodes(linear.context, parameter.size, spec, shards, dtype, rows)
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


class _GatheredCodes:
    """All weights of a model that may be gathered as codes. Decides how each is gathered, and measures the maxima."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[FSDPModule, list[GatheredWeight]]],
        shards: DeviceMesh,
        reshard: bool,
    ) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.units, self.shards, self.reshard = model, units, shards, reshard
        self.weights = [weight for _, weights in units for weight in weights]
        self._reasons: list[tuple[Any, ...]] = []  # what the current decision follows from
        self._version: int | None = None
        self._maxima = SharedMaxima([], shards)

    def before_forward(self, *_: Any) -> None:
        """If recipes, backends, probes or watchers changed, decide which weights are gathered as codes. If these or the
        weights changed, measure the maxima, a collective."""
        initialize_lazily(self.model)
        reasons = [weight.codes.reasons for weight in self.weights]
        version = self.weights[0].codes.context.step_state.weights_version
        changed = reasons != self._reasons
        if changed:
            self._decide()
            self._reasons = reasons
        if changed or version != self._version:
            for unit, weights in self.units:
                if any(weight.as_codes for weight in weights):
                    unit.reshard()  # does nothing, unless the codes were gathered but not computed with
            for weight in self.weights:
                if weight.as_codes:  # set again, because loading may have replaced the shard
                    weight.parameter.set_hooks(weight)
            self._maxima.measure()
            self._version = version
        if self.reshard:
            # Codes stay until the optimizer needs the shards.
            is_last = is_last_backward(self.model)
            for unit, weights in self.units:
                if all(weight.as_codes for weight in weights):
                    unit.set_reshard_after_backward(is_last, recurse=False)

    def _decide(self) -> None:
        for unit, weights in self.units:
            unit.reshard()
            for weight in weights:
                weight.decide()
            only_codes = all(weight.as_codes for weight in weights)
            unit.set_reshard_after_forward(self.reshard and not only_codes, recurse=False)
        self._maxima = SharedMaxima([weight.codes for weight in self.weights if weight.as_codes], self.shards)
