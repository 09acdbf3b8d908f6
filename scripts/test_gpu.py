"""Test everything that needs a GPU with one command: `make test-gpu`.

    python scripts/test_gpu.py [--only WORD ...] [--jobs 6] [--limit 900] [--output FOLDER] [--commit ID]

Runs the steps below as separate programs, several at a time, each with its output in a file, and prints a Markdown
table. Steps for two GPUs run only if there are two; a step whose packages are missing is reported as not run. A step
that is not done after the limit has failed. All steps share a temporary XDG_CACHE_HOME, so that later runs do not find
what was tuned on a busy GPU. The dependencies of the project must be installed, the project itself need not.

Exit code: 0 if every step that could run passed, 1 if one did not, 2 if the command is wrong or there is no GPU.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """command: the arguments of Python. shows: a pattern whose last match in the output is the summary of the result.
    gpus: how many GPUs it needs. needs: packages that it needs."""

    name: str
    command: tuple[str, ...]
    shows: str
    gpus: int = 1
    needs: tuple[str, ...] = ()


def tests(name: str, *files: str, only: str = "", gpus: int = 1, needs: tuple[str, ...] = ()) -> Step:
    """A step that runs test files of tests/gpu. only: just the tests whose names contain this word."""
    chosen = ("-k", only) if only else ()
    command = ("-m", "pytest", "-m", "gpu", *chosen, *(f"tests/gpu/{file}.py" for file in files))
    return Step(f"GPU tests: {name}", command, r"^\d+ passed.*", gpus, needs)


FUSED = ("mamba_ssm", "causal_conv1d")
# The longest steps first.
STEPS = (
    tests("a run repeated, killed and resumed", "test_repeatable", only="NVFP4", needs=FUSED),
    tests("a switch, repeated", "test_repeatable", only="backward", needs=FUSED),
    tests("QAF, repeated", "test_repeatable", only="qaf", needs=FUSED),
    tests("data parallel, repeated", "test_repeatable", only="data", gpus=2, needs=FUSED),
    tests("tensor parallel, repeated", "test_repeatable", only="tensor", gpus=2, needs=FUSED),
    tests("tuned kernels in a checkpoint", "test_repeatable", only="checkpoint", needs=FUSED),
    Step("bits of every kind of short run", ("scripts/fingerprint.py", "--jobs", "4"), r"^nvfp4 .*"),
    tests("quantizers and linears", "test_quantizers", "test_linear_cuda", "test_grouped"),
    tests("whole short runs", "test_runs"),
    tests("Transformer Engine", "test_transformer_engine", needs=("transformer_engine",)),
    tests("the backend torch", "test_torch_backend"),
    tests("models", "test_model_kernels", needs=FUSED),
    tests("deterministic attention, the loss", "test_tiled_attention", "test_cross_entropy"),
    tests("CUDA graphs, no drain", "test_cuda_graphs", "test_step_without_drain", needs=FUSED),
    tests("gathered codes, reproducible sums", "test_gathered_codes", "test_exact_norm", "test_reproducible"),
    tests("messages of tensor parallelism", "test_tensor_parallel", gpus=2),
    Step("scripts/prove_backend.py", ("scripts/prove_backend.py",), r".*agree.*"),
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only steps whose names contain one of these words")
    parser.add_argument("--jobs", type=int, default=6, help="steps at a time (default: 6)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all steps together (default: 900)")
    parser.add_argument("--output", type=Path, help="folder for the outputs (default: a temporary one)")
    parser.add_argument("--commit", help="the commit in the report (default: from git)")
    options = parser.parse_args(arguments)
    steps = [s for s in STEPS if options.only is None or any(word in s.name for word in options.only)]
    if not steps:
        parser.error(f"--only {' '.join(options.only)} names no step; there are: {', '.join(s.name for s in STEPS)}")
    if not torch.cuda.is_available():
        print("test_gpu.py: there is no CUDA device here", file=sys.stderr)
        return 2
    count = torch.cuda.device_count()
    output: Path = options.output or Path(tempfile.mkdtemp(prefix="test_gpu_"))
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache, ThreadPoolExecutor(options.jobs) as pool:
        # Distribute the steps for one GPU over all GPUs.
        places = [str(number % count) if step.gpus == 1 else "0,1" for number, step in enumerate(steps)]
        deadline = began + options.limit
        rows = list(pool.map(lambda step, gpus: run(step, gpus, count, output, cache, deadline), steps, places))
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    tested = options.commit or git.stdout.strip() or "unknown"
    gpus, seconds = f"{count} x {torch.cuda.get_device_name()}", time.perf_counter() - began
    print(f"Commit {tested}, {gpus}, torch {torch.__version__}, {seconds:.0f} s in all.\n")
    print("| | result | | seconds |\n|---|---|---|---|")
    for step, (verdict, detail, taken) in zip(steps, rows, strict=True):
        shown = detail.replace("|", "\\|")[:120]
        print(f"| {step.name} | {verdict} | {shown} | {taken:.0f} |")
    print(f"outputs: {output}")
    return 1 if any(verdict == "FAILED" for verdict, *_ in rows) else 0


def run(step: Step, gpus: str, num_gpus: int, output: Path, cache: str, deadline: float) -> tuple[str, str, float]:
    """Run one step on the GPUs with these indices. Returns `passed`, `FAILED` or `not run`; summary or reason; seconds.

    cache: its XDG_CACHE_HOME. deadline: in the time of `time.perf_counter`.
    """
    if step.gpus > num_gpus:
        return "not run", f"needs {step.gpus} GPUs", 0.0
    if missing := [name for name in step.needs if importlib.util.find_spec(name) is None]:
        return "not run", f"{', '.join(missing)} not installed", 0.0
    command = list(step.command)
    if command[:2] == ["-m", "pytest"] and importlib.util.find_spec("xdist") is not None:
        # In several processes, because nearly all of the time is spent on compiling kernels.
        command += ["-n", str(max(4, (os.cpu_count() or 1) // 3))]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": cache,
    }
    log = output / (re.sub(r"\W+", "_", step.name).strip("_") + ".txt")
    began = time.perf_counter()
    with log.open("w") as file:
        program = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = program.wait(max(0.0, deadline - began))
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            return "FAILED", "not done in time", time.perf_counter() - began
    text, seconds = log.read_text(errors="replace"), time.perf_counter() - began
    shown = [match[0].strip() for match in re.finditer(step.shows, text, re.MULTILINE) if match[0].strip()]
    if code == 0 and shown:
        return "passed", shown[-1], seconds
    return "FAILED", f"exit code {code}; {text.strip().splitlines()[-1] if text.strip() else ''}", seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
