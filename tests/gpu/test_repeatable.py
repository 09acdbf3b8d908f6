"""A deterministic hybrid run has the same bits in every process: repeated, killed and resumed, with cold caches.

The whole program in processes of its own, some minutes in all.
"""

import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.training.callbacks.kernels import choices_in, live_autotuners, record_of
from scripts.fingerprint import state_digest
from tests.programs import environments_of_ranks

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `cuda`: {', '.join(MISSING)}"),
]
SMALL = [
    *("model=hybrid_60m", "model.pattern=M-M*M-", "model.vocab_size=2048", "train.steps=8", "checkpoint.interval=3"),
    *("train.micro_batch_size=2", "logging.tensorboard=false", "validation.num_samples=2"),
    "parallel.timeout_seconds=30",
]
RUNS: dict[str, tuple[int, list[str]]] = {
    "NVFP4": (1, []),
    "qaf": (1, ["experiment=qaf", "precision.switch.when=3"]),
    "backward switch": (1, ["precision.switch.when=3", "precision.switch.scope=backward"]),
    "data parallel": (2, []),
    "tensor parallel": (2, ["parallel.tensor=2"]),
}


def run(folder: Path, cache: Path, ranks: int, overrides: list[str], kill_after: int = 0) -> str:
    """Run pretrain.py to its end, or until `kill_after` steps are recorded: then the last rank is killed, and
    the others must end by themselves. Returns what the first rank printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    programs = []
    for rank, environment in enumerate(environments_of_ranks(ranks) if ranks > 1 else [dict(os.environ)]):
        with folder.with_name(f"{folder.name}.rank_{rank}.log").open("w") as output:
            command = [sys.executable, "pretrain.py", *SMALL, *overrides, f"run.dir={folder}"]
            settings = {"cwd": ROOT, "env": environment | common, "stdout": output, "stderr": subprocess.STDOUT}
            programs.append(subprocess.Popen(command, **settings))
    until = time.monotonic() + 240
    while any(program.poll() is None for program in programs):
        late = time.monotonic() > until
        if late or (kill_after and len(steps_of(folder)) >= kill_after):
            for program in programs if late else programs[-1:]:
                program.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    assert time.monotonic() < until, "a rank does not end"
    said = folder.with_name(f"{folder.name}.rank_0.log").read_text()
    assert kill_after or not any(program.returncode for program in programs), said[-3000:]
    return said


def steps_of(folder: Path) -> dict[int, tuple[float, float]]:
    """Losses and gradient norms by step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["kind"] == "step"}


def bits(folder: Path) -> tuple[dict[int, tuple[float, float]], str]:
    return steps_of(folder), state_digest(folder / "checkpoints" / "step_00000008")


@pytest.mark.parametrize("name", RUNS)
def test_a_repeat_and_a_kill_and_resume_have_the_same_bits(tmp_path: Path, name: str) -> None:
    ranks, overrides = RUNS[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    logs = [run(tmp_path / "first", tmp_path / "cache", ranks, overrides)]
    # Nothing is compiled yet there, but the configurations are known: tuned again, others may be the fastest.
    shutil.copytree(tmp_path / "cache" / "megatron_fp4", tmp_path / "other_cache" / "megatron_fp4")
    logs.append(run(tmp_path / "cold", tmp_path / "other_cache", ranks, overrides))
    run(tmp_path / "killed", tmp_path / "cache", ranks, overrides, kill_after=5)
    logs.append(run(tmp_path / "killed", tmp_path / "cache", ranks, overrides))
    expected = bits(tmp_path / "first")
    assert len(expected[0]) == 8
    assert bits(tmp_path / "cold") == expected and bits(tmp_path / "killed") == expected
    assert not any("was not tuned in advance" in log for log in logs), "the rehearsal missed a kernel or a key"


def test_a_checkpoint_carries_the_tuned_kernels(tmp_path: Path) -> None:
    """A resume on a machine that would choose others."""
    run(tmp_path / "straight", tmp_path / "cache", 1, [])
    (known,) = (tmp_path / "cache" / "megatron_fp4" / "autotuning").iterdir()
    record = json.loads(known.read_text())
    importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    autotuners = live_autotuners()
    others = {
        (name, key): next(c.all_kwargs() for c in autotuners[name].configs if c.all_kwargs() != chosen)
        for (name, key), chosen in choices_in(record).items()
    }
    known.write_text(json.dumps(record_of(record["environment"], others)))
    checkpoint = tmp_path / "straight" / "checkpoints" / "step_00000003"
    run(tmp_path / "resumed", tmp_path / "cache", 1, [f"checkpoint.resume={checkpoint}"])
    steps, state = bits(tmp_path / "straight")
    assert bits(tmp_path / "resumed") == ({step: found for step, found in steps.items() if step > 3}, state)
