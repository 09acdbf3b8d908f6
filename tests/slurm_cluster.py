"""A Slurm of two nodes on this machine, and what scripts/slurm/pretrain.sbatch does on it, on CPUs.

    apt-get install slurm-wlm munge
    python -m tests.slurm_cluster --folder /tmp/slurm --proctrack linuxproc

Daemons, configuration and logs live in the folder and end with the command; nothing of the machine's own Slurm is
touched, and no root is needed but for `--proctrack cgroup`. Jobs: one that meets its time limit and is preempted, goes
back into the queue both times and resumes, compared bit for bit with a run that was left alone; one on two of four GPUs
a node with --exclusive; one that is refused; one that is cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.soak import alive
from tests.soak_compare import TIMES, compare_checkpoints, records, steps_done

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "scripts/slurm/pretrain.sbatch"
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")
PROCTRACK = ("linuxproc", "pgid", "cgroup")
# Slurm looks for jobs at their limit every 30 seconds: the run has to be longer.
STEPS = 300
OVERRIDES = [
    *("model=tiny", "model.pattern=M-*-", "model.vocab_size=512", "model.hidden_dim=128", "model.ffn_dim=256"),
    *("model.num_query_heads=4", "model.mamba_num_heads=4", "model.nvfp4_bf16_blocks.last=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "train.sequence_length=128", f"train.steps={STEPS}"),
    *("validation.interval=0", "validation.num_samples=4", "checkpoint.interval=100", "checkpoint.keep=0"),
    "logging.interval=1",
]
CONFIGURATION = """\
ClusterName=tiny
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=5
GresTypes=gpu
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs={cpus} \\
    RealMemory=4000 Gres=gpu:4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""
# Device files that every machine has stand in for GPUs.
GPUS = "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\nName=gpu File=/dev/full\n"
GPUS += "Name=gpu File=/dev/random\n"


def missing() -> list[str]:
    """What of Slurm is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [name for name in DAEMONS if shutil.which(name, path=path) is None]


class Cluster:
    """Two nodes, from entering to leaving.

    proctrack: how Slurm knows a job's processes, which decides whom it signals.
    """

    def __init__(self, folder: Path, proctrack: str) -> None:
        self.folder = folder.resolve()
        self._proctrack = proctrack
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment["PATH"] += ":/usr/sbin:/sbin"
        self.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._end_daemons()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.call("scancel", "--full", f"--user={getpass.getuser()}")
            self.wait(lambda: not self.call("squeue", "-h"), "an empty queue", 120)
        finally:
            self._end_daemons()

    def _start(self) -> None:
        for name in ("munge", "state", "log", "spool.node1", "spool.node2"):
            (self.folder / name).mkdir(parents=True)
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self.call("munged", "--force", f"--socket={munge / 'socket'}", *files)
        (self.folder / "gres.conf").write_text(GPUS)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=yes\n")
        settings = {"folder": self.folder, "user": getpass.getuser(), "ports": three_ports(), "cpus": os.cpu_count()}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(proctrack=self._proctrack, **settings))
        self.call("slurmctld", "-c")
        for node in ("node1", "node2"):
            self.call("slurmd", "-N", node)
        self.wait(lambda: self.call("sinfo", "-h", "-p", "low", "-o", "%D %t") == "2 idle", "two idle nodes", 60)

    def _end_daemons(self) -> None:
        for name in ("slurmd.node1.pid", "slurmd.node2.pid", "slurmctld.pid", "munge/pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                process = int((self.folder / name).read_text())
                os.kill(process, signal.SIGTERM)
                self.wait(lambda: not alive(process), f"{name} to go", 60)  # noqa: B023

    def call(self, *command: object) -> str:
        """A command's output. Raises CalledProcessError."""
        return subprocess.check_output([*map(str, command)], env=self.environment, text=True, cwd=ROOT).strip()

    def wait(self, is_true: Callable[[], bool], what: str, seconds: float) -> None:
        """Raises TimeoutError."""
        until = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; {self.folder}/log has the daemons' logs")
            time.sleep(0.2)

    def submit(self, run_dir: Path, *overrides: str, options: tuple[str, ...] = (), processes: int | None = 1) -> int:
        """A job of two nodes; returns its number. processes: on each CPU node, None for one per GPU."""
        environment = {**self.environment, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        gpus: tuple[str, ...] = ()
        if processes is not None:
            environment["PROCESSES_PER_NODE"] = str(processes)
            gpus = ("--gpus-per-node=0",)
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.folder}/job-%j.log", *gpus, *options, SCRIPT]
        command += [f"run.dir={run_dir}", *OVERRIDES, *overrides]
        return int(subprocess.check_output(command, env=environment, text=True, cwd=ROOT))

    def job(self, number: int, key: str) -> str:
        """A field of what Slurm knows of a job."""
        found = re.search(rf"\b{key}=(\S+)", self.call("scontrol", "show", "job", number))
        return found[1] if found else ""

    def log(self, number: int) -> str:
        """What a job has printed."""
        path = self.folder / f"job-{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until_step(self, number: int, run_dir: Path, step: int) -> None:
        """Until a job has trained so far. Raises TimeoutError, and RuntimeError if it has ended."""
        ended = ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        def there() -> bool:
            if self.job(number, "JobState") in ended:
                raise RuntimeError(f"job {number} is {self.job(number, 'JobState')}:\n{self.log(number)}")
            return steps_done(run_dir) >= step

        self.wait(there, f"step {step} of job {number}", 600)

    def until_requeued(self, number: int, times: int) -> None:
        """Until a job is back in the queue, for the `times`-th time, and may begin again at once."""
        self.wait(lambda: self.job(number, "Restarts") == str(times), f"restart {times} of job {number}", 300)
        if self.job(number, "JobState") == "PENDING":  # Slurm would let it wait for two minutes
            self.call("scontrol", "update", f"JobId={number}", "StartTime=now")

    def until_ended(self, number: int) -> str:
        """Returns its state."""
        busy = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
        self.wait(lambda: self.job(number, "JobState") not in busy, f"the end of job {number}", 900)
        return self.job(number, "JobState")


