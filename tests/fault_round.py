"""A round of faults in real runs under torchrun, on GPUs or a CPU: `python -m tests.fault_round --device cuda`.

Each fault disturbs its own run, which is then started again by the same command until it is finished. It must equal an
undisturbed run bit for bit in losses, gradient norms, weights and moments, with every step once in metrics.jsonl.
Prints a table. The exit code is 1 if anything is lost or a run does not react to a fault as docs/operations.md says.
Overrides of pretrain.py may follow; those of `make test-gpu` make the model very small.
"""

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
from functools import partial
from pathlib import Path

from megatron_fp4.runtime.progress import state_of_process
from scripts.fingerprint import state_digest
from tests.programs import ROOT, wait_until, wait_until_gone
from tests.soak import records

SECONDS = 300.0
"""The limit of a start and of the reaction to a fault."""


class Job:
    """A run of pretrain.py under torchrun on two ranks."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.dir, self.overrides, self.output = folder, overrides, folder.with_suffix(".log")

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(ROOT / "pretrain.py"), f"run.dir={self.dir}", *self.overrides]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def workers(self) -> list[int]:
        """Process ids by rank, from the ranks' own files."""
        return [json.loads(path.read_text())["pid"] for path in sorted((self.dir / "ranks").glob("rank_*.json"))]

    def steps(self) -> list[dict[str, float]]:
        return records(self.dir, "step")

    def finish(self) -> int:
        """Start the run until it is finished; returns the number of starts."""
        for number in range(1, 5):
            self.start()
            if self.process.wait(SECONDS) == 0:
                return number
        raise AssertionError(f"not finished after 4 starts, see {self.output}")

    def newest(self) -> str:
        return (self.dir / "checkpoints" / "latest").read_text().strip()

    def digest(self) -> tuple[list[tuple[float, ...]], str]:
        numbers = [tuple(record[key] for key in ("step", "loss", "grad_norm")) for record in self.steps()]
        return numbers, state_digest(self.dir / "checkpoints" / self.newest())


def kill_one_rank(job: Job, chance: random.Random) -> str:
    workers, rank = job.workers(), chance.randrange(2)
    os.kill(workers[rank], signal.SIGKILL)
    code = job.process.wait(SECONDS)
    wait_until_gone(workers)
    assert code != 0
    return f"rank {rank} killed; torchrun ended with {code}, all gone"


def kill_while_saving(job: Job, chance: random.Random) -> str:
    """Kill all ranks at once, while a save is being written."""
    checkpoints = job.dir / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("step_*.tmp/*")), "no save was seen", job.process)
    time.sleep(chance.random() * 0.05)
    for process in job.workers():
        os.kill(process, signal.SIGKILL)
    job.process.wait(SECONDS)
    return f"left: {', '.join(sorted(path.name for path in checkpoints.iterdir()))}"


def stop_one_rank(job: Job, chance: random.Random) -> str:
    workers = job.workers()
    os.kill(workers[1], signal.SIGSTOP)
    code = job.process.wait(SECONDS)
    for process in workers:
        if state_of_process(process) != "gone":
            os.kill(process, signal.SIGKILL)
    lines = job.output.read_text(errors="replace").splitlines()
    named = [line for line in lines if "rank 1" in line and ("stop" in line or "stand" in line)]
    assert code != 0 and named, "rank 1 was not named"
    return f"ended with {code}: {named[0].strip()[:150]}"


def signal_launcher(number: signal.Signals, job: Job, chance: random.Random) -> str:
    workers, began = job.workers(), time.monotonic()
    job.process.send_signal(number)
    job.process.wait(SECONDS)
    wait_until_gone(workers)
    state = json.loads((job.dir / "state.json").read_text())
    assert state["state"] == "stopped" and job.newest() == f"step_{state['step']:08d}", (state, job.newest())
    return f"stopped after step {state['step']}, saved, gone after {time.monotonic() - began:.1f} s"


FAULTS: dict[str, Callable[[Job, random.Random], str]] = {
    "one rank killed": kill_one_rank,
    "all killed while saving": kill_while_saving,
    "one rank stopped (SIGSTOP)": stop_one_rank,
    "SIGTERM to torchrun": partial(signal_launcher, signal.SIGTERM),
    "torchrun killed": partial(signal_launcher, signal.SIGKILL),
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
    options = parser.parse_intermixed_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fault_round_"))
    overrides = [
        *(f"run.device={options.device}", f"train.steps={options.steps}", f"data.cache_dir={folder}/corpus"),
        *("checkpoint.interval=3", "validation.interval=0", "parallel.timeout_seconds=30", *options.overrides),
    ]
    straight = Job(folder / "straight", overrides)
    straight.finish()
    expected = straight.digest()

    def undergo(case: tuple[str, int]) -> tuple[str, str, str]:
        name, chance = case[0], random.Random(f"{options.seed} {case}")
        job = Job(folder / re.sub(r"\W+", "_", f"{case}"), overrides)
        try:
            job.start()
            first = chance.randint(4, max(options.steps * 2 // 3, 5))
            wait_until(lambda: len(job.steps()) >= first, "it ended before the fault", job.process)
            answer = FAULTS[name](job, chance)
            starts = job.finish()
            assert job.digest() == expected, "other losses or tensors, or a step twice"
        except (AssertionError, subprocess.TimeoutExpired, OSError, KeyError, ValueError) as error:
            print(f"--- {name}\n{job.output.read_text(errors='replace')[-6000:]}", file=sys.stderr)
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
            return name, f"{type(error).__name__}: {error}", "LOST"
        return name, answer, f"finished at start {starts + 1}, equal"

    cases = [(name, number) for name in FAULTS for number in range(options.kills if "killed" in name else 1)]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(undergo, cases))
    print("| fault | answer | then |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if any(row[2] == "LOST" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
