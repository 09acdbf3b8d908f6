"""AdamW by the multi-tensor kernels of Transformer Engine or apex: one launch for all parameters of a group.

Both packages' `FusedAdam` classes keep their step count in the parameter groups and know nothing of one state tensor
per parameter; the kernel below them is a function of plain tensors. So this optimizer hands it the local parts of the
sharded parameters, and its state is that of `torch.optim.AdamW` (step, exp_avg, exp_avg_sq): checkpoints move freely
between implementations. The three differ by roundings: each continues its own run bit for bit, not another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.fp32_gradients import local_part

# multi_tensor_applier(kernel, overflow, [gradients, parameters, moments, squares], *hyperparameters)
Applier = Callable[..., Any]
_ADAMW_MODE, _BIAS_CORRECTION = 1, 1


class MultiTensorAdamW(torch.optim.Optimizer):
    """AdamW over FP32 CUDA parameters. applier, kernel: a package's multi_tensor_applier and its Adam kernel.

    The moments have to exist before the first step (training/optimizer.py creates them).
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        applier: Applier,
        kernel: Callable[..., Any],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._applier, self._kernel = applier, kernel

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            by_step: dict[int, list[Tensor]] = {}
            for parameter in (p for p in group["params"] if p.grad is not None):
                step = self.state[parameter]["step"]
                step += 1
                by_step.setdefault(int(step.item()), []).append(parameter)
            for step, alike in by_step.items():
                lists = [
                    [local_part(p.grad) for p in alike if p.grad is not None],
                    [local_part(p) for p in alike],
                    [local_part(self.state[p]["exp_avg"]) for p in alike],
                    [local_part(self.state[p]["exp_avg_sq"]) for p in alike],
                ]
                # A rank may hold an empty shard of a parameter with few rows.
                held = [i for i, part in enumerate(lists[1]) if part.numel()]
                lists = [[parts[i] for i in held] for parts in lists]
                if not held:
                    continue
                overflow = torch.zeros(1, dtype=torch.int32, device=lists[1][0].device)
                self._applier(
                    self._kernel,
                    overflow,
                    lists,
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    step,
                    _ADAMW_MODE,
                    _BIAS_CORRECTION,
                    group["weight_decay"],
                )


def transformer_engine_kernel() -> tuple[Applier, Callable[..., Any]]:
    """Transformer Engine's. Raises ImportError or OSError if it is not there or cannot be loaded."""
    import transformer_engine.pytorch  # noqa: F401 (loads the library that the next import needs)
    import transformer_engine_torch
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    return multi_tensor_applier, transformer_engine_torch.multi_tensor_adam


def apex_kernel() -> tuple[Applier, Callable[..., Any]]:
    """apex's. Raises ImportError if it is not there or was built without its CUDA extensions."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    return multi_tensor_applier, amp_C.multi_tensor_adam
