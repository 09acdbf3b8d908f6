"""All that this project uses of FSDP2's private interface; torch 2.11 to 2.15 have it.

A test looks up all `NAMES` (by torch's file and class) in the installed torch, or in the files of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

NAMES = {
    ("_fully_shard.py", "FSDPModule"): ["_get_fsdp_state"],
    ("_fsdp_state.py", "FSDPState"): ["_fsdp_param_group", "_lazy_init", "_comm_ctx"],
    ("_fsdp_param_group.py", "FSDPCommContext"): ["reduce_scatter_stream", "all_reduce_stream"],
    ("_fsdp_param_group.py", "FSDPParamGroup"): ["fsdp_params", "post_backward", "reduce_grads"],
    ("_fsdp_param.py", "ParamModuleInfo"): ["module"],
    ("_fsdp_param.py", "FSDPParam"): [
        *("_module_info", "_orig_size", "_sharded_local_tensor", "_sharded_param_data", "_init_extensions"),
        *("_unsharded_param", "all_gather_outputs", "sharded_param", "unsharded_param"),
        *("fsdp_pre_all_gather", "fsdp_post_all_gather"),
    ],
}


class FsdpParameter:
    """FSDP2's object for a parameter: its shard, and the tensor it is gathered into.

    module: the module that has the parameter. size: shape of the gathered parameter (of its tensor-parallel part).
    """

    def __init__(self, param: Any) -> None:
        self._param = param
        self.module: nn.Module = param._module_info.module
        self.size: torch.Size = param._orig_size

    @property
    def shard(self) -> Tensor:
        """This rank's part, without padding. Initialization and loading may replace the tensor."""
        return self._param._sharded_local_tensor  # type: ignore[no-any-return]

    @property
    def padded_shard(self) -> Tensor:
        """The shard, flat, padded to the same size on all ranks."""
        return self._param._sharded_param_data  # type: ignore[no-any-return]

    @property
    def sharded(self) -> nn.Parameter:
        """The parameter that the optimizer updates; its gradient is the reduced one."""
        return self._param.sharded_param  # type: ignore[no-any-return]

    @property
    def gathered(self) -> nn.Parameter:
        """The parameter that the forward pass uses; its gradient is the one before the reduction."""
        return self._param.unsharded_param  # type: ignore[no-any-return]

    def set_hooks(self, hooks: Any) -> None:
        """From the next all-gather on, FSDP2 sends the tensors that `hooks.fsdp_pre_all_gather` returns, and
        `hooks.fsdp_post_all_gather` makes the parameter from those received. None: FSDP2 sends the shard."""
        shard: Any = self.shard
        present = hasattr(shard, "fsdp_pre_all_gather")
        if present == (hooks is not None):
            return
        if present:
            del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather
        else:
            shard.fsdp_pre_all_gather = hooks.fsdp_pre_all_gather
            shard.fsdp_post_all_gather = hooks.fsdp_post_all_gather
        self._param._init_extensions()

    def gather_into(self, gathered: nn.Parameter | None) -> None:
        """From now on, gather into `gathered` (None: into a new parameter) through new message buffers, because the
        next messages have other sizes. FSDP2 makes both once and reuses them."""
        self._param.all_gather_outputs = []
        if gathered is not None:
            self._param._unsharded_param = gathered
        elif hasattr(self._param, "_unsharded_param"):
            del self._param._unsharded_param


def parameters_of(unit: FSDPModule) -> list[FsdpParameter]:
    """The parameters that `unit` gathers together."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [FsdpParameter(param) for param in group.fsdp_params]


def initialize_lazily(unit: FSDPModule) -> None:
    """Do FSDP2's setup of the first forward pass now, if it is not done yet."""
    unit._get_fsdp_state()._lazy_init()


def reduction_streams(model: FSDPModule) -> Sequence[torch.cuda.Stream]:
    """The CUDA streams that reduce gradients. The model must have run on a GPU."""
    context: Any = model._get_fsdp_state()._comm_ctx
    return context.reduce_scatter_stream, context.all_reduce_stream


def before_reduction(unit: FSDPModule, function: Callable[[], None]) -> None:
    """Call `function` each time before the gradients of `unit`, complete on this rank, are reduced over ranks."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            function()
        reduce(*unused)

    group.post_backward = post_backward
