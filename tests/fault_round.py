"""A round of faults in real runs under torchrun, on GPUs or a CPU: `python -m tests.fault_round --device cuda`.

Each fault is done to a run of its own, which is then started again by the same command until it is finished, and has to
equal an undisturbed run bit for bit: losses, gradient norms, weights and moments; every step is in metrics.jsonl once.
Prints a table; exit code 1 if anything is lost or a fault was not answered as docs/operations.md says. Overrides of
pretrain.py may follow; `make test-gpu` has some that make the model very small.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.fingerprint import state_digest

ROOT = Path(__file__).resolve().parents[1]

LOST = "LOST"
SECONDS = 300.0
"""What a start, and what an answer to a fault may take."""


class Job:
    """A run of pretrain.py under torchrun on two ranks."""

    def __init__(self, folder: Path, device: str, overrides: list[str]) -> None:
        self.dir, self.overrides, self.device = folder, overrides, device
        self.output = folder.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(ROOT / "pretrain.py"), f"run.device={self.device}", f"run.dir={self.dir}", *self.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self, patience: float = SECONDS) -> int:
        """The launcher's exit code; raises TimeoutExpired."""
        assert self.process is not None
        return self.process.wait(patience)

    def running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def workers(self) -> dict[int, int]:
        """Process ids by rank, as the ranks themselves say."""
        found = {}
        for path in (self.dir / "ranks").glob("rank_*.json"):
            record = json.loads(path.read_text())
            found[record["rank"]] = record["pid"]
        return found

    def await_step(self, step: int) -> bool:
        """Whether it came to that step before it ended."""
        deadline = time.monotonic() + SECONDS
        while self.running() and time.monotonic() < deadline:
            if self.steps_done() >= step:
                return True
            time.sleep(0.02)
        return False

    def steps_done(self) -> int:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return max((record["step"] for record in records if record["kind"] == "step"), default=0)

    def finish(self) -> int:
        """Start until it is finished; returns the number of starts."""
        for number in range(1, 5):
            self.start()
            if self.ended() == 0:
                return number
        raise AssertionError(f"not finished after 4 starts, see {self.output}")

    def digest(self) -> tuple[dict[int, tuple[float, float]], str]:
        records = [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if record["kind"] == "step"]
        assert len(steps) == len({record["step"] for record in steps}), "a step is there twice"
        newest = self.dir / "checkpoints" / (self.dir / "checkpoints" / "latest").read_text().strip()
        return {record["step"]: (record["loss"], record["grad_norm"]) for record in steps}, state_digest(newest)

    def said(self) -> str:
        return self.output.read_text(errors="replace")


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def await_gone(processes: list[int]) -> float:
    began = time.monotonic()
    while any(map(alive, processes)):
        assert time.monotonic() - began < SECONDS, f"still there: {[p for p in processes if alive(p)]}"
        time.sleep(0.05)
    return time.monotonic() - began


def kill_one_rank(job: Job, chance: random.Random) -> str:
    workers = job.workers()
    rank = chance.randrange(2)
    os.kill(workers[rank], signal.SIGKILL)
    code = job.ended()
    gone = await_gone(list(workers.values()))
    assert code != 0
    return f"rank {rank} killed; torchrun ended with {code}, all gone {gone:.1f} s later"


def kill_while_saving(job: Job, chance: random.Random) -> str:
    """All at once, while a save is being written."""
    deadline = time.monotonic() + SECONDS
    while not (partial := [path for path in (job.dir / "checkpoints").glob("step_*.tmp") if any(path.iterdir())]):
        assert job.running() and time.monotonic() < deadline, "no save was seen on its way"
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.05)
    workers = job.workers()
    for process in workers.values():
        os.kill(process, signal.SIGKILL)
    job.ended()
    left = sorted(path.name for path in (job.dir / "checkpoints").iterdir())
    return f"killed while {partial[0].name} was written; left: {', '.join(left)}"