def three_ports() -> list[int]:
    """Ports that nobody listens at, in a row, as a list of nodes wants them."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for other in (port + 1, port + 2):
                    socket.create_server(("127.0.0.1", other)).close()
                return [port, port + 1, port + 2]


def left_alone(cluster: Cluster, run_dir: Path) -> None:
    """The run without Slurm: two processes under one torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain.py"]
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (cluster.folder / "left_alone.log").open("w") as log:
        command = [sys.executable, *launcher, f"run.dir={run_dir}", *OVERRIDES]
        subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=log, stderr=log)


def interrupted(cluster: Cluster, run_dir: Path) -> str:
    """A job that meets its time limit, then a more important one; returns what it printed."""
    job = cluster.submit(run_dir)
    cluster.until_step(job, run_dir, 5)
    # Five minutes before the limit is now; Slurm looks every 30 seconds.
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    cluster.until_requeued(job, 1)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=04:00:00")
    first = steps_done(run_dir)
    cluster.until_step(job, run_dir, first + 5)
    # Slurm tells the job by SIGTERM, and kills it after the partition's GraceTime.
    options = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--parsable")
    other = cluster.call("sbatch", *options, "--wrap=sleep 2")
    cluster.until_requeued(job, 2)
    second = steps_done(run_dir)
    cluster.until_ended(int(other))
    state = cluster.until_ended(job)
    expect(state == "COMPLETED", f"the job is {state}", cluster.log(job))
    expect(5 <= first < second < STEPS, f"it was stopped after steps {first} and {second}", cluster.log(job))
    said = cluster.log(job).count("pretrain.sbatch: stopped on request")
    expect(said == 2, f"it said {said} times that it was stopped", cluster.log(job))
    stops = [record["step"] for record in records(run_dir) if record.get("event") == "stop"]
    expect(stops == [first, second], f"stops are recorded of steps {stops}, not {[first, second]}", cluster.log(job))
    return cluster.log(job)


