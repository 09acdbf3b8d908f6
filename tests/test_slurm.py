"""scripts/slurm: which jobs are requeued, with stand-ins for Slurm's commands and for torchrun."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.runtime.run_state import write_state
from tests.programs import ROOT

REQUEUE, LAUNCH_NODE = ROOT / "scripts" / "slurm" / "requeue.sh", ROOT / "scripts" / "launch_node.sh"
SBATCH = ROOT / "scripts" / "slurm" / "pretrain.sbatch"


def decide(run_dir: Path, *arguments: str, start: str = "17-0") -> tuple[bool, str]:
    environment = {**os.environ, "RUN_ID": start}
    done = subprocess.run([REQUEUE, run_dir, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.returncode == 0, done.stdout


def write(run_dir: Path, monkeypatch: pytest.MonkeyPatch, state: str, start: str = "17-0", **more: Any) -> None:
    """Write state.json as the start of that name does."""
    monkeypatch.setenv("RUN_ID", start)
    write_state(run_dir, state, 7, **{"reason": "", "checkpoint": 0, **more})


@pytest.mark.parametrize(
    ("state", "reason", "stopping", "expected"),
    [
        ("finished", "", "1", False),
        ("refused", "ConfigError: run.dir", "0", False),
        ("diverged", 'DivergedError: 10 steps "in a row"', "0", False),
        ("wrong_numbers", "", "1", False),
        ("stopped", "run.max_minutes=230", "0", True),
        ("stopped", "the file STOP", "0", False),
        ("crashed", 'RuntimeError: "quoted"', "0", True),
        ("running", "", "1", True),  # killed
        ("hung", "rank 3 on node7 hangs in step 7, save", "0", True),
    ],
)
def test_a_run_is_requeued_depending_on_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, stopping: str, expected: bool
) -> None:
    assert decide(tmp_path, "begin") == (True, "")
    write(tmp_path, monkeypatch, state, reason=reason)
    requeued, why = decide(tmp_path, "end", stopping)
    assert requeued == expected and why.strip() and (expected or reason.partition('"')[0] in why)


def test_crashed_runs_are_requeued_while_there_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are requeued after up to three crashes in a row without a newer checkpoint; a newer one starts the count
    again. The state of an earlier start is ignored. Clocks that run back do not matter."""
    starts, saves = itertools.count(), itertools.count(1)
    write(tmp_path, monkeypatch, "finished", start="none")

    def crash(new_step: int | None = None) -> bool:
        start = f"17-{next(starts)}"
        assert decide(tmp_path, "begin", start=start)[0]
        if new_step is not None:
            write(tmp_path, monkeypatch, "running", start, checkpoint=new_step, save_index=next(saves))
        for path, seconds in ((tmp_path / "state.json", 1), (tmp_path / ".slurm_start", 2)):
            os.utime(path, (seconds, seconds))
        requeued, why = decide(tmp_path, "end", "0", start=start)
        assert new_step is None or f"had saved step_{new_step:08d}" in why
        return requeued

    assert [crash(), crash(), crash(8), crash(), crash(), crash(), crash()] == [True] * 6 + [False]
    assert [crash(7), crash(), crash(), crash(), crash()] == [True, True, True, True, False]


def test_the_port_is_no_port_of_connections_and_changes_with_a_requeue() -> None:
    """32768 and above are the kernel's, unless an administrator has changed that."""
    (line,) = [line for line in SBATCH.read_text().splitlines() if line.startswith("MASTER_PORT=")]
    loop = "for SLURM_JOB_ID in $(seq 1000000 97 1019999); do unset MASTER_PORT"
    program = f"{loop}; {line}; echo $MASTER_PORT; done"
    first, again = (
        [int(port) for port in subprocess.check_output(["bash", "-uc", program], env={**os.environ, **more}).split()]
        for more in ({}, {"SLURM_RESTART_COUNT": "1"})
    )
    assert all(1024 < port < 32768 for port in (*first, *again))
    assert all(port != other for port, other in zip(first, again, strict=True))


