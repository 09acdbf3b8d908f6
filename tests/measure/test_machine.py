from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_fp4.measure.machine import memory_size, peak_memory, peak_of, peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_no_peak_and_the_memory_of_its_process() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops(cpu) is None and memory_size(cpu) is None
    before = peak_memory(cpu)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 0.9 * resident < before < 1000
    held = torch.ones(2**24)  # 64 MiB, which may lie below an earlier peak
    assert peak_memory(cpu) >= before and held[-1] == 1