def compare(expected: Path, run_dir: Path) -> list[str]:
    """What is not bit for bit as in `expected`: losses, gradient norms, weights, moments, generators."""

    def numbers(folder: Path, kind: str) -> list[dict[str, Any]]:
        of_kind = [record for record in records(folder) if record["kind"] == kind]
        return [{key: value for key, value in record.items() if key not in TIMES} for record in of_kind]

    assert len(numbers(expected, "step")) == STEPS
    kinds = ("step", "validation")
    found = [f"records of kind {kind} differ" for kind in kinds if numbers(run_dir, kind) != numbers(expected, kind)]
    for folder in sorted((expected / "checkpoints").glob("step_*")):
        found += compare_checkpoints(folder, run_dir / "checkpoints" / folder.name)
    return found


def on_some_gpus(cluster: Cluster, run_dir: Path) -> None:
    """Two of four GPUs a node, with --exclusive: four ranks."""
    options = ("--gpus-per-node=2",)
    job = cluster.submit(run_dir, "train.steps=3", "run.device=cpu", options=options, processes=None)
    state = cluster.until_ended(job)
    expect(state == "COMPLETED", f"the job is {state}", cluster.log(job))
    ranks = [record["world_size"] for record in records(run_dir) if record["kind"] == "run"]
    expect(ranks == [4], f"it had {ranks} ranks, not 4", cluster.log(job))


def refused(cluster: Cluster, run_dir: Path) -> str:
    """A wrong configuration: no training, not requeued; returns its last lines."""
    job = cluster.submit(run_dir, "train.micro_batch_size=3")
    state = cluster.until_ended(job)
    lines = cluster.log(job).splitlines()
    expect(state == "FAILED" and cluster.job(job, "ExitCode") == "2:0", f"the job is {state}", cluster.log(job))
    expect(cluster.job(job, "Restarts") == "0", "it was requeued", cluster.log(job))
    expect(any("micro_batch_size" in line for line in lines), "it does not say why", cluster.log(job))
    return cluster.log(job)


def cancelled(cluster: Cluster, run_dir: Path) -> None:
    """Not requeued; what was done is saved."""
    job = cluster.submit(run_dir)
    cluster.until_step(job, run_dir, 3)
    cluster.call("scancel", job)
    state = cluster.until_ended(job)
    time.sleep(3)
    state = f"{state}, then {cluster.job(job, 'JobState')}"
    expect(state == "CANCELLED, then CANCELLED", f"the job is {state}", cluster.log(job))
    done = [record["step"] for record in records(run_dir) if record.get("event") == "stop"]
    expect(len(done) == 1, f"stops are recorded of steps {done}", cluster.log(job))


def expect(true: bool, otherwise: str, log: str) -> None:
    """Raises RuntimeError with `otherwise` and a job's output."""
    if not true:
        raise RuntimeError(f"{otherwise}\n--- the job's output:\n{log}")


def try_out(folder: Path, proctrack: list[str]) -> list[str]:
    """Every job on a Slurm of each kind; returns what is not bit for bit as in the run that was left alone. Raises
    RuntimeError for whatever else is not as it should be."""
    expected = folder / "left_alone"
    for kind in proctrack:
        began = time.monotonic()
        with Cluster(folder / kind, kind) as cluster:
            runs = cluster.folder / "runs"
            if not expected.exists():
                left_alone(cluster, expected)
            print(interrupted(cluster, runs / "interrupted"))
            if found := compare(expected, runs / "interrupted"):
                return found
            on_some_gpus(cluster, runs / "gpus")
            print(refused(cluster, runs / "refused"))
            cancelled(cluster, runs / "cancelled")
        took = time.monotonic() - began
        print(f"ProctrackType=proctrack/{kind}: all as it should be, {took:.0f} s\n", flush=True)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="new, on a disk with 1 GB")
    parser.add_argument("--proctrack", choices=PROCTRACK, nargs="+", default=["linuxproc"])
    options = parser.parse_args()
    if gone := missing():
        parser.error(f"{', '.join(gone)} not found: apt-get install slurm-wlm munge")
    found = try_out(options.folder, options.proctrack)
    print("\n".join(found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
