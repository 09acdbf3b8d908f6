"""A deterministic hybrid run has the same bits in every process: repeated, killed and resumed, with cold caches.

Runs the whole program in processes of its own, some minutes in all; scripts/compare_repeats.py does the comparing.
"""

import importlib
import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.logging.metrics import read_metrics
from megatron_fp4.training.autotuning import choices_in, live_autotuners, record_of
from scripts import compare_repeats

MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `cuda`: {', '.join(MISSING)}"),
]

SMALL = [
    "model.pattern=M-M*M-",
    "model.vocab_size=2048",
    "train.steps=8",
    "checkpoint.interval=3",
]
TIMEOUT = 240.0


@pytest.fixture(autouse=True)
def ranks_end_with_the_test() -> Iterator[None]:
    """Also on SIGTERM, which scripts/test_gpu.py sends when time is over; ranks have sessions of their own."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def compare(folder: Path, *arguments: str) -> int:
    return compare_repeats.main([*SMALL, "--output", str(folder), "--timeout", str(TIMEOUT), *arguments])


def record_in(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "autotuning.json").read_text())
    return record


@pytest.mark.parametrize(("caches", "repeats"), [("shared", "2"), ("own", "1")])
def test_repeats_and_a_resume_are_equal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caches: str, repeats: str
) -> None:
    code = compare(tmp_path / "runs", "--repeats", repeats, "--kill-after", "4", "--caches", caches)
    output, errors = capfd.readouterr()
    assert code == 0, output + errors
    record = record_in(tmp_path / "runs" / "run_1")
    count = len(record["choices"])
    assert count >= 12 and record == record_in(tmp_path / "runs" / "killed_and_resumed")
    logs = [path.read_text() for path in sorted((tmp_path / "runs").glob("start_*.log"))]
    assert f"kernels: 0 configurations known, {count} tuned" in logs[0]
    assert all(f"kernels: {count} configurations known, 0 tuned" in log for log in logs[1:])
    assert not any("was not tuned in advance" in log for log in logs), "the rehearsal missed a kernel or a key"


def test_a_checkpoint_carries_the_choices(tmp_path: Path) -> None:
    """A resume on a machine that would choose otherwise."""
    assert compare(tmp_path, "--repeats", "1", "--kill-after", "4") == 0
    straight = tmp_path / "run_1"
    (known,) = (tmp_path / "machine" / "megatron_fp4" / "autotuning").iterdir()
    record = json.loads(known.read_text())
    importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    autotuners = live_autotuners()
    others = {
        (name, key): next(c.all_kwargs() for c in autotuners[name].configs if c.all_kwargs() != chosen)
        for (name, key), chosen in choices_in(record).items()
    }
    known.write_text(json.dumps(record_of(record["environment"], others)))

    checkpoint = straight / "checkpoints" / "step_00000003"
    overrides = [*compare_repeats.with_defaults(SMALL), f"checkpoint.resume={checkpoint}"]
    resumed = compare_repeats.Program(overrides, 1, tmp_path, TIMEOUT).straight("resumed")
    records = [record for record in read_metrics(straight / "metrics.jsonl") if record["kind"] == "step"]
    assert resumed.steps == {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["step"] > 3}
    assert resumed.tensors == compare_repeats.tensor_digests(straight / "checkpoints" / "step_00000008")
    assert choices_in(record_in(tmp_path / "resumed")) == choices_in(record_in(straight))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tensor", [1, 2])
def test_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str], tensor: int) -> None:
    layout = [f"parallel.tensor={tensor}", "train.micro_batch_size=2"]
    code = compare(tmp_path, "--nproc", "2", *layout, "--repeats", "2", "--kill-after", "4")
    output, errors = capfd.readouterr()
    assert code == 0, output + errors