def stop_one_rank(job: Job, chance: random.Random) -> str:
    workers = job.workers()
    os.kill(workers[1], signal.SIGSTOP)
    began = time.monotonic()
    code = job.ended()
    took = time.monotonic() - began
    for process in workers.values():
        if alive(process):
            os.kill(process, signal.SIGKILL)
    named = [line for line in job.said().splitlines() if "rank 1" in line and ("stop" in line or "stand" in line)]
    assert code != 0 and named, "nobody named rank 1"
    return f"ended with {code} after {took:.0f} s: {named[0].strip()[:150]}"


def term_the_launcher(job: Job, chance: random.Random) -> str:
    workers = job.workers()
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    job.ended()
    state = json.loads((job.dir / "state.json").read_text())
    await_gone(list(workers.values()))
    newest = (job.dir / "checkpoints" / "latest").read_text().strip()
    assert state["state"] == "stopped" and newest == f"step_{state['step']:08d}", (state, newest)
    return f"stopped after step {state['step']}, saved, gone after {time.monotonic() - began:.1f} s"


def kill_the_launcher(job: Job, chance: random.Random) -> str:
    workers = job.workers()
    assert job.process is not None
    job.process.kill()
    began = time.monotonic()
    job.ended()
    await_gone(list(workers.values()))
    took = time.monotonic() - began
    state = json.loads((job.dir / "state.json").read_text())
    newest = (job.dir / "checkpoints" / "latest").read_text().strip()
    assert state["state"] == "stopped" and newest == f"step_{state['step']:08d}", (state, newest)
    return f"orphans stopped after step {state['step']}, saved, gone after {took:.1f} s"


FAULTS: dict[str, Callable[[Job, random.Random], str]] = {
    "one rank killed": kill_one_rank,
    "all killed while saving": kill_while_saving,
    "one rank stopped (SIGSTOP)": stop_one_rank,
    "SIGTERM to torchrun": term_the_launcher,
    "torchrun killed": kill_the_launcher,
}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for pretrain.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="how often each kind of kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only faults whose names contain one of these")
    options = parser.parse_intermixed_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fault_round_"))
    overrides = [
        f"train.steps={options.steps}",
        "checkpoint.interval=3",
        "validation.interval=0",
        "parallel.timeout_seconds=30",
        f"data.cache_dir={folder}/corpus",
        *options.overrides,
    ]
    straight = Job(folder / "straight", options.device, overrides)
    began = time.monotonic()
    straight.finish()
    expected = straight.digest()
    rows = [("none", f"{time.monotonic() - began:.0f} s, {options.steps} steps", "")]
    chosen = [name for name in FAULTS if not options.only or any(word in name for word in options.only)]
    cases = [(name, number) for name in chosen for number in range(options.kills if "killed" in name else 1)]

    def undergo(case: tuple[str, int]) -> tuple[str, str, str]:
        name, number = case
        chance = random.Random(f"{options.seed} {case}")
        job = Job(folder / re.sub(r"\W+", "_", f"{name} {number}"), options.device, overrides)
        try:
            job.start()
            assert job.await_step(chance.randint(4, max(options.steps * 2 // 3, 5))), "it ended before the fault"
            answer = FAULTS[name](job, chance)
            starts = job.finish()
            losses, tensors = job.digest()
            assert losses == expected[0], "other losses"
            assert tensors == expected[1], "other tensors"
        except (AssertionError, subprocess.TimeoutExpired, OSError, KeyError, ValueError) as error:
            print(f"--- {name}\n{job.said()[-6000:]}", file=sys.stderr)
            if job.process is not None and job.running():
                os.killpg(job.process.pid, signal.SIGKILL)
            return name, f"{type(error).__name__}: {error}", LOST
        return name, answer, f"finished at start {starts + 1}, equal"

    with ThreadPoolExecutor(options.jobs) as pool:
        rows += pool.map(undergo, cases)
    print("| fault | answer | then |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if any(row[2] == LOST for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
