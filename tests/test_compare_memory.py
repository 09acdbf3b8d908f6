"""What needs no GPU: the planned half, arguments, and the table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.compare_memory import table
from tests.programs import run_program

SMALL = ("train.sequence_length=64", "precision.switch.when=never")


def compare(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return run_program(["scripts/compare_memory.py", *arguments], {**os.environ, "WORLD_SIZE": str(ranks)})


@pytest.mark.slow
def test_the_planned_half_of_several_cases(tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    cases = [" ".join((*SMALL, "train.global_batch_size=16", f"precision={name}")) for name in ("bf16", "nvfp4")]
    arguments = [argument for case in cases for argument in ("--case", case)]
    done = compare("--plan-only", "--output", str(output), *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    bf16, nvfp4 = json.loads(output.read_text())
    for row, case in zip((bf16, nvfp4), cases, strict=True):
        assert row["overrides"] == case.split() and row["ranks"] == 2 and "measured" not in row
        memory = row["planned"]["memory"]
        assert memory["peak"] > memory["parameters"] + memory["optimizer"] + memory["workspaces"]
        assert case in done.stdout
    assert bf16["planned"]["memory"]["quantized_weights"] == 0 < nvfp4["planned"]["memory"]["quantized_weights"]


@pytest.mark.slow
def test_mistakes_are_one_line() -> None:
    done = compare("--plan-only", "train.global_batch_size=7")
    assert done.returncode == 2 and "train.global_batch_size=7" in done.stderr and "Traceback" not in done.stderr
    done = compare("--case", "model=tiny", "precision=bf16")
    assert done.returncode == 2 and "precision=bf16: put it into the quotes" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = compare("model=tiny")
    assert done.returncode == 2 and "--plan-only" in done.stderr and "Traceback" not in done.stderr


def test_the_table() -> None:
    gib = 2**30
    kernels = {"scan": True, "compiled": True}
    planned = {"exit_code": 0, "memory": {"peak": 9 * gib}, "kernels": kernels}
    measured = {"exit_code": 0, "peak": 10 * gib, "reserved": 12 * gib, "kernels": kernels, "backend": "emulated"}
    rows: list[dict[str, Any]] = [
        {"overrides": ["model=a"], "ranks": 1, "planned": planned, "measured": measured},
        {
            "overrides": ["model=b", "data.sources={x: 1}"],
            "ranks": 2,
            "planned": planned,
            "measured": {**measured, "kernels": {**kernels, "scan": False}, "backend": "transformer_engine"},
        },
        {"overrides": ["model=c"], "ranks": 1, "planned": planned, "measured": {"exit_code": 1}},
    ]
    text = table(rows).splitlines()
    assert text[1].split() == ["9.00", "10.00", "0.900", "12.00", "1", "model=a"]
    assert rows[0]["ratio"] == 0.9 and rows[0]["notes"] == []
    assert rows[1]["notes"] == [
        "planned with scan=True, ran False",
        "planned for the emulated backend, ran transformer_engine",
    ]
    assert "'data.sources={x: 1}'" in text[2]
    assert rows[2]["ratio"] is None and rows[2]["notes"] == ["the measurement ended with exit code 1"]
