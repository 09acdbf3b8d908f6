"""How whole runs end, and with which exit code: on request, and by faults of their processes."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import pretrain
from data.indexed import write_dataset
from megatron_fp4.runtime import signals
from megatron_fp4.runtime.run_state import read_state as state
from megatron_fp4.training.callbacks import validation
from megatron_fp4.training.trainer import Trainer
from tests.hangs import Hang
from tests.programs import Program, environments_of_ranks, run_program, wait_until
from tests.test_pretrain import ROOT, losses, records, small, start

__all__ = ["small"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

LONG = ["train.steps=1000", "checkpoint.interval=0", "validation.interval=0", "data.num_workers=1"]


def two_ranks(run_dir: Path, overrides: list[str], *more: str) -> list[Program]:
    """Two ranks of a run that has trained a step."""
    command = [ROOT / "pretrain.py", *overrides, *LONG, *more, f"run.dir={run_dir}"]
    programs = [Program(command, environment) for environment in environments_of_ranks(2)]
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"kind": "step"' in metrics.read_text(), "no step", programs[0])
    return programs


def test_a_stopped_rank_is_reported(small: list[str], tmp_path: Path) -> None:
    # Ranks may also wait in a save in the background, so there is one every second step.
    more = ("parallel.timeout_seconds=6", "checkpoint.interval=2", "data.num_workers=0")
    first, second = two_ranks(tmp_path / "run", small, *more)
    os.kill(second.pid, signal.SIGSTOP)
    output, _ = first.communicate(timeout=240)
    second.send_signal(signal.SIGKILL)
    assert first.returncode == 1 and state(tmp_path / "run")["state"] == "crashed"
    at_half_the_timeout, _, at_the_end = output.partition("Traceback")
    assert "rank 0 has been in step" in at_half_the_timeout and "collectives fail after 6 s" in at_half_the_timeout
    named = f"rank 1 (process {second.pid} on "
    advice = f"its process is stopped (`kill -CONT {second.pid}` resumes it)"
    for text in (at_half_the_timeout, at_the_end):
        assert named in text and advice in text and "waiting: rank 0 in step" in text
    assert "Timed out waiting" in at_the_end
    assert "accumulate" in (tmp_path / "run" / "ranks" / "rank_00000.stack").read_text()


def test_an_exception_on_one_rank_ends_all_and_is_reported_by_all(small: list[str], tmp_path: Path) -> None:
    """Here a rank's loader worker is killed."""
    first, second = two_ranks(tmp_path / "run", small)
    tasks = Path(f"/proc/{second.pid}/task").glob("*/children")
    (worker,) = [int(child) for task in tasks for child in task.read_text().split()]
    os.kill(worker, signal.SIGKILL)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 1 and f"worker 0 (process {worker}) is dead: killed by signal 9" in output
    output, _ = first.communicate(timeout=240)
    assert first.returncode == 1 and "LoaderError" in output  # the cause, on the other rank
    assert state(tmp_path / "run")["state"] == "crashed"


def test_a_signal_during_the_start_is_obeyed(small: list[str], tmp_path: Path) -> None:
    """A signal may come in the seconds that importing torch takes."""
    process = start(1, [*small, f"run.dir={tmp_path / 'run'}"])
    status = Path(f"/proc/{process.pid}/status")

    def listens() -> bool:
        (caught,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
        return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)

    wait_until(listens, "no handler", process)
    assert not (tmp_path / "run").exists()
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75 and "stopped after step 0 of 8 on SIGUSR1" in output
    assert state(tmp_path / "run")["state"] == "stopped" and not losses(tmp_path / "run")
    assert not saved(tmp_path / "run")


# pretrain.py with a failing self-test and a process group that hangs when it ends.
_PROGRAM = """
import sys, time
import pretrain
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime import errors
from megatron_fp4.runtime.signals import StopRequest

def wrong(*_):
    raise SelfTestError("fprop is off by one")

errors.GROUP_SECONDS = 0.2
errors.leave_distributed = lambda: time.sleep(3600)
pretrain.SelfTest.start = wrong
errors.run_program(lambda: pretrain.main(sys.argv[1:], StopRequest().listen()))
"""


