from __future__ import annotations

import pytest

from megatron_fp4.training.callbacks.reporting import peak_of


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
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak
