"""Exit codes; an error that all ranks have is printed by one of them, before any rank ends with a failure; and commands
whose output is closed by its reader, such as `| head -1`, clean up and print no error."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime import errors
from megatron_fp4.runtime.errors import ExitCode, code_for_launcher, exit_code_of, of_torchrun
from megatron_fp4.runtime.run_state import report_ending
from megatron_fp4.runtime.signals import NO_SIGNALS
from tests.programs import ROOT, fork_server

LINE = "pretrain.py: train.stepz is not a key; did you mean train.steps?"
REFUSAL = ConfigError(LINE.removeprefix("pretrain.py: "))


def test_errors_have_their_codes() -> None:
    wrong = [SelfTestError(""), errors.WrongNumbersError("")]
    raised = [ConfigError(""), errors.DivergedError(""), *wrong, KeyboardInterrupt()]
    assert [int(exit_code_of(error)) for error in raised] == [2, 3, 4, 4, 1]


def test_torchrun_does_not_restart_a_run_that_was_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_for_launcher(ExitCode.STOPPED) == 75
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert code_for_launcher(ExitCode.STOPPED) == 0
    assert code_for_launcher(ExitCode.REFUSED) == 2 and code_for_launcher(ExitCode.FINISHED) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert code_for_launcher(ExitCode.STOPPED) == 75


def test_a_stop_under_torchrun_names_the_launcher_that_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_torchrun(ExitCode.STOPPED) is None  # started with python
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "0")
    told = of_torchrun(ExitCode.STOPPED)
    assert told is not None and "`python -m megatron_fp4.launch` in its place ends with 75" in told
    assert of_torchrun(ExitCode.FINISHED) is None and of_torchrun(ExitCode.REFUSED) is None
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", NO_SIGNALS)
    assert of_torchrun(ExitCode.STOPPED) is None  # launch.py itself
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert of_torchrun(ExitCode.STOPPED) is None


def refused_rank(folder: Path, rank: int, delay: float, patience: float) -> None:
    """A worker of torchrun that refuses after `delay` seconds. patience: how long it waits for the first rank."""
    os.environ |= {
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error_{rank}.json"),
        "WORLD_SIZE": "3",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    errors._END = patience
    time.sleep(delay)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = report_ending(REFUSAL, None, lambda: any(folder.glob("left_*")))  # then torchrun ends the others
    (folder / f"left_{rank}").write_text(stderr.getvalue())
    os._exit(code)


@pytest.mark.parametrize(
    ("delays", "patience", "who"),
    [({0: 0.0, 1: 0.5, 2: 0.6}, 200.0, 0), ({0: 0.5, 1: 0.0, 2: 0.0}, 200.0, 0), ({1: 0.0}, 0.1, 1)],
)
def test_the_first_rank_reports_an_error_or_the_only_rank_that_has_it(
    delays: dict[int, float], patience: float, who: int, tmp_path: Path
) -> None:
    """The others end without a failure, so that torchrun's report names the rank that reported the error."""
    context = fork_server()  # not by fork: threads of pytest's process may hold locks
    processes = {
        rank: context.Process(target=refused_rank, args=(tmp_path, rank, delay, patience))
        for rank, delay in delays.items()
    }
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join(300)
    assert {rank: process.exitcode for rank, process in processes.items()} == {**dict.fromkeys(delays, 0), who: 2}
    assert [(path.name, path.read_text()) for path in tmp_path.glob("left_*")] == [(f"left_{who}", LINE + "\n")]
    (path,) = tmp_path.glob("error_*")
    assert json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == LINE and path.stem == f"error_{who}"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, True),
        ({"RANK": "nonsense"}, True),
    ],
)
def test_who_reports_an_error_without_torchrun(environment: dict[str, str], says: bool, monkeypatch, capsys) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert report_ending(REFUSAL, None) is ExitCode.REFUSED
    assert capsys.readouterr().err == (LINE + "\n" if says else "")


PROGRAM = """
import sys
from megatron_fp4.runtime.closed_pipe import end_without_reader

end_without_reader()
try:
    print({printed})
except OSError:
    print("caught by those who expect files to fail", file=sys.stderr)
finally:
    print("cleaned up", file=sys.stderr)
sys.exit(3)
"""


def into_closed_pipe(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a Python program whose output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **environment},
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_a_program_without_a_reader_ends_when_it_prints() -> None:
    """If the output is flushed only at its end, it keeps its own exit code. With a reader, all output arrives."""
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x' * 100_000")) == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'"), PYTHONUNBUFFERED="1") == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'")) == (3, "cleaned up\n")
    program = PROGRAM.format(printed="'é' * 100_000, end='.'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (read.returncode, read.stdout.decode()) == (3, "é" * 100_000 + ".")


def test_every_script_ends_without_a_reader() -> None:
    scripts = list((ROOT / "scripts").glob("[a-z]*.py"))
    begins = 'if __name__ == "__main__":\n    import _command  # noqa: F401\n'
    assert scripts and [path.name for path in scripts if begins not in path.read_text()] == []
