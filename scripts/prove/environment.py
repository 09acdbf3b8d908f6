"""The machine that a proof was made on: versions, and switches outside the configuration that change bits."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import subprocess

import torch

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
