"""The machine that a proof is made on: versions, switches outside the configuration that change bits, and times of one
linear by recipe and backend."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping

import torch

from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.verify import Case, sample_tensors

# Beginnings of the names of environment variables, the longest first, and what one that is set changes.
_VARIABLES = {
    "NVTE_USE_FAST_MATH": "quantizers divide and round approximately: other codes; refused",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "four-over-six chooses by approximate errors: other codes; refused",
    "NVTE_": "read by Transformer Engine's kernels or GEMMs",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "FP32 GEMMs in TF32: products of FP8 under FP32 scales lose 13 bits",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in all libraries, 1 forces it",
    "CUBLAS_WORKSPACE_CONFIG": "which GEMM algorithms repeat themselves, and so orders of accumulation",
    "CUBLAS_": "choice and precision of cuBLAS's GEMMs",
    "TRITON_F32_DEFAULT": "precision of FP32 products in Triton kernels",
    "TRITON_INTERPRET": "1 runs Triton kernels in Python",
    "TRITON_": "how Triton compiles, tunes and keeps kernels",
    "CUDA_MODULE_LOADING": "when kernels are loaded: times, no bits",
}


def machine() -> str:
    """The device in one line."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs, {memory}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), no CUDA device"


def versions() -> dict[str, str]:
    """Name -> version, or why there is none."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found |= {"CUDA of torch": torch.version.cuda, "driver": _driver(), "cuBLAS": _cublas(torch.version.cuda)}
    packages = {"Triton": ("triton",), "Transformer Engine": ("transformer_engine", "transformer-engine")}
    return found | {name: _installed(*names) for name, names in packages.items()}


def _installed(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


@functools.cache
def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown (nvidia-smi does not say)"


def _cublas(cuda: str) -> str:
    """Of the library that torch has loaded."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.split('.')[0]}")
    except OSError:
        return "unknown (the library is not found)"
    parts = []
    for kind in range(3):  # major, minor, patch
        value = ctypes.c_int()
        library.cublasGetProperty(kind, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


def switches() -> list[tuple[str, str, str]]:
    """(name, value, what it changes) of every environment variable that is set and of torch's own switches.

    Of a variable that holds a path only that it is set: reports are passed on.
    """
    found = []
    for name, value in sorted(os.environ.items()):
        effect = next((effect for start, effect in _VARIABLES.items() if name.startswith(start)), None)
        if effect is not None:
            found.append((name, "set" if "/" in value else value, effect))
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction
    return [
        *found,
        ("torch allow_tf32", str(matmul.allow_tf32), "True: FP32 GEMMs in TF32"),
        ("torch allow_bf16_reduced_precision_reduction", str(reduced), "True: split BF16 GEMMs may add up in BF16"),
        ("torch deterministic algorithms", str(torch.are_deterministic_algorithms_enabled()), "True: kernels repeat"),
        ("denormals on the CPU", "flushed to zero" if flushes_denormals() else "kept", "flushed: small values vanish"),
    ]


def flushes_denormals() -> bool:
    """Whether FP32 arithmetic on the CPU makes zeros of denormals (torch.set_flush_denormal, compilers' fast math)."""
    smallest = torch.tensor([2.0**-126])
    return bool((smallest * 0.5 == 0).all())


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
