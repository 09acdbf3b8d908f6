"""Data parallelism by FSDP2, for `parallel.reshard=true` and `parallel.reduce_gradients=each`.

FSDP2 gathers the parameters of one unit while another one computes, and reduces gradients beside the backward pass.
Its settings: `param_dtype` is the dtype of the parameters in the forward pass; `reduce_dtype` (FP32) is the dtype in
which gradients are summed over ranks and micro-batches; `cast_forward_inputs` is off, because token ids and FP32 losses
must not be cast.

Before a step FSDP2 is told what to send (`FsdpParameter`). Parameters that must stay FP32 (Mamba-2's A, D and dt bias)
are gathered in FP32, and weights as codes if these are enough (gathered_codes.py). Codes are gathered before a unit's
first forward pass of a step, and freed in its last backward pass: a unit all of whose linears are gathered as codes
ignores `parallel.reshard`.

This file uses private names of FSDP2, those with an underscore and the attributes of `FSDPParam`, `FSDPParamGroup` and
`FSDPCommContext`; torch 2.11 to 2.15 have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_fp4.parallel.gathered_codes import GatheredModel, WeightCodes
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.reproducible import GradientTree, TreeReduceScatter, tree_all_reduce


class FsdpModel(GatheredModel):
    """A model that FSDP2 shards in place, with the arguments of `apply_data_parallel`; also over one rank."""

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, units: list[nn.Module], fp32_units: Sequence[nn.Module],
        compute_dtype: torch.dtype, reshard: bool, ends: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fp32 = {id(module) for module in fp32_units}
        linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        specs = {id(one): one.weight._spec if isinstance(one.weight, DTensor) else None for one in linears}
        self._mesh, self._reshard = mesh, reshard
        self._modules: list[Any] = [model, *units, *ends]
        self._parameters: list[FsdpParameter] = []
        self._units: list[tuple[Any, list[FsdpParameter]]] = []  # with the weights that can be gathered as codes
        groups: list[Callable[[], list[nn.Parameter]]] = []
        module: Any
        for module in (*units, *ends, model):
            fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard and module in units)
            group = module._get_fsdp_state()._fsdp_param_group
            parameters = [
                FsdpParameter(param, fp32, specs, mesh, compute_dtype) for param in (group.fsdp_params if group else ())
            ]
            if weights := [one for one in parameters if one.codes is not None]:
                self._units.append((module, weights))
            self._parameters += parameters
            module.set_gradient_divide_factor(1.0)
            # Otherwise FSDP2 reduces with premultiplication by the factor, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
            if group and mesh.reproducible:
                groups.append(partial(_with_gradients, group.fsdp_params, mesh.reduce_each))
                if not mesh.reduce_each:
                    self._finish_before_reduction(group, len(groups) - 1)
                module.set_custom_reduce_scatter(TreeReduceScatter())
                if mesh.replica is not None:
                    module.set_all_reduce_hook(partial(tree_all_reduce, group=mesh.replica.group))
        self.codes = [one.codes for one in self._parameters if one.codes is not None]
        if mesh.reproducible:
            self.tree = GradientTree(groups, self._wait_for_reductions)

    def _wait_for_reductions(self) -> None:
        if self._mesh.reduce_each and self._mesh.device.type == "cuda":
            streams = self._modules[0]._get_fsdp_state()._comm_ctx
            for stream in (streams.reduce_scatter_stream, streams.all_reduce_stream):
                torch.cuda.current_stream().wait_stream(stream)

    def _finish_before_reduction(self, group: Any, index: int) -> None:
        """Add the sums of the tree to the gradients of a group each time before FSDP2 reduces them."""
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            if group.reduce_grads and self.tree is not None:
                self.tree.finish_group(index)
            reduce(*unused)

        group.post_backward = post_backward

    @torch.no_grad()
    def gather(self, weights_version: int | None = None) -> None:
        """Before the model runs: decide what FSDP2 gathers, and measure the maxima of blocks. A collective."""
        self._modules[0]._get_fsdp_state()._lazy_init()  # it may replace shards, so hooks are set after it
        self._follow_reasons()
        for parameter in self._parameters:  # each time, because loading may have replaced a shard
            parameter.set_hooks()
        self._maxima.measure()

    def _decide(self) -> None:
        for unit, weights in self._units:
            for weight in weights:
                weight.decide()
            only_codes = all(weight.as_codes for weight in weights)
            unit.set_reshard_after_forward(self._reshard and not only_codes, recurse=False)

    def prepare(self, is_first: bool, is_last: bool) -> None:
        """Set what FSDP2 reduces and frees in the next backward pass of a step."""
        model, each = self._modules[0], self._mesh.reduce_each
        if is_first or is_last:
            model.set_requires_gradient_sync(is_last or each)
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
            module.reshard()


def _with_gradients(params: Sequence[Any], reduced: bool) -> list[nn.Parameter]:
    return [param.sharded_param if reduced else param.unsharded_param for param in params]


class FsdpParameter:
    """A parameter, and what FSDP2 sends of it: codes, FP32, or without hooks the shard in `param_dtype`.

    FSDP2 calls `fsdp_pre_all_gather` of the local shard, gathers the tensors that it returns, and gives them to
    `fsdp_post_all_gather`. Here these two are attributes that are set on the shard and deleted from it, not methods of
    a tensor subclass, so the optimizer and checkpoints see plain FP32 tensors.

    param: FSDP2's object. fp32: the ids of modules whose parameters stay FP32. specs: the placements of the weights of
    quantized linears, by the module's id. codes: of such a weight, unless it is of experts; None with one rank.
    """

    def __init__(
        self, param: Any, fp32: set[int], specs: dict[int, Any], mesh: ParallelMesh, dtype: torch.dtype
    ) -> None:
        module, size, shards = param._module_info.module, param._orig_size, mesh.shards
        self._param, self._in_fp32 = param, id(module) in fp32
        self.codes: WeightCodes | None = None
        if id(module) in specs and len(size) == 2 and shards.size() > 1:
            self.codes = WeightCodes(module.context, size, specs[id(module)], shards, dtype, self._rows)

    def _rows(self) -> Tensor:
        rows: Tensor = self._param._sharded_local_tensor.detach()
        return rows

    @property
    def as_codes(self) -> bool:
        return self.codes is not None and self.codes.as_codes

    def decide(self) -> None:
        """Choose the form of the next all-gather. The parameter must be sharded now, and have no gradient."""
        assert self.codes is not None
        before = self.as_codes
        if self.codes.decide() or self.as_codes != before:
            # FSDP2 makes the parameter and the buffers of its messages once; the next messages have other sizes.
            self._param.all_gather_outputs = []
            if self.as_codes:
                self._param._unsharded_param = self.codes.placeholder(self._param.sharded_param.requires_grad)
            elif hasattr(self._param, "_unsharded_param"):
                del self._param._unsharded_param

    def set_hooks(self) -> None:
        """Set or delete the hooks of the present shard."""
        shard, wanted = self._param._sharded_local_tensor, self._in_fp32 or self.as_codes
        if hasattr(shard, "fsdp_pre_all_gather") == wanted:
            return
        if wanted:
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self.fsdp_pre_all_gather, self.fsdp_post_all_gather
        else:
            del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather
        self._param._init_extensions()

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        if self.codes is not None and self.as_codes:
            return self.codes.quantized_rows(), None
        return (self._param._sharded_param_data,), None  # padded to the same size on all ranks

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if self.codes is None or not self.as_codes:
            return outputs[0], ()
        self.codes.attach(out, outputs)
        return None
