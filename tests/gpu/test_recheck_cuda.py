"""On a GPU: a run whose linears are rechecked in every step, and the proof as a command."""

import importlib.util
import json

import pytest
import torch

import pretrain
from megatron_fp4.precision.transformer_engine import FAST_MATH_VARIABLES
from scripts import prove_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NATIVE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Transformer Engine on compute capability 9.0, which takes FP32 scales",
)


@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        ("nvfp4", "emulated"),
        ("mxfp4", "emulated"),
        ("fp8_block", "emulated"),
        ("nvfp4_all_the_way", "emulated"),
        pytest.param("fp8_block", "transformer_engine", marks=NATIVE),
    ],
)
def test_the_kernels_of_a_run_are_the_reference(precision, backend, tmp_path):
    """More steps than there are linears, so that each has its turn; on its own tensors, not on samples."""
    losses = []
    for interval in (1, 0):
        overrides = [
            *(f"precision={precision}", f"precision.backend={backend}", f"precision.recheck_interval={interval}"),
            *("precision.switch.when=never", "train.steps=14", "train.kernels=torch", "validation.interval=0"),
            *("checkpoint.interval=0", "data.num_workers=0", f"run.dir={tmp_path}/{interval}"),
        ]
        assert pretrain.main(overrides) == 0
        records = [json.loads(line) for line in (tmp_path / str(interval) / "metrics.jsonl").read_text().splitlines()]
        assert not [record for record in records if record.get("event") == "recheck"]
        losses.append([(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "step"])
    assert losses[0] == losses[1]


def test_the_proof_of_this_machine(capsys, monkeypatch):
    for name in FAST_MATH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert prove_backend.main([]) == 0
    printed = capsys.readouterr().out
    assert "All that was tested agrees." in printed and "compute capability" in printed and "CUDA events" in printed
