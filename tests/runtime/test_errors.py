"""Exit codes; and what all ranks found is printed by one of them, before any leaves with a failure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import time
from pathlib import Path

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision.verify import RecheckError
from megatron_fp4.runtime import errors
from megatron_fp4.runtime.errors import DivergedError, ExitCode, WrongNumbersError, code_for_launcher, exit_code_of
from megatron_fp4.runtime.run_state import explain
from megatron_fp4.training.callbacks.bad_steps import NonFiniteError
from tests.programs import fork_server

LINE = "pretrain.py: train.stepz is not a key; did you mean train.steps?"


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


def refused_rank(folder: Path, rank: int, ranks: int, delay: float, asked_to_end: bool) -> None:
    """A worker of torchrun that refuses, after `delay` seconds; leaves with its exit code."""
    os.environ |= {
        "TORCHELASTIC_ERROR_FILE": str(folder / "attempt_0" / str(rank) / "error.json"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    time.sleep(delay)
    stderr = io.StringIO()
    began = time.time()
    with contextlib.redirect_stderr(stderr):
        code = explain(refusal(), None, lambda: asked_to_end)
    record = {"said": stderr.getvalue(), "began": began, "left": time.time()}
    (folder / f"{rank}.json").write_text(json.dumps(record))
    os._exit(code)


def refusal() -> Exception:
    return ConfigError(LINE.removeprefix("pretrain.py: "))


def start(folder: Path, ranks: int, delays: list[float], asked_to_end: bool) -> list[int]:
    """The exit codes of ranks that torchrun started here."""
    for rank in range(ranks):
        (folder / "attempt_0" / str(rank)).mkdir(parents=True)
    # Not by fork: a process of pytest has threads, whose locks a fork may find taken.
    context = fork_server()
    processes = [
        context.Process(target=refused_rank, args=(folder, rank, ranks, delays[rank], asked_to_end))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert all(process.exitcode is not None for process in processes), "a rank stands still"
    return [process.exitcode or 0 for process in processes]


@pytest.mark.parametrize("attempt", range(6))
def test_four_ranks_say_it_once(attempt: int, tmp_path: Path) -> None:
    delays = [random.Random(4 * attempt + rank).uniform(0, 0.05) for rank in range(4)]
    codes = start(tmp_path, 4, delays, asked_to_end=True)
    # Who did not say it was asked to end and did: torchrun's report then names the one that did.
    assert sorted(codes) == [0, 0, 0, 2]
    (who,) = [rank for rank, code in enumerate(codes) if code == 2]
    assert json.loads((tmp_path / f"{who}.json").read_text())["said"] == LINE + "\n"
    report = json.loads((tmp_path / "attempt_0" / str(who) / "error.json").read_text())
    assert report["message"]["extraInfo"]["py_callstack"] == LINE


def test_the_one_who_says_it_waits_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_END", 0.2)  # nobody asks them to end
    assert start(tmp_path, 3, [0.0, 0.6, 0.6], asked_to_end=False) == [2, 2, 2]
    records = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [record["said"] for record in records] == [LINE + "\n", "", ""]
    assert records[0]["left"] >= max(record["began"] for record in records[1:])


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, True),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, False),
        ({"RANK": "nonsense"}, True),
        ({"RANK": "3", "WORLD_SIZE": "2"}, True),
    ],
)
def test_without_torchrun(
    environment: dict[str, str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert explain(refusal(), None) is ExitCode.REFUSED
    assert capsys.readouterr().err == (LINE + "\n" if says else "")


def test_of_several_machines_one_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the store that torchrun shares with its workers; without it, each machine says it."""
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    several = {
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    said = []
    for machine in ("first", "second"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / machine / "0" / "error.json"))
        (tmp_path / machine / "0").mkdir(parents=True)
        said.append(errors.report_error_once(LINE, lambda: False))
    assert said == [True, False] and capsys.readouterr().err == LINE + "\n"
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(errors, "_STORE_TIMEOUT", errors.datetime.timedelta(seconds=0.2))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "third" / "0" / "error.json"))
    (tmp_path / "third" / "0").mkdir(parents=True)
    assert errors.report_error_once(LINE, lambda: False) and capsys.readouterr().err == LINE + "\n"
