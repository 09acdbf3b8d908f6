"""state.json: what a restart reads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.verify import RecheckError
from megatron_fp4.runtime.ending import code_for_launcher
from megatron_fp4.runtime.exit_codes import DivergedError, ExitCode, WrongNumbersError, exit_code_of
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_lock import sole_run
from megatron_fp4.runtime.run_state import RunState, note_refusal, write_state
from megatron_fp4.training.nonfinite_guard import NonFiniteError
from tests.runtime.test_run_lock import holder
from tests.test_slurm import decide


def state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "state.json").read_text())


def test_exit_codes_are_as_documented() -> None:
    documented = {"finished": 0, "crashed": 1, "refused": 2, "diverged": 3, "wrong_numbers": 4, "stopped": 75}
    assert {code.state: int(code) for code in ExitCode} == documented
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name, code in documented.items():
        assert f"| {code} | `{name}` |" in page, name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(""), 2),
        (NonFiniteError(""), 3),
        (DivergedError(""), 3),
        (RecheckError(""), 4),
        (WrongNumbersError(""), 4),
        (RuntimeError(""), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_errors_have_their_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_torchrun_does_not_restart_what_was_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_for_launcher(ExitCode.STOPPED) == 75
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert code_for_launcher(ExitCode.STOPPED) == 0
    assert code_for_launcher(ExitCode.REFUSED) == 2 and code_for_launcher(ExitCode.FINISHED) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert code_for_launcher(ExitCode.STOPPED) == 75


def test_a_start_is_running_until_it_ends(mesh: ParallelMesh, tmp_path: Path) -> None:
    progress = Progress()
    with RunState(tmp_path, True, progress) as run_state:
        assert state(tmp_path)["state"] == "running" and state(tmp_path)["pid"] == os.getpid()
        assert run_state.ended(ExitCode.STOPPED, 7, "the file STOP") == 75
    assert state(tmp_path)["state"] == "stopped" and state(tmp_path)["step"] == 7
    progress.at(12, "update")
    with pytest.raises(NonFiniteError), RunState(tmp_path, True, progress):
        raise NonFiniteError("ten in a row")
    written = state(tmp_path)
    assert (written["state"], written["step"], written["reason"]) == ("diverged", 12, "NonFiniteError: ten in a row")
    with RunState(tmp_path, False, progress):
        assert state(tmp_path) == written


@pytest.mark.slow
def test_a_refused_start_says_nothing_about_a_run_that_lives(mesh: ParallelMesh, tmp_path: Path) -> None:
    note_refusal(tmp_path / "nowhere", "no folder")
    assert not (tmp_path / "nowhere").exists()
    with holder(tmp_path, 60):
        note_refusal(tmp_path, "train.stepz")
        assert not (tmp_path / "state.json").exists()
    note_refusal(tmp_path, "train.stepz")
    assert (state(tmp_path)["state"], state(tmp_path)["reason"]) == ("refused", "train.stepz")
    with sole_run(tmp_path):  # the lock is free again
        pass


def test_the_slurm_script_reads_what_is_written(tmp_path: Path) -> None:
    decide(tmp_path, "begin")
    write_state(tmp_path, "stopped", 3, "the file STOP")
    requeued, why = decide(tmp_path, "end", "0")
    assert not requeued and "the file STOP" in why
    write_state(tmp_path, "diverged", 3, 'NonFiniteError: 10 steps "in a row"')
    requeued, why = decide(tmp_path, "end", "0")
    assert not requeued and "diverged" in why and "in a row" in why


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_state(tmp_path / "gone", "running", 0, "")
    assert "could not write" in caplog.text


def test_shell_is_sound() -> None:
    for script in sorted((Path(__file__).parents[2] / "scripts" / "slurm").iterdir()):
        subprocess.run(["bash", "-n", script], check=True)