STAND_INS = {
    "sleep": "exec /bin/sleep 0.1\n",
    # Runs the command here and writes its process id for scancel.
    "srun": 'call="srun $(printf "%s " "$@" | head -n 1)"\n'
    '[ "$1" = --help ] && echo "${PYXIS:-}" && exit\nwhile [[ "$1" == --* ]]; do shift; done\n'
    '"$@" &\necho $! >"$FAKE/step"\necho "$call" >>"$FAKE/calls"\n'
    "wait $!\nwhile kill -0 $! 2>/dev/null; do wait $!; done\nwait $!\n",
    # Signals every process of the step, as with ProctrackType=linuxproc.
    "scancel": 'echo "scancel $*" >>"$FAKE/calls"\ntell() {\n'
    '    for child in $(pgrep -P "$1"); do tell "$child"; done\n    kill -USR2 "$1"\n}\n'
    'tell "$(cat "$FAKE/step")"\n',
    "sbatch": 'echo "sbatch ${@: -1}" >>"$FAKE/calls"\n',
    "squeue": 'case "$*" in *%k*) cat "$FAKE/comment" ;; *) cat "$FAKE/left" ;; esac\n',
    "scontrol": 'case "$1" in hostnames) ;; show) [ "$2" = hostnames ] && echo localhost || cat "$FAKE/$2" ;;\n'
    '*) echo "scontrol $*" >>"$FAKE/calls" ;; esac\n',
}
# Stands for --check, prove_backend.py, the all-reduce, torchrun (which fails if its worker does), and its worker.
PYTHON = """\
import json, os, pathlib, signal, subprocess, sys, time
def note(text):
    with open(os.environ["FAKE"] + "/calls", "a") as calls:
        print(text, file=calls)
def stop(number, frame):
    note("the worker was asked")
    time.sleep(0.5)
    state = {"state": "stopped", "reason": "SIGUSR1", "start": os.environ["RUN_ID"]}
    pathlib.Path(os.environ["RUN"], "state.json").write_text(json.dumps(state, indent=1))
    os._exit(75)
if "--check" in sys.argv:
    required = ", required" if "checkpoint.resume=required" in sys.argv else ""
    note(f"check of {os.environ['WORLD_SIZE']} ranks{required}{os.environ.get('WANDB_API_KEY', '')}")
    sys.exit(int(os.environ.get("REFUSED", 0)))
if "prove_backend.py" in sys.argv[1]:
    note("prove_backend.py")
    sys.exit(int(os.environ.get("UNFIT", 0)))
if "--no-python" in sys.argv:
    note(f"all-reduce of {os.environ['SLURM_GPUS_ON_NODE']}, by {os.environ['NCCL_SOCKET_IFNAME']}")
    sys.exit(0)
if "torch.distributed.run" in sys.argv:
    time.sleep(float(os.environ.get("SLOW", 0)))
    sys.exit(1 if subprocess.call([sys.argv[0], "worker"]) else 0)
signal.signal(signal.SIGUSR1, stop)
pathlib.Path(os.environ["FAKE"], "running").touch()
time.sleep(0 if "CRASH" in os.environ else 600)
sys.exit(1)
"""


class Cluster:
    """An imitated Slurm of one node. environment: of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.fake, self.run_dir = folder / "slurm", folder / "run"
        self.fake.mkdir()
        scripts = {name: f"#!/usr/bin/env bash\n{script}" for name, script in STAND_INS.items()}
        for name, script in {**scripts, "python": f"#!{sys.executable} -IS\n{PYTHON}"}.items():
            (self.fake / name).write_text(script)
            (self.fake / name).chmod(0o755)
        self.job(state="RUNNING")
        (self.fake / "node").write_text("   CfgTRES=cpu=144,mem=900G,gres/gpu=4\n")
        (self.fake / "comment").write_text("(null)\n")
        self.environment = {
            **os.environ,
            "PATH": f"{self.fake}:{os.environ['PATH']}",
            "FAKE": str(self.fake),
            "RUN": str(self.run_dir),
            "PYTHON": str(self.fake / "python"),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "1",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURMD_NODENAME": "localhost",
            "PREFLIGHT": "0",
        }

    def job(self, state: str, left: str = "3:55:00", more: str = "") -> None:
        (self.fake / "job").write_text(f"   JobState={state} Reason=None\n{more}")
        (self.fake / "left").write_text(f"{left}\n")

    def submit(self, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        (self.fake / "calls").unlink(missing_ok=True)
        command = ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch", f"run.dir={self.run_dir}", *overrides]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env={**self.environment, **environment}, cwd=ROOT, text=True, **pipes)

    def run(self, *overrides: str, **environment: str) -> str:
        """Run a job; returns what it prints."""
        return self.submit(*overrides, **environment).communicate(timeout=300)[0]

    def calls(self, steps: bool = False) -> list[str]:
        """The calls of Slurm and Python except job steps; with `steps`, only the job steps."""
        lines = (self.fake / "calls").read_text().splitlines() if (self.fake / "calls").exists() else []
        return [line for line in lines if line.startswith("srun ") == steps]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "number"), [("0", signal.SIGTERM), ("1", signal.SIGUSR1)])
def test_a_signal_to_the_job_stops_and_requeues_it(cluster: Cluster, slow: str, number: signal.Signals) -> None:
    """The worker is asked exactly once, even if torchrun has no workers yet (`slow`), and though every process of the
    step gets the signal."""
    job = cluster.submit(SLOW=slow)
    while len(cluster.calls(steps=True)) < 2 or (slow == "0" and not (cluster.fake / "running").exists()):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    job.send_signal(number)
    output, _ = job.communicate(timeout=300)
    asked = ["scancel --signal=USR2 17.1", "the worker was asked", "scontrol requeue 17"]
    assert cluster.calls() == ["check of 1 ranks", *asked], output
    assert "stopped on request" in output and job.returncode == 75


def test_a_crash_is_requeued_and_a_cancelled_job_is_not(cluster: Cluster) -> None:
    """Slurm shows a cancelled job as completing, and one that reaches its time limit too, with no time left."""
    for left, requeued in (("3:55:00", False), ("0:00", True)):
        cluster.job("COMPLETING", left)
        output = cluster.run(CRASH="1")
        assert ("scontrol requeue 17" in cluster.calls()) == requeued, output
        assert requeued or "cancelled" in output


def test_a_job_whose_run_has_checkpoints_must_find_one_again(cluster: Cluster) -> None:
    """An unmounted run.dir is empty, so the job's comment records that there were checkpoints."""
    cluster.run(CRASH="1")
    assert not [line for line in cluster.calls() if "update" in line or "required" in line]
    folder = cluster.run_dir / "checkpoints" / "step_00000005"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    cluster.run(CRASH="1")
    assert "scontrol update JobId=17 Comment=megatron_fp4: has checkpoints" in cluster.calls()
    (cluster.fake / "comment").write_text("megatron_fp4: has checkpoints\n")
    for overrides, required in (([], True), (["checkpoint.resume=/parent"], False)):
        cluster.run(*overrides, REFUSED="2")
        assert ("check of 1 ranks, required" in cluster.calls()) == required