def test_a_run_ends_though_its_process_group_hangs(small: list[str], tmp_path: Path) -> None:
    """The run has the exit code and state of its error, and prints no traceback."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = run_program([tmp_path / "program.py", *small, f"run.dir={tmp_path / 'run'}"], timeout=240)
    assert done.returncode == 4 and state(tmp_path / "run")["state"] == "wrong_numbers", done.stderr
    assert "pretrain.py: fprop is off by one\n" in done.stderr and "Traceback" not in done.stderr
    assert "the process group did not end within 0 s; ending without it" in done.stderr


@pytest.mark.parametrize(
    "hang",
    [
        Hang("load", "read", ranks=2, victim=1),
        Hang("background save", "fsync", ranks=2, victim=1),
        Hang("process of an export", "stop"),
    ],
    ids=str,
)
def test_a_disk_that_hangs_ends_the_run(tmp_path: Path, hang: Hang) -> None:
    """With the exit code 5 and a line that names section, rank and function. (`python -m tests.soak --hangs` has every
    section.)"""
    result = hang.run(tmp_path)
    assert result.code == 5, result.output
    assert result.problems() == []


@pytest.fixture
def here(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs pretrain.py in this process; returns the exit code."""
    monkeypatch.setattr(signals, "LOOK_EVERY", 0.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*overrides: str) -> int:
        code = pretrain.main([*small, f"run.dir={tmp_path}", "checkpoint.interval=0", "data.num_workers=1", *overrides])
        assert not dist.is_initialized()
        return code

    return run


def before(monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[], object]) -> None:
    """Do `action` before the first call of `name`, a method of the trainer or `evaluate` of the validation."""
    owner: Any = validation if name == "evaluate" else Trainer
    original, done = getattr(owner, name), []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(action())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replaced)


def test_a_token_id_outside_the_vocabulary_ends_the_run_with_one_line(here, tmp_path: Path, capfd) -> None:
    """The ids lie where the sample at the start does not see them; a worker finds them."""
    tokens = np.full(100_000, 5)
    tokens[5000:6000] = 512
    write_dataset(tmp_path / "web", [tokens], np.uint16)
    data = ["data=indexed", f"data.sources={{web: {tmp_path}/web}}", "data.phases=[{name: all, blend: {web: 1}}]"]
    code = here(*data, "model.vocab_size=512", "train.steps=200", "validation.interval=0")
    [line] = [line for line in capfd.readouterr().err.splitlines() if "vocabulary" in line or "Traceback" in line]
    expected = f"source 'web' ({tmp_path}/web) has the token id 512, outside the model's vocabulary of 512: it was made"
    assert code == 2 and expected in line and state(tmp_path)["state"] == "refused"


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def test_files_and_max_minutes_stop_and_save(here: Callable[..., int], tmp_path: Path, monkeypatch) -> None:
    """A run that is stopped by a STOP file and by a limit of minutes has the losses of an undisturbed run."""
    (tmp_path / "STOP").touch()  # meant for an earlier run
    (tmp_path / "SAVE").touch()
    assert here("validation.interval=0", "train.steps=4", "run.dir=" + str(tmp_path / "straight")) == 0
    before(monkeypatch, "save", lambda: (tmp_path / "STOP").touch())
    assert here("validation.interval=0", "train.steps=4") == 75
    assert saved(tmp_path) == [1, 2] and state(tmp_path)["reason"] == "the file STOP"
    assert not (tmp_path / "STOP").exists() and not (tmp_path / "SAVE").exists()
    assert here("validation.interval=0", "train.steps=4", "run.max_minutes=0.0001") == 75
    assert state(tmp_path)["reason"] == "run.max_minutes=0.0001"
    assert here("validation.interval=0", "train.steps=4") == 0
    assert losses(tmp_path) == losses(tmp_path / "straight")


def test_a_signal_during_evaluation(here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation and the save are finished; the run stops after the next step, with a checkpoint."""
    before(monkeypatch, "evaluate", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert here("validation.interval=2", "checkpoint.interval=2") == 75
    assert saved(tmp_path) == [2, 3] and len(losses(tmp_path)) == 3
    assert [record["step"] for record in records(tmp_path, "validation")] == [2]
    (event,) = records(tmp_path, "stop")
    assert event["step"] == 3 and "SIGTERM" in event["signal"]
