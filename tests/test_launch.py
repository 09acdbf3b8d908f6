"""The launcher: signals reach the workers, it ends with the run's exit code, and it reports only crashes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_fp4 import launch
from tests.programs import ROOT

# A worker without torch: prints that it listens, waits for a signal and ends as a stopped run, but not before the other
# one has its signal: torchrun sends TERM after the first end, and of two that wait, the later may be handled first.
_WORKER = """
import os, time
from megatron_fp4.runtime.signals import StopRequest
stop = StopRequest().listen()
os.write(1, b"listening\\n")  # in one write, since two workers share the pipe
while not stop.said:  # until its thread has printed its line; the last step of a run is long enough
    time.sleep(0.01)
open("told" + os.environ["RANK"], "w").close()
while not (os.path.exists("told0") and os.path.exists("told1")):
    time.sleep(0.01)
os.write(1, f"saved on {stop.received.name}\\n".encode())
os._exit(75)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found in /proc")
def test_a_signal_reaches_the_workers_and_their_exit_code_comes_back(tmp_path: Path) -> None:
    """The signal is USR1, which would kill torchrun. Only the workers print anything."""
    (tmp_path / "worker.py").write_text(_WORKER)
    command = [sys.executable, "-m", "megatron_fp4.launch", "--standalone", "--nproc-per-node", "2", "worker.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["listening\n"] * 2
    process.send_signal(signal.SIGUSR1)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 75
    assert output == "saved on SIGUSR1\n" * 2
    assert errors == "pretrain.py: SIGUSR1: stopping after this step; another signal leaves at once\n"


def test_a_crash_is_reported_without_the_launchers_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch, "SIGNALS", ())  # no handlers in this process
    ends = {1: "Root Cause", 2: "", 75: ""}  # after codes 2 and 75 the run has printed a line itself
    for code, reported in ends.items():
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
        monkeypatch.setattr(torchrun, "run", MagicMock(side_effect=ChildFailedError("pretrain.py", {0: failure})))
        assert launch.main(["--standalone", "pretrain.py", "train.steps=3"]) == code
        errors = capsys.readouterr().err
        assert reported in errors and bool(errors) == bool(reported) and "Traceback" not in errors
    (options,) = torchrun.run.call_args.args
    assert options.training_script == "pretrain.py" and options.training_script_args == ["train.steps=3"]


@pytest.mark.parametrize(
    ("failed", "handed_on", "code"),
    [
        ({0: -15, 1: 75}, set(), 75),  # torchrun sends TERM to the remaining worker
        ({0: 1, 1: -15}, set(), 1),
        ({0: -2, 1: -2}, {2}, 130),  # workers that did not listen yet
        ({0: -2, 1: -2}, set(), 1),
        ({0: 130, 1: 75}, {2}, 130),
        ({0: 1, 1: 5}, set(), 5),  # rank 1 hung, and rank 0 failed because it waited
    ],
)
def test_the_launchers_exit_code(failed: dict[int, int], handed_on: set[int], code: int, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_handed_on", handed_on)
    assert launch.exit_code(failed) == code
