"""Peak memory of real training steps on GPUs beside what a dry run says of the same configuration.

    python scripts/compare_memory.py model=transformer_1_2b train.micro_batch_size=4 train.global_batch_size=8
    python scripts/compare_memory.py --output memory.json --case "model=hybrid_60m" --case "model=tiny precision=bf16"
    torchrun --nproc-per-node 4 scripts/compare_memory.py --case "parallel.tensor=2 ..."     a rank on each GPU

A case is a list of overrides, as for pretrain.py; without `--case` the rest of the line is the only one. Each is

    planned     by the dry run of scripts/plan_run.py for as many ranks, in a process that sees no GPU
    measured    by building model and optimizer as pretrain.py does and taking two training steps on random tokens, in a
                process of its own on every rank: `torch.cuda.max_memory_allocated` of the first rank in the second step

Prints a table of GiB, planned over measured, and notes where the two did not run the same kernels. `--output` writes
that and the parts of the dry run as JSON. `--plan-only` measures nothing and needs no GPU (WORLD_SIZE names the ranks).
Exit code: 0; 1 if a case failed (its error is on stderr, the others go on); 2 if a configuration is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from assembly import (
    backend_of,
    configure,
    sharded_model,
    world_size,
)
from megatron_fp4.config.compose import ConfigError
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import (
    end_process,
    leave_distributed,
)
from megatron_fp4.planning.dry_run import dry_run
from megatron_fp4.planning.stand_ins import planned_execution
from megatron_fp4.runtime.closed_pipe import end_without_reader
from models.execution import Execution
from models.pattern import mixers_of
from scripts.random_run import RandomRun, random_micro_batches

_GIB = 2**30


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="the only case, as for pretrain.py")
    parser.add_argument("--case", action="append", metavar="OVERRIDES", help="a case, in quotes; may be repeated")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--plan-only", action="store_true", help="the dry runs alone")
    parser.add_argument("--part", choices=("plan", "measure"), help=argparse.SUPPRESS)  # what a child process does
    options = parser.parse_intermixed_args(arguments)
    if options.part:
        return part(options.part, options.overrides, options.output)
    if options.case and options.overrides:
        parser.error(f"{options.overrides[0]}: put it into the quotes of a --case")
    cases = [shlex.split(case) for case in options.case or [shlex.join(options.overrides)]]
    if not options.plan_only and not torch.cuda.is_available():
        print("compare_memory.py: needs an NVIDIA GPU to measure; or use --plan-only", file=sys.stderr)
        return 2

    first = int(os.environ.get("RANK", 0)) == 0
    rows: list[dict[str, Any]] = []
    for index, case in enumerate(cases):
        row: dict[str, Any] = {"overrides": case, "ranks": world_size()}
        if first:
            row["planned"] = child("plan", case, {"CUDA_VISIBLE_DEVICES": ""})
        if not options.plan_only:
            row["measured"] = child("measure", case, _own_rendezvous(index))
        rows.append(row)
    codes = [row[part]["exit_code"] for row in rows for part in ("planned", "measured") if part in row]
    if first:
        print(table(rows))
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 2 if 2 in codes else int(any(codes))


def child(what: str, case: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What `part(what, case)` finds in a process of its own, with its `exit_code`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = [sys.executable, __file__, "--part", what, "--output", str(output), *case]
        done = subprocess.run(command, env={**os.environ, **environment}, check=False)
        found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    return {"exit_code": done.returncode, **found}


def _own_rendezvous(index: int) -> dict[str, str]:
    """Under torchrun: where the ranks of case `index` meet. torchrun's own store keeps what earlier cases wrote."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"compare_memory/{index}"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    return {"MASTER_PORT": store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": str(False)}


def part(what: str, overrides: list[str], output: Path) -> int:
    """Plan or measure one case in this process and write what was found to `output`; returns the exit code."""
    try:
        found = plan(overrides) if what == "plan" else measure(overrides)
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"compare_memory.py: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        leave_distributed()
    output.write_text(json.dumps(found))
    return 0


def plan(overrides: list[str]) -> dict[str, Any]:
    """The dry run's memory of the first of WORLD_SIZE ranks, in bytes, and the kernels that it assumes."""
    config = configure([*overrides, "run.dry=true"])
    execution = planned_execution(config)
    dry = dry_run(config, world_size(), lambda *parts: sharded_model(config, *parts), execution)
    return {"memory": asdict(dry.memory), "kernels": kernels(execution, config)}


def measure(overrides: list[str]) -> dict[str, Any]:
    """Take two steps on this rank; bytes at the peak of each, and what the allocator reserved."""
    run = RandomRun.open(overrides, only_on_gpu="the memory that is counted here", with_graphs=False)
    config, device = run.config, run.mesh.device
    peaks = []
    for step in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        run.step(step, random_micro_batches(config, run.mesh, step))
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device))
    return {
        "first_step": peaks[0],
        "peak": peaks[1],
        "reserved": torch.cuda.max_memory_reserved(device),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "backend": backend_of(config).name,
        "kernels": kernels(run.model.execution, config),
    }


def kernels(execution: Execution, config: Config) -> dict[str, Any]:
    """The parts of `execution` that the model has."""
    fused = [kernel.part for mixer in mixers_of(config.model.pattern) for kernel in mixer.fused]
    parts = {part: part in execution.kernels for part in fused}
    return {**parts, "compiled": execution.compiled, "recompute": execution.recompute}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; adds `ratio` and `notes` to each."""
    lines = [f"{'planned':>9}{'measured':>10}{'ratio':>8}{'reserved':>10}  ranks  case (GiB)"]
    for row in rows:
        plan, measured = row.get("planned", {}), row.get("measured", {})
        row["ratio"] = plan["memory"]["peak"] / measured["peak"] if "memory" in plan and "peak" in measured else None
        row["notes"] = [
            f"{who} ended with exit code {result['exit_code']}"
            for who, result in (("the dry run", plan), ("the measurement", measured))
            if result.get("exit_code")
        ]
        if row["ratio"] is not None:
            differ = [k for k, value in plan["kernels"].items() if measured["kernels"][k] != value]
            row["notes"] += [f"planned with {k}={plan['kernels'][k]}, ran {measured['kernels'][k]}" for k in differ]
            if measured["backend"] != "emulated":
                row["notes"].append(f"planned for the emulated backend, ran {measured['backend']}")

        def gib(size: int | None) -> str:
            return "-" if size is None else f"{size / _GIB:.2f}"

        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(
            f"{gib(plan.get('memory', {}).get('peak')):>9}{gib(measured.get('peak')):>10}{ratio:>8}"
            f"{gib(measured.get('reserved')):>10}{row['ranks']:>7}  {shlex.join(row['overrides'])}"
        )
        lines += [f"{'':>46}{note}" for note in row["notes"]]
    return "\n".join(lines)


if __name__ == "__main__":
    end_without_reader()
    end_process(main(sys.argv[1:]))
