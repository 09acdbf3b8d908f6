"""Forward and backward of one linear, by recipe and backend, beside BF16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.verify import Case, sample_tensors

_SPAN = 0.03  # seconds of calls that are timed together
_ROUNDS = 7


def linear_times(
    shape: tuple[int, int, int, int], candidates: Mapping[str, tuple[Recipe, Backend]], device: torch.device
) -> dict[str, float]:
    """Milliseconds by name, `bf16` first: the median of spans of calls, taken in turns; weights quantized every call.

    shape: tokens, input and output features, and groups of these. On CUDA by events after a warm-up; on a CPU by the
    clock, one call a span and three rounds: a rough measure.
    """
    steps = {"bf16": _step(Case(*shape, BF16), EMULATED, device)}
    steps |= {name: _step(Case(*shape, recipe), backend, device) for name, (recipe, backend) in candidates.items()}
    cuda = device.type == "cuda"
    repeats = {}
    for name, step in steps.items():
        _seconds(step, 3 if cuda else 1, cuda)
        repeats[name] = max(2, int(_SPAN / _seconds(step, 3, cuda))) if cuda else 1
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS if cuda else 3):
        for name, step in steps.items():
            found[name].append(_seconds(step, repeats[name], cuda))
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def _step(case: Case, backend: Backend, device: torch.device) -> Callable[[], None]:
    x, w, dy = sample_tensors(case, device)
    clock = StepState(seed=7)
    context = LinearContext("prove", case.recipe, clock, backend, num_groups=case.num_groups)
    x, w = x.requires_grad_(), w.requires_grad_()

    def step() -> None:
        x.grad = w.grad = None
        clock.weights_version += 1
        quantized_linear(x, w, context).backward(dy)

    return step


def _seconds(step: Callable[[], None], repeats: int, cuda: bool) -> float:
    """Mean time of `repeats` calls in a row."""
    if not cuda:
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - began) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats / 1e3
