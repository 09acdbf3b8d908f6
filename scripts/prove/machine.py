"""The machine that a proof is made on: versions, switches outside the configuration that change bits, and times of one
linear by recipe and backend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.utils import collect_env

from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.verify import Case, sample_tensors

# Environment variables that change codes, products or kernels begin so.
_VARIABLES = ("NVTE_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TRITON_", "CUDA_MODULE_LOADING")


def machine() -> str:
    """The device in one line."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs, {memory}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), no CUDA device"


def versions() -> dict[str, str]:
    """Name -> version."""
    found = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["driver"] = str(collect_env.get_nvidia_driver_version(collect_env.run))
    for name in ("triton", "transformer_engine", "nvidia-cublas"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def switches() -> dict[str, str]:
    """Name -> value of every environment variable that may change bits and is set, and of torch's own switches.

    Of a variable that holds a path only that it is set: reports are passed on.
    """
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    matmul, smallest = torch.backends.cuda.matmul, torch.tensor([2.0**-126])
    return {name: "set" if "/" in value else value for name, value in found.items()} | {
        "torch allow_tf32": str(matmul.allow_tf32),
        "torch allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "torch deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "denormals on the CPU": "flushed to zero" if (smallest * 0.5 == 0).all() else "kept",
    }


_SPAN = 0.03  # seconds of calls that are timed together
_ROUNDS = 7


def linear_times(
    shape: tuple[int, int, int, int], candidates: Mapping[str, tuple[Recipe, Backend]], device: torch.device
) -> dict[str, float]:
    """Milliseconds by name, `bf16` first: the median of spans of calls, taken in turns; weights quantized every call.

    shape: tokens, input and output features, and groups of these. On a CPU one call a span and three rounds: a rough
    measure.
    """
    steps = {"bf16": _step(Case(*shape, BF16), EMULATED, device)}
    steps |= {name: _step(Case(*shape, recipe), backend, device) for name, (recipe, backend) in candidates.items()}
    cuda = device.type == "cuda"
    repeats = {}
    for name, step in steps.items():
        _seconds(step, 3 if cuda else 1, cuda)  # warms up
        repeats[name] = max(2, int(_SPAN / _seconds(step, 3, cuda))) if cuda else 1
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS if cuda else 3):
        for name, step in steps.items():
            found[name].append(_seconds(step, repeats[name], cuda))
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def _step(case: Case, backend: Backend, device: torch.device) -> Callable[[], None]:
    x, w, dy = sample_tensors(case, device)
    state = StepState(seed=7)
    context = LinearContext("prove", case.recipe, state, backend, num_groups=case.num_groups)
    x, w = x.requires_grad_(), w.requires_grad_()

    def step() -> None:
        x.grad = w.grad = None
        state.weights_version += 1
        quantized_linear(x, w, context).backward(dy)

    return step


def _seconds(step: Callable[[], None], repeats: int, cuda: bool) -> float:
    """Mean time of `repeats` calls in a row."""
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats
