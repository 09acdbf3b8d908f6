"""What a device could do, and how much memory it has taken."""

from __future__ import annotations

import re
import resource
import sys

import torch

_GIB = 2**30

# Dense TFLOP/s in BF16 of NVIDIA's data sheets, by what torch calls the GPU; a later row holds where several fit.
_PEAKS = {
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}


def peak_tflops(device: torch.device) -> float | None:
    """What `device` could multiply in BF16, dense, in TFLOP/s; None where this is not known: a CPU, another GPU, a part
    of one (MIG)."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`peak_tflops` of the GPU of this name, such as `NVIDIA H100 80GB HBM3`."""
    if "MIG" in name.split():
        return None
    found = [peak for model, peak in _PEAKS.items() if all(word in re.split(r"[\s-]", name) for word in model.split())]
    return found[-1] if found else None


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has had at once since it began, in GiB: what torch's allocator gave out on a
    GPU; on a CPU what was resident, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024) / _GIB


def memory_size(device: torch.device) -> float | None:
    """What a GPU has, in GiB; None for a CPU, whose memory is not this process's alone."""
    return torch.cuda.get_device_properties(device).total_memory / _GIB if device.type == "cuda" else None
