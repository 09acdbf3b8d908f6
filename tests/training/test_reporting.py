from __future__ import annotations

import pytest
import torch

from megatron_fp4.training.callbacks.reporting import dtype_fact, peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_flops_by_the_name_of_the_gpu(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_fp32_is_recommended_on_cpus_that_are_slow_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "precision.compute_dtype=float32 takes a tenth of the time"
    for capability, slow in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert (remedy in dtype_fact("bfloat16", "cpu")) is slow
        assert dtype_fact("float32", "cpu") == "float32 on cpu" and dtype_fact("bfloat16", "cuda") == "bfloat16 on cuda"
