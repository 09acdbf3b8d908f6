"""The optimizer, AdamW, and its learning rate as a pure function of the step: warm-up, stable, decay (WSD).

    lr
    peak |      ________________
         |    /                 \\
         |   /                   \\
    min  |  /                     \\_
         +--|----|--------------|---|--> step
            0  warmup_steps     |   num_steps - 1
                             decay_start_step

Steps count from 0, and update `step` uses lr(step). The schedule has no state, so a resumed run needs none.

The master weights are the parameters themselves, FP32 and sharded. Each rank updates its own shards; moments are FP32
DTensors placed like their parameter. The implementation is torch's fused one: it can skip an update without making the
host wait for the norm. Of an optimizer that cannot, the host decides about every update (step.py).

The moments are made by `build_optimizer`, not in the first update: so a run that does not fit in memory fails at once,
and a checkpoint has the same tensors before the first update, after it, and if all steps so far were skipped.
Hyperparameters (betas, decay, ...) are not in the state: a resume takes them from the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import Config, OptimizerConfig, ScheduleConfig
from megatron_fp4.precision.plan import switch_step


def build_optimizer(model: nn.Module, config: OptimizerConfig, reproducible: bool = False) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over all trainable parameters of `model`.

    Call it after `model` is sharded and its parameters have values. The learning rate starts at config.lr; `set_lr`
    changes it. reproducible: the update of an element does not depend on how ranks shard its parameter.
    """
    groups, betas = parameter_groups(model, config.weight_decay), (config.beta1, config.beta2)
    # On a CPU, torch's fused kernel rounds the last elements, which do not fill a vector, otherwise.
    fused = not (reproducible and next(model.parameters()).device.type == "cpu")
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=not fused)
    for parameter in optimizer_parameters(optimizer):  # as torch.optim.Adam._init_group does in the first step
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups in the order of model.named_parameters(): parameters with weight decay, and those without. With expert
    parallelism the experts are a group of their own: torch updates no DTensors of several meshes together.

    Parameters with fewer than two dimensions (norm scales, A_log, D, dt_bias) and biases have no weight decay.
    Matrices, embeddings and convolution weights have it.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2 and not name.endswith("bias")
            axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
            groups.setdefault((decayed, axes), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: not item[0][0])
    return [{"params": own, "weight_decay": weight_decay if decayed else 0.0} for (decayed, _), own in ordered]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group: `lr`, times the group's own `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its name in records, such as `AdamW (fused)`."""
    return f"{type(optimizer).__name__}{' (fused)' if is_fused(optimizer) else ''}"


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of torch's fused ones, which update in place and can skip an update on the device."""
    return bool(optimizer.defaults.get("fused"))


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that `optimizer` updates, in the same order on all ranks; the shards, if there are any."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live state tensors as `<parameter name>.<state name>`, e.g. `blocks.0.in_proj.weight.exp_avg`.

    Writing into a returned tensor changes the optimizer; a checkpoint is loaded this way. `model` must be in its
    sharded state (not between forward and backward).
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = optimizer_parameters(optimizer)
    assert names.keys() >= set(parameters), "the model is not in its sharded state, or the optimizer is another model's"
    return {f"{names[p]}.{key}": value for p in parameters for key, value in optimizer.state[p].items()}


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Update with a fused optimizer, unless `skip` (0-dim FP32 on the device: 0 or 1) is 1; then weights, moments and
    step counts keep their bits. The host does not wait for `skip`, which is read on the device."""
    assert is_fused(optimizer)
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


# The remaining share of (peak - minimum) after a fraction p of the decay. It is exactly 0 at p = 1, so the last step
# has exactly the minimum. "1-sqrt" is from Hägele et al., arXiv:2405.18392, section 4.
_REMAINDERS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
}


class WSDSchedule:
    """Warm-up, stable, decay over `num_steps` steps.

    warmup_steps: number of warm-up steps; the last one has the peak rate.
    decay_start_step: the first step with a rate below the peak again (num_steps if there is no decay).

    Raises ValueError for fractions that overlap, and for exponential decay to zero.
    """

    def __init__(self, config: ScheduleConfig, peak_lr: float, num_steps: int) -> None:
        assert num_steps >= 1 and peak_lr > 0
        if config.warmup_fraction + config.decay_fraction > 1.0:
            raise ValueError(
                f"schedule.warmup_fraction {config.warmup_fraction} and schedule.decay_fraction "
                f"{config.decay_fraction} overlap: their sum must not exceed 1; lower one"
            )
        if config.decay == "exponential" and config.decay_fraction > 0 and config.min_lr_ratio == 0:
            raise ValueError(
                "schedule.decay=exponential never reaches schedule.min_lr_ratio=0; give a ratio above 0, "
                "or another decay"
            )
        self.peak_lr, self.num_steps = peak_lr, num_steps
        self.decay, self.min_lr_ratio = config.decay, config.min_lr_ratio
        self.decay_start_step = num_steps - _count(config.decay_fraction, num_steps)
        # In a very short run both counts may be rounded up. Then warm-up is shorter: the decay must reach the minimum.
        self.warmup_steps = min(_count(config.warmup_fraction, num_steps), self.decay_start_step)

    @classmethod
    def of(cls, config: Config) -> WSDSchedule:
        """The schedule of a run with this configuration. Raises ValueError as the class does."""
        return cls(config.schedule, config.optimizer.lr, config.train.steps)

    def switch_step(self, when: str) -> int | None:
        """The step before which the precision switches; see `switch_step` in precision/plan.py.

        Raises ValueError as that does, and for a switch before the decay if there is no decay.
        """
        if when == "before_decay" and self.decay_start_step == self.num_steps:
            raise ValueError(
                "precision.switch.when=before_decay, but schedule.decay_fraction never decays; give a fraction above "
                "0, or a step or never as precision.switch.when"
            )
        return switch_step(when, self.num_steps, self.decay_start_step)

    def lr(self, step: int, switched_at: int | None = None, rewarm_steps: int = 0) -> float:
        """The learning rate of update `step`, from 0 to num_steps - 1.

        Warm-up rises linearly from peak / warmup_steps (never 0); decay ends at exactly peak * min_lr_ratio in the last
        step. If the precision switched at step `switched_at`, the rate rises again over `rewarm_steps` steps (0: it
        does not), from its scheduled value / rewarm_steps to its scheduled value.
        """
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        lr = self._scheduled(step)
        if switched_at is not None and switched_at <= step < switched_at + rewarm_steps:
            lr *= (step - switched_at + 1) / rewarm_steps
        return lr

    def _scheduled(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak_lr * ((step + 1) / self.warmup_steps)
        if step < self.decay_start_step:
            return self.peak_lr
        progress = (step - self.decay_start_step + 1) / (self.num_steps - self.decay_start_step)
        if self.decay == "exponential":
            return self.peak_lr * self.min_lr_ratio**progress
        remainder = _REMAINDERS[self.decay](progress)
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remainder)


def _count(fraction: float, num_steps: int) -> int:
    return max(1, round(fraction * num_steps)) if fraction > 0 else 0
