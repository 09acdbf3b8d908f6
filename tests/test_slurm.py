"""scripts/slurm: which job goes back into the queue, with stand-ins for Slurm's commands and for torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUEUE = ROOT / "scripts" / "slurm" / "requeue.sh"


def decide(run_dir: Path, *arguments: str) -> tuple[bool, str]:
    done = subprocess.run([REQUEUE, run_dir, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.returncode == 0, done.stdout


def write_state(run_dir: Path, state: str, reason: str = "") -> None:
    """As megatron_fp4/faults/run_state.py lays it out; test_run_state.py reads one of its own by requeue.sh."""
    record = {"state": state, "step": 7, "reason": reason, "pid": 1}
    (run_dir / "state.json").write_text(json.dumps(record, indent=1) + "\n")


def checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("state", "reason", "stopping", "expected"),
    [
        ("finished", "", "0", False),
        ("finished", "", "1", False),
        ("refused", "ConfigError: run.dir", "0", False),
        ("diverged", "", "0", False),
        ("wrong_numbers", "", "1", False),
        ("stopped", "SIGUSR1", "1", True),
        ("stopped", "run.max_minutes=230", "0", True),
        ("stopped", "the file STOP", "0", False),
        ("crashed", 'RuntimeError: "quoted"', "0", True),
        ("running", "", "0", True),  # killed
        ("running", "", "1", True),
    ],
)
def test_states(tmp_path: Path, state: str, reason: str, stopping: str, expected: bool) -> None:
    assert decide(tmp_path / "run", "begin") == (True, "")
    write_state(tmp_path / "run", state, reason)
    requeued, why = decide(tmp_path / "run", "end", stopping)
    assert requeued == expected and why.strip()


def test_the_state_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    write_state(tmp_path, "finished")
    os.utime(tmp_path / "state.json", (1, 1))
    decide(tmp_path, "begin")
    requeued, why = decide(tmp_path, "end", "0")
    assert requeued and "before it held run.dir" in why


def test_crashes_go_on_while_there_is_progress(tmp_path: Path) -> None:
    """Three times in a row without a newer checkpoint are forgiven, and a newer one starts the count anew."""

    def crash(new_step: int | None = None) -> bool:
        decide(tmp_path, "begin")
        write_state(tmp_path, "crashed")
        if new_step is not None:
            checkpoint(tmp_path, new_step)
        return decide(tmp_path, "end", "0")[0]

    assert [crash(), crash(), crash(8), crash(), crash(), crash(), crash()] == [True] * 6 + [False]
    assert [crash(9), crash(100)] == [True, True]
    # What is no whole checkpoint is no progress.
    (tmp_path / "checkpoints" / "step_00000900.tmp").mkdir()
    (tmp_path / "checkpoints" / "step_00000901").mkdir()
    assert [crash(), crash(), crash(), crash()] == [True, True, True, False]


STAND_INS = {
    # Runs the command on this "node" and leaves its process id for scancel.
    "srun": 'while [[ "$1" == --* ]]; do shift; done\n"$@" &\necho $! >"$FAKE/step"\nwait $!\n'
    "while kill -0 $! 2>/dev/null; do wait $!; done\nwait $!\n",
    "scancel": 'echo "scancel $*" >>"$FAKE/calls"\nkill -USR1 "$(cat "$FAKE/step")"\n',
    "scontrol": 'case "$1" in hostnames) ;; show) [ "$2" = hostnames ] && echo localhost || cat "$FAKE/job" ;;\n'
    '*) echo "scontrol $*" >>"$FAKE/calls" ;; esac\n',
    # A launcher that takes a second to start its worker, and fails when its worker does, as torchrun.
    "torchrun": 'sleep "${SLOW:-0}"\nworker "$RUN" pretrain.py &\nwait $! && exit 0 || exit 1\n',
    "worker": 'stopped=\'{\n "state": "stopped",\n "reason": "SIGUSR1"\n}\'\n'
    'trap \'echo "$stopped" >"$1/state.json"; exit 75\' USR1\n'
    'touch "$FAKE/running"\n[ "${CRASH:-0}" = 1 ] && exit 1\nfor _ in $(seq 600); do sleep 0.1; done\n',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with a Slurm of one node."""
    fake = tmp_path / "slurm"
    fake.mkdir()
    for name, script in STAND_INS.items():
        (fake / name).write_text(f"#!/usr/bin/env bash\n{script}")
        (fake / name).chmod(0o755)
    (fake / "job").write_text("JobState=RUNNING\n")
    return {
        **os.environ,
        "PATH": f"{fake}:{os.environ['PATH']}",
        "FAKE": str(fake),
        "RUN": str(tmp_path / "run"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
    }


def submit(environment: dict[str, str]) -> subprocess.Popen[str]:
    script = [ROOT / "scripts" / "slurm" / "pretrain.sbatch", f"run.dir={environment['RUN']}"]
    return subprocess.Popen(
        ["bash", *script], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(path: Path, job: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "starting"])
def test_a_signal_to_the_job_stops_and_requeues_it(cluster: dict[str, str], when: str) -> None:
    """Also while torchrun has no workers yet."""
    fake = Path(cluster["FAKE"])
    job = submit({**cluster, "SLOW": "3" if when == "starting" else "0"})
    wait_for(fake / ("running" if when == "training" else "step"), job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    calls = (fake / "calls").read_text().splitlines()
    assert "scancel --signal=USR1 17.0" in calls and calls[-1] == "scontrol requeue 17", output
    assert "stopped on request" in output and job.returncode == 1


@pytest.mark.slow
def test_a_crash_is_requeued_and_a_cancelled_job_is_not(cluster: dict[str, str]) -> None:
    fake = Path(cluster["FAKE"])
    output, _ = submit({**cluster, "CRASH": "1"}).communicate(timeout=60)
    assert (fake / "calls").read_text() == "scontrol requeue 17\n", output
    (fake / "calls").unlink()
    (fake / "job").write_text("JobState=CANCELLED by 0\n")
    output, _ = submit({**cluster, "CRASH": "1"}).communicate(timeout=60)
    assert not (fake / "calls").exists() and "cancelled" in output


def test_run_dir_has_to_be_given(cluster: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch"],
        env=cluster,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "run.dir" in done.stderr
