"""What a run says of itself before it trains, in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from introduction import computation_facts, when_it_switches
from megatron_fp4.config.precision_schema import SwitchConfig
from megatron_fp4.precision.backend_support import BackendChoice
from megatron_fp4.precision.switch import PrecisionSwitch


@pytest.mark.parametrize(
    ("when", "at_step", "switched_at", "said"),
    [
        ("never", None, None, "never"),
        ("before_decay", 255, None, "before step 256 (before_decay), to bf16"),
        ("before_decay", 255, 255, "was before step 256, to bf16"),
        ("before_decay", 300, None, "never: before_decay is the end of the run"),
        ("gradient_noise", None, None, "when the gradient noise asks for it, to bf16"),
        ("gradient_noise", None, 1999, "was before step 2,000, to bf16"),
    ],
)
def test_when_the_precision_switches(when: str, at_step: int | None, switched_at: int | None, said: str) -> None:
    assert when_it_switches(PrecisionSwitch(SwitchConfig(when=when), at_step, switched_at), 300) == said


@pytest.mark.parametrize(
    ("quantized", "backend", "said"),
    [
        (0, BackendChoice("emulated", "nothing is quantized"), None),  # nobody calls BF16 emulated
        (8, BackendChoice("emulated", "the run is on cpu"), "emulated exactly by PyTorch kernels (the run is on cpu)"),
        (8, BackendChoice("torch", "our codes"), "torch (our codes)"),
    ],
)
def test_who_multiplies(quantized: int, backend: BackendChoice, said: str | None) -> None:
    run: Any = SimpleNamespace(
        config=SimpleNamespace(precision=SimpleNamespace(compute_dtype="bfloat16")),
        mesh=SimpleNamespace(device=torch.device("cpu")),
        backend=backend,
        controller=SimpleNamespace(plans=[SimpleNamespace(num_quantized=quantized)]),
    )
    assert computation_facts(run) == {
        "compute dtype": "bfloat16 on cpu", "quantized GEMMs": said, "MFU is relative to": None,
    }  # fmt: skip
