"""scripts/benchmark.py: each command runs at small sizes, and what its tables add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import Ran, late, length, memory_table, profile_table
from tests.programs import Program, environments_of_ranks, run_program

SMALL = ["--small", "--device", "cpu", "--iterations", "1"]
TINY = ["model=tiny", "run.device=cpu", "train.sequence_length=64", "train.micro_batch_size=1"]


@pytest.mark.slow
def test_linears_and_models(tmp_path: Path) -> None:
    output = tmp_path / "benchmark.json"
    done = run_program(["scripts/benchmark.py", "linear", *SMALL, "--output", str(output)])
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    found = [(row["recipe"], row["weights_kept"]) for row in report["linears"]]
    assert found == [("bf16", True), ("nvfp4", False), ("nvfp4", True)]
    assert all(rate > 0 for rate in report["ceilings"].values()) and "TFLOP/s" in done.stdout
    done = run_program(["scripts/benchmark.py", "models", *SMALL, "--recompute", "selective", "--output", str(output)])
    assert done.returncode == 0, done.stderr
    bf16, nvfp4 = json.loads(output.read_text())["models"]
    assert bf16["ratio"] == 1 and nvfp4["ratio"] == nvfp4["milliseconds"] / bf16["milliseconds"]
    assert abs(bf16["loss"] - nvfp4["loss"]) < 0.1 and bf16["recompute"] == "selective"
    assert bf16["quantized_linears"].startswith("0 of ") and not nvfp4["quantized_linears"].startswith("0 of ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["models", "--small", "--models", "7b"], "7b is not one of tiny"),
        (["models", "--small", "--device", "cpu", "--kernels", "fused"], "needs CUDA"),
        (["parallel", "model=tiny", "run.device=cpu", "parallel.tensor=2"], "parallel.tensor=2"),
        (["profile", *TINY], "needs a GPU"),
        (["memory", "--plan-only", "--case", "train.global_batch_size=7"], "train.global_batch_size=7"),
    ],
)
def test_mistakes_are_one_line(command: list[str], words: str) -> None:
    done = run_program(["scripts/benchmark.py", *command])
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_scaling_is_relative_to_another_mesh(tmp_path: Path) -> None:
    def parallel(processes: int, *options: str) -> str:
        command = ["scripts/benchmark.py", "parallel", "--steps=1", "--warmup=1", *options, *TINY]
        ranks = [Program(command, environment) for environment in environments_of_ranks(processes)]
        printed = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0] * processes, printed
        return printed

    one, two = tmp_path / "one.json", tmp_path / "two.json"
    parallel(1, "--output", str(one), "train.global_batch_size=2")
    # The same global batch on two ranks: the same loss.
    printed = parallel(2, "--output", str(two), "--against", str(one), "train.global_batch_size=2")
    first, second = json.loads(one.read_text()), json.loads(two.read_text())
    assert first["losses"][0] == second["losses"][0]
    assert (second["ranks"], second["data"], second["micro_batches_per_rank"]) == (2, 2, 1)
    share = second["tokens_per_second"] / first["tokens_per_second"] / 2
    assert f"{share:.1%} of ideal" in printed


@pytest.mark.slow
def test_planned_memory_of_several_cases(tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    cases = [f"train.sequence_length=64 precision.switch.when=never precision={name}" for name in ("bf16", "nvfp4")]
    options = [argument for case in cases for argument in ("--case", case)]
    command = ["scripts/benchmark.py", "memory", "--plan-only", "--output", str(output), *options]
    done = run_program(command, {"WORLD_SIZE": "2"})
    assert done.returncode == 0, done.stderr
    for row, case in zip(rows := json.loads(output.read_text()), cases, strict=True):
        assert row["overrides"] == case.split() and row["ranks"] == 2 and "measured" not in row
    bf16, nvfp4 = (row["planned"]["memory"]["quantized_weights"] for row in rows)
    assert bf16 == 0 < nvfp4


def test_the_table_of_memory() -> None:
    kernels = {"scan": True}
    planned = {"exit_code": 0, "memory": {"peak": 9 * 2**30}, "kernels": kernels}
    measured = {"exit_code": 0, "peak": 10 * 2**30, "reserved": 2**30, "kernels": kernels, "backend": "emulated"}
    other = {**measured, "kernels": {"scan": False}}
    rows: list[dict[str, Any]] = [
        {"overrides": ["model=a"], "ranks": 1, "planned": planned, "measured": measured},
        {"overrides": ["model=b"], "ranks": 1, "planned": planned, "measured": other},
        {"overrides": ["model=c"], "ranks": 1, "planned": planned, "measured": {"exit_code": 1}},
    ]
    assert memory_table(rows)[1].split() == ["9.00", "10.00", "0.900", "1.00", "1", "model=a"]
    assert [row["notes"] for row in rows] == [
        [],
        ["planned with scan=True, ran False"],
        ["the measurement ended with exit code 1"],
    ]


def test_overlapping_kernels_count_once_and_gaps_are_idle() -> None:
    assert length([(0, 10), (2, 5), (20, 21)]) == 11
    kernels = [
        Ran("nvjet_sm90_tst", 0, 6_000_000),
        Ran("ncclDevKernel_AllGather", 4_000_000, 8_000_000),
        Ran("quantize_rows_kernel", 9_000_000, 10_000_000),
    ]
    lines = {line.split()[0]: line.split()[1:] for line in profile_table(kernels, 0.012)[1:]}
    assert lines["GEMMs"] == ["6.0", "50.0%", "1", "2.0"] and lines["messages"] == ["4.0", "33.3%", "1", "2.0"]
    assert lines["quantizers"] == ["1.0", "8.3%", "1", "0.0"] and lines["idle"] == ["3.0", "25.0%"]


def test_a_gap_is_the_hosts_only_as_far_as_it_asked_late() -> None:
    first = Ran("a", 0, 10, asked=0)
    assert late([first, Ran("b", 30, 40, asked=5)]) == 0  # it was asked for in time and waited for something else
    assert late([first, Ran("b", 30, 40, asked=25)]) == 15
    assert late([first, Ran("b", 30, 40)]) == late([]) == 0
