"""Exit codes; and what all ranks found is printed by one of them, before any leaves with a failure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision.verify import RecheckError
from megatron_fp4.runtime.errors import ExitCode, WrongNumbersError, code_for_launcher, exit_code_of
from megatron_fp4.runtime.run_state import explain
from megatron_fp4.training.callbacks.bad_steps import NonFiniteError
from tests.programs import fork_server

LINE = "pretrain.py: train.stepz is not a key; did you mean train.steps?"
REFUSAL = ConfigError(LINE.removeprefix("pretrain.py: "))


def test_errors_have_their_codes() -> None:
    errors = [ConfigError(""), NonFiniteError(""), RecheckError(""), WrongNumbersError(""), KeyboardInterrupt()]
    assert [int(exit_code_of(error)) for error in errors] == [2, 3, 4, 4, 1]


def test_torchrun_does_not_restart_what_was_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_for_launcher(ExitCode.STOPPED) == 75
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert code_for_launcher(ExitCode.STOPPED) == 0
    assert code_for_launcher(ExitCode.REFUSED) == 2 and code_for_launcher(ExitCode.FINISHED) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert code_for_launcher(ExitCode.STOPPED) == 75


def refused_rank(folder: Path, rank: int, ranks: int, delay: float) -> None:
    """A worker of torchrun that refuses, after `delay` seconds; leaves with its exit code."""
    os.environ |= {
        "TORCHELASTIC_ERROR_FILE": str(folder / "attempt_0" / str(rank) / "error.json"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    time.sleep(delay)
    (folder / f"came_{rank}").touch()
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = explain(REFUSAL, None, lambda: any(folder.glob("left_*")))  # as torchrun ends them
    came = len(list(folder.glob("came_*")))
    (folder / f"left_{rank}").write_text(json.dumps([stderr.getvalue(), came]))
    os._exit(code)


@pytest.mark.parametrize("delays", [(0.0, 0.5, 0.6), (0.5, 0.0, 0.0)])
def test_the_first_rank_says_it_once_the_others_have_come(delays: tuple[float, ...], tmp_path: Path) -> None:
    """The others leave without a failure, so that torchrun's report names the one that said it."""
    ranks = range(len(delays))
    for rank in ranks:
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    context = fork_server()  # not by fork: a process of pytest has threads, whose locks a fork may find taken
    processes = [context.Process(target=refused_rank, args=(tmp_path, rank, 3, delays[rank])) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(process.exitcode or 0 for process in processes) == [0, 0, 2]
    (who,) = [rank for rank in ranks if processes[rank].exitcode == 2]
    assert delays[who] == 0 and [json.loads(path.read_text()) for path in tmp_path.glob("left_*")] == [[LINE + "\n", 3]]
    report = json.loads((tmp_path / "attempt_0" / str(who) / "error.json").read_text())
    assert report["message"]["extraInfo"]["py_callstack"] == LINE


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, True),
        ({"RANK": "nonsense"}, True),
    ],
)
def test_without_torchrun(
    environment: dict[str, str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert explain(REFUSAL, None) is ExitCode.REFUSED
    assert capsys.readouterr().err == (LINE + "\n" if says else "")
