"""AdamW over the sharded FP32 parameters, which are themselves the master weights.

Each rank updates its own shards; moments are FP32 DTensors placed like their parameter. The
implementation is torch's fused one: the multi-tensor kernels of Transformer Engine and apex are
not used: on an H200 torch's updates the 1.29 billion parameters of the 1.2B model in 10.4 ms (scripts/benchmark.py),
Transformer Engine's took 10.8 ms (apex's was not measured), and only torch's can leave out an update without the host
waiting for the norm.

The moments exist from the start instead of from the first update: a run that does not fit in memory fails at once,
and a checkpoint has the same tensors before the first update, after it, and when every step so far was skipped.

Hyperparameters (betas, decay, ...) are not in the state: on resume the configuration's hold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_fp4.config.schema import OptimizerConfig

OPTIMIZER = "torch.optim.AdamW (fused)"
"""For the log."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over all trainable parameters of `model`.

    Call it after `model` has been sharded and its parameters hold values: it takes the parameters as they are.
    The learning rate starts at config.lr; `set_lr` changes it.
    """
    groups, betas = parameter_groups(model, config.weight_decay), (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    _create_moments(optimizer)
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The decayed parameters and the others, in the order of model.named_parameters().

    Not decayed: parameters with fewer than two dimensions (norm scales, A_log, D, dt_bias) and biases. Matrices,
    embeddings and convolution weights (more than one dimension) are decayed.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or name.endswith("bias")
            (others if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that `optimizer` updates: with FSDP always the shards, in the same order on all ranks."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live state tensors as `<parameter name>.<state name>`, e.g. `blocks.0.in_proj.weight.exp_avg`.

    Writing into a returned tensor changes the optimizer: this is how a checkpoint is loaded. `model` must be in
    its sharded state (not between forward and backward).
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for parameter in optimizer_parameters(optimizer):
        assert parameter in names, "the model is not in its sharded state, or the optimizer belongs to another model"
        for key, value in optimizer.state[parameter].items():
            state[f"{names[parameter]}.{key}"] = value
    return state


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` works: torch's fused AdamW reads on the device whether it is to update, others do not."""
    return isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Update, or where `skip` (0-dim FP32 on the device: 0 or 1) is 1 leave weights, moments and step counts as they
    are, bit for bit. The host does not wait for it."""
    assert can_skip_on_device(optimizer)
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """What AdamW's first step would create: see torch.optim.Adam._init_group with fused=True."""
    for parameter in optimizer_parameters(optimizer):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
