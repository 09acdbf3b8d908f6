"""pretrain.py as users start it: in its own processes, with a model that trains in seconds.

A run that is stopped is a new interpreter, or several under the launcher; the others come from a fork server
(tests/programs.py).
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from megatron_fp4.precision import verify
from megatron_fp4.training.callbacks.numerics import SelfTest
from tests.programs import ROOT, Program, as_child, environments_of_ranks

STEPS = 8
SMALL = (
    "model.pattern=M-*- model.vocab_size=512 model.hidden_dim=64 model.ffn_dim=128 model.num_query_heads=4 "
    "model.head_dim=16 model.mamba_num_heads=4 model.mamba_head_dim=32 model.mamba_state_dim=16 "
    "model.nvfp4_bf16_blocks.last=1 train.global_batch_size=8 train.micro_batch_size=2 train.sequence_length=64 "
    f"train.steps={STEPS} schedule.decay_fraction=0.25 validation.interval=3 validation.num_samples=6 "
    "checkpoint.interval=1 checkpoint.keep=0 logging.interval=1 logging.report=false"
).split()


@pytest.fixture(scope="session")
def small(corpus: Path) -> list[str]:
    """Overrides of a small run on the built-in corpus."""
    return [*SMALL, f"data.cache_dir={corpus}"]


def start(num_processes: int, overrides: list[str]) -> subprocess.Popen[str]:
    """Start pretrain.py by a new interpreter, with several processes under the launcher."""
    launcher = ["-m", "megatron_fp4.launch", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(ROOT / "pretrain.py"), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(as_child(command), env=environment, text=True, **pipes)


def run(num_processes: int, overrides: list[str], code: int = 0) -> str:
    """Run pretrain.py in processes of a fork server, without torchrun; they must end with `code`. Returns what rank 0
    and then the others printed."""
    environments = environments_of_ranks(num_processes) if num_processes > 1 else [None]
    programs = [Program([ROOT / "pretrain.py", *overrides], environment) for environment in environments]
    outputs = [program.communicate(timeout=240)[0] for program in programs]
    output = "".join(outputs)
    assert [program.returncode for program in programs] == [code] * num_processes, output
    return output


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a run of one kind, or events of one name."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if kind in (record["kind"], record.get("event"))]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records(run_dir, "step")}


def tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, scratch)
    leaves, _ = tree_flatten_with_path(torch.load(scratch, weights_only=False))
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def assert_same_checkpoint(one: Path, other: Path, scratch: Path) -> None:
    left, right = tensors(one, scratch / "left.pt"), tensors(other, scratch / "right.pt")
    assert left.keys() == right.keys() and len(left) > 30
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


Straight = Callable[[int], tuple[Path, str]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Straight:
    """Does a run from step 0 to its end, once for each number of processes. Returns its folder, which is not to be
    changed, and its output."""

    @functools.cache
    def straight(processes: int) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(f"straight{processes}") / "run"
        return folder, run(processes, [*small, f"run.dir={folder}"])

    return straight


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_prints_and_writes_everything(straight: Straight, processes: int) -> None:
    folder, output = straight(processes)
    by = "emulated exactly by PyTorch kernels"
    for text in ("Model tiny", "Precision plan nvfp4", "Batch", "Data phases", by, "unigram entropy"):
        assert text in output
    for name in ("metrics.jsonl", "loss.png", "config.yaml", "plan.yaml", "summary.json", "checkpoints/latest"):
        assert (folder / name).exists(), name
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    validations = records(folder, "validation")
    assert [r["step"] for r in validations] == [3, 6, 8]
    summary, bits = json.loads((folder / "summary.json").read_text()), validations[-1]["bits_per_byte"]
    assert summary["finished"] and summary["tokens"] == STEPS * 8 * 64
    found = validations[-1]["losses"]
    assert set(found) == set(bits) == {"code", "prose"} and validations[-1]["loss"] == sum(found.values()) / 2
    each = "  ".join(f"{name} {loss:.4f} ({bits[name]:.4f} bits/byte)" for name, loss in found.items())
    assert f"validation after step {STEPS}: {each}\n" in output
    assert {name: summary[f"validation loss, {name} (bits per byte)"] for name in bits} == pytest.approx(bits, abs=1e-4)
    (switch,) = records(folder, "switch")
    assert switch["step"] == 7 and switch["target"] == "bf16"  # the first step of the decay
    plans = [r["plan"] for r in records(folder, "step")]
    assert plans[:6] == ["nvfp4"] * 6 and "bf16" in plans[6]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "at"), [(1, 7), (2, 6)], ids=["after the switch", "at it"])
def test_a_resumed_run_is_bitwise_the_same(straight: Straight, small: list[str], tmp_path: Path, processes, at) -> None:
    folder, again = straight(processes)[0], tmp_path / "again"
    checkpoint = folder / "checkpoints" / f"step_{at:08d}"
    run(processes, [*small, f"run.dir={again}", f"checkpoint.resume={checkpoint}", "checkpoint.interval=0"])
    expected = losses(folder)
    assert losses(again) == {step: expected[step] for step in range(at + 1, STEPS + 1)}
    assert records(again, "validation")[-1]["losses"] == records(folder, "validation")[-1]["losses"]
    assert [r["plan"] for r in records(again, "step")] == [r["plan"] for r in records(folder, "step")][at:]
    last = Path("checkpoints", f"step_{STEPS:08d}")
    assert_same_checkpoint(folder / last, again / last, tmp_path)


@pytest.mark.slow
def test_the_precision_switches_by_gradient_noise(straight: Straight, small: list[str], tmp_path: Path) -> None:
    """Noise is measured every second step. The third measurement in a row below the (very high) threshold triggers the
    switch. Until then the losses are those of a run without measurements."""
    switch = [f"precision.switch.{part}" for part in ("when=gradient_noise", "threshold=1000000", "interval=2")]
    run(1, [*small, *switch, f"run.dir={tmp_path}", "checkpoint.interval=0", "precision.diagnostics.interval=3"])
    measured = records(tmp_path, "gradient_noise")
    assert [record["step"] for record in measured] == [1, 3, 5]
    assert all(1 < record["ratio"] < 100 for record in measured)
    (event,) = records(tmp_path, "switch")
    assert event["step"] == 5
    assert [record["plan"] for record in records(tmp_path, "step")][3:5] == ["nvfp4", "after the switch to bf16"]
    # After the switch nothing is quantized.
    assert [record["step"] for record in records(tmp_path, "diagnostics")] == [1, 4]
    found, expected = losses(tmp_path), losses(straight(1)[0])
    assert [step for step in expected if found[step] == expected[step]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_is_saved_and_resumes(straight: Straight, small: list[str], tmp_path: Path) -> None:
    """The signal is sent to the launcher of two processes."""
    folder, run_dir = straight(2)[0], tmp_path / "run"
    overrides, metrics = [*small, f"run.dir={run_dir}", "checkpoint.interval=0"], run_dir / "metrics.jsonl"
    process = start(2, overrides)
    while process.poll() is None and not (metrics.exists() and '"kind": "step"' in metrics.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # does nothing if the run has ended already
    output, _ = process.communicate(timeout=240)
    (saved,) = (run_dir / "checkpoints").glob("step_*")
    stopped_at = int(saved.name.removeprefix("step_"))
    if stopped_at < STEPS:
        state = json.loads((run_dir / "state.json").read_text())
        assert (state["state"], state["step"], process.returncode) == ("stopped", stopped_at, 75), output
        assert f"stopped after step {stopped_at}" in output and "Traceback" not in output
        assert output.endswith(f": saved step {stopped_at}; the same command resumes\n")
    run(2, overrides)
    assert losses(run_dir) == losses(folder)
    last = Path("checkpoints", f"step_{STEPS:08d}")
    assert_same_checkpoint(folder / last, run_dir / last, tmp_path)


@pytest.mark.parametrize("name", ["emulated", "transformer_engine", "torch"])
def test_native_backends_are_tested_before_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[str] = []
    monkeypatch.setattr(verify, "cases_of", lambda *_: [])
    monkeypatch.setattr(verify, "require", lambda backend, *_: required.append(backend.name) or "")
    check, backend = SelfTest(), MagicMock()
    backend.name = name
    check.trainer = MagicMock(precision=MagicMock(linears={"linear": MagicMock(backend=backend)}))
    check.start(0)
    assert required == ([] if name == "emulated" else [name])
