"""Whole short runs on a GPU, of what was found broken or new there: recipes, switches, odd sizes, backends.

Each is pretrain.py in a process of its own on the tiny model, through its switch, a validation with a rest and the end.
And the same run twice, one of which measures its gradient noise.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COMMON = [
    *("train.steps=6", "checkpoint.interval=0", "validation.num_samples=3", "logging.tensorboard=false"),
    *("train.kernels=torch", "precision.recheck_interval=1"),
]
SWITCH = ["precision.switch.when=3"]
RUNS = {
    "MXFP4, tokens that are no multiple of 32": [
        *("precision=mxfp4", "train.sequence_length=2064", "train.micro_batch_size=2"),
    ],
    "FP8 blocks, tokens that are no multiple of 128": ["precision=fp8_block", "train.sequence_length=208"],
    "qaf": ["experiment=qaf", *SWITCH],
    "backward": [*SWITCH, "precision.switch.scope=backward"],
    "forward to FP8 blocks": [*SWITCH, "precision.switch.scope=forward", "precision.switch.target=fp8_block"],
    "a model that divides by few": [
        *("model.pattern=M*-", "model.mamba_num_heads=6", "model.mamba_num_groups=2", "model.mamba_head_dim=16"),
        *("model.num_query_heads=6", "model.head_dim=16", "model.ffn_dim=176", "precision.bf16_blocks.last=0"),
    ],
    "Transformer Engine's FP8": ["precision=fp8_block", "precision.backend=transformer_engine"],
}


def run(folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The records of a run."""
    command = [sys.executable, "pretrain.py", *overrides, f"run.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_a_short_run(tmp_path: Path, name: str) -> None:
    overrides = RUNS[name]
    if "precision.backend=transformer_engine" in overrides and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    records = run(tmp_path / "run", [*COMMON, *overrides])
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    if SWITCH[0] in overrides:
        assert [record["step"] for record in records if record.get("event") == "switch"] == [4]
    assert any(record["kind"] == "validation" for record in records)


def test_gradient_noise_measured_beside_cuda_graphs_changes_no_bit(tmp_path: Path) -> None:
    """Without Mamba blocks, whose kernels not every machine has, and without rechecks, which no graph can do."""
    common = ["model.pattern=-*-*", "model.nvfp4_bf16_blocks.last=1", "train.steps=8"]
    common += ["train.cuda_graphs=true", "precision.backend=emulated"]
    common += [override for override in COMMON if override.startswith(("checkpoint.", "validation.", "logging."))]
    noise = ["precision.switch.when=gradient_noise", "precision.switch.interval=2", "precision.switch.threshold=1e-9"]
    measured = run(tmp_path / "measured", [*common, *noise])
    unmeasured = run(tmp_path / "unmeasured", [*common, "precision.switch.when=never"])
    steps, expected = (
        [(record["step"], record["loss"], record["grad_norm"]) for record in records if record["kind"] == "step"]
        for records in (measured, unmeasured)
    )
    assert len(expected) == 8 and steps == expected
    ratios = {record["step"]: record["ratio"] for record in measured if record["kind"] == "gradient_noise"}
    assert list(ratios) == [1, 3, 5, 7] and all(1 < ratio < 100 for ratio in ratios.values())
