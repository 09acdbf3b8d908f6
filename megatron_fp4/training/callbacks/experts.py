"""Routers: their bias moves after each step, and what they do is recorded every `logging.interval` steps, by block:

max_load         tokens of the expert with most / of the mean expert; 1 is balanced (MaxVio of Nemotron 3 Ultra)
idle             share of the experts without a token
entropy          mean over tokens of the entropy of the scores / that of equal scores
zero_gradients   share of the elements of the experts' gradients that are exactly zero

Every `precision.diagnostics.interval` steps also what quantization changes: `flips`, the share of the tokens that have
other experts than with all linears in BF16 (a rank's first micro-batch, computed twice without gradients).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.parameters import holds_first_copy
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.training.callbacks.validation import evaluation_mode
from megatron_fp4.training.step import inputs_of
from megatron_fp4.training.trainer import Callback, Step, is_due


class Experts(Callback):
    """Counts tokens in the step alone: not in a replay, a measurement or a validation."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[Tensor, Tensor]] = {}  # at the same address in all steps, for CUDA graphs

    def before_step(self, step: Step) -> None:
        trainer = self.trainer
        interval, routers = trainer.config.precision.diagnostics.interval, trainer.model.routers()
        if routers and interval and step.index % interval == 0:
            as_planned, in_bf16 = self._chosen(step, in_bf16=False), self._chosen(step, in_bf16=True)
            changed = [(as_planned[name] != in_bf16[name]).any(-1) for name in as_planned]
            flips = torch.stack([tokens.to(torch.float64).mean() for tokens in changed])
            dist.all_reduce(flips, group=trainer.mesh.batch.group)
            shares = (flips / trainer.mesh.batch.size).tolist()
            values = {name: round(share, 6) for name, share in zip(as_planned, shares, strict=True)}
            curves = {f"experts/flips/{name}": share for name, share in values.items()}
            trainer.log.metrics.record(step.done, "flips", {"blocks": values}, curves)

    @torch.no_grad()
    def _chosen(self, step: Step, in_bf16: bool) -> dict[str, Tensor]:
        """The experts of each token of the first micro-batch, int64 [tokens, top_k], by block; without those of
        multi-token prediction, which only training computes."""
        trainer, chosen = self.trainer, dict[str, Tensor]()
        tokens, targets, options = inputs_of(step.batch[0], trainer.mesh, trainer.precision.step_state)
        with ExitStack() as stack:
            for name, router in trainer.model.routers().items():

                def keep(module: Any, inputs: Any, routing: Any, name: str = name) -> None:
                    chosen[name] = routing.expert_tk

                stack.callback(router.register_forward_hook(keep).remove)
            if in_bf16:
                stack.enter_context(trainer.precision.other_recipes(lambda recipe: BF16))
            stack.enter_context(evaluation_mode(trainer.model))  # gathers what the recipes need
            trainer.model(tokens, targets, **options)
        return chosen

    @contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        trainer = self.trainer
        self._routers: dict[str, Any] = trainer.model.routers()
        self._recorded = bool(self._routers) and is_due(trainer.config.logging.interval, step.done)
        self._zeros: list[Tensor] = []
        for name, router in self._routers.items():
            if name not in self._counts:
                load = torch.empty_like(router.bias, dtype=torch.int64)
                self._counts[name] = load, torch.empty((), dtype=torch.float64, device=load.device)
            router.load, router.entropy = (count.zero_() for count in self._counts[name])
        hook = trainer.optimizer.register_step_pre_hook(lambda *_: self._count_zeros()) if self._recorded else None
        yield
        self._loads = [router.load for router in self._routers.values()]
        self._entropies = [router.entropy for router in self._routers.values()]
        for router in self._routers.values():
            router.load = router.entropy = None
        if hook is not None:
            hook.remove()

    def after_step(self, step: Step) -> None:
        if not self._routers:
            return
        group, loads = self.trainer.mesh.batch.group, torch.stack(self._loads)
        dist.all_reduce(loads, group=group)
        if not step.result.skipped:
            for router, load in zip(self._routers.values(), loads, strict=True):
                router.balance(load)
        if self._recorded:
            zeros = torch.stack(self._zeros) if self._zeros else loads.new_zeros(len(loads), 2)
            sums = torch.cat((torch.stack(self._entropies)[:, None], zeros), 1)
            dist.all_reduce(sums, group=group)
            self._record(step.done, loads, sums)

    def _record(self, done: int, loads: Tensor, sums: Tensor) -> None:
        """loads: int64 [blocks, experts]. sums: FP64 [blocks, 3], entropy and `_count_zeros`."""
        values, curves = dict[str, Any](), dict[str, float]()
        for (name, router), load, (entropy, zeros, elements) in zip(
            self._routers.items(), loads.tolist(), sums.tolist(), strict=True
        ):
            tokens = sum(load) / router.config.moe_top_k
            found = {
                "max_load": max(load) * len(load) / sum(load),
                "idle": load.count(0) / len(load),
                "entropy": entropy / tokens / math.log(len(load)),
            }
            if elements:  # a step that is not finite may have no update
                found["zero_gradients"] = zeros / elements
            values[name] = {key: round(value, 6) for key, value in found.items()}
            curves |= {f"experts/{key}/{name}": value for key, value in values[name].items()}
        self.trainer.log.metrics.record(done, "experts", {"blocks": values}, curves)

    @torch.no_grad()
    def _count_zeros(self) -> None:
        """Of each block: the zeros in the gradients of its experts, and their elements; this rank's share."""
        mesh, parameters = self.trainer.mesh, dict(self.trainer.model.named_parameters())
        for name in self._routers:
            counts = torch.zeros(2, dtype=torch.float64, device=mesh.device)
            for parameter in (p for key, p in parameters.items() if key.startswith(f"{name}.") and p.dim() == 3):
                if parameter.grad is not None and holds_first_copy(parameter, mesh):
                    gradient = local_part(parameter.grad)
                    counts[0] += gradient.numel() - torch.count_nonzero(gradient)
                    counts[1] += gradient.numel()
            self._zeros.append(counts)