def test_nodes_that_fail_the_preflight_are_excluded_at_the_requeue(cluster: Cluster) -> None:
    """DCGM is not installed here. The job already excludes another node."""
    given = {"PREFLIGHT": "1", "CRASH": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    cluster.run(**given)
    preflight = ["all-reduce of 1, by ib0", "prove_backend.py"]
    assert cluster.calls() == [*preflight, "check of 1 ranks", "scontrol requeue 17"]
    steps = cluster.calls(steps=True)
    assert len(steps) == 3 and all("--gpus-per-node=4 " in step for step in steps)  # of a GB200 node

    cluster.job("RUNNING", more="   ReqNodeList=(null) ExcNodeList=node7\n")
    output = cluster.run(**given, UNFIT="1")
    assert "these nodes failed the preflight: localhost" in output
    update = "until scontrol update JobId=17 ExcNodeList=node7,localhost; do sleep 5; done; scontrol release 17"
    assert cluster.calls() == [*preflight, f"sbatch {update}", "scontrol requeuehold 17"], output


def test_a_refused_run_is_not_started_and_secrets_come_from_files(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" canary\n")
    more = {"REFUSED": "2", "PROCESSES_PER_NODE": "3", "SLURM_NNODES": "2", "WANDB_API_KEY_FILE": str(tmp_path / "key")}
    job = cluster.submit(**more)
    output, _ = job.communicate(timeout=300)
    assert cluster.calls() == ["check of 6 ranks canary"] and job.returncode == 2, output
    assert "refused by pretrain.py --check: not requeued" in output


def test_options_of_a_container(cluster: Cluster) -> None:
    """Pyxis adds them to srun. The container uses the code of the checkout, not of the image."""
    inside = {"REFUSED": "2", "CONTAINER_IMAGE": "/images/a.sqsh", "CONTAINER_MOUNTS": "/corpus:/corpus"}
    assert "this Slurm has no pyxis" in cluster.run(**inside)
    cluster.run(**inside, PYXIS="  --container-image=...")
    (step,) = cluster.calls(steps=True)
    assert f"--container-image=/images/a.sqsh --container-workdir={ROOT} " in step
    assert f"--container-mounts={ROOT}:{ROOT},{cluster.run_dir}:{cluster.run_dir},/corpus:/corpus " in step


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([ROOT / "scripts" / "slurm" / "pretrain.sbatch"], "give run.dir="),
        ([LAUNCH_NODE, "train", "run.dir=/tmp/a"], "set PROCESSES_PER_NODE to train on CPUs"),
    ],
)
def test_missing_settings_are_named(cluster: Cluster, command: list[str | Path], message: str) -> None:
    environment = {**cluster.environment, "SLURM_GPUS_ON_NODE": ""}
    done = subprocess.run(["/bin/bash", *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
