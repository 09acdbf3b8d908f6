"""What needs no GPU: the planned half, arguments, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import compare_memory
from scripts.compare_memory import table
from tests.programs import run_program

SMALL = ("train.sequence_length=64", "precision.switch.when=never")


Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """The command in this process, the processes of its cases from a fork server: exit code, output, errors."""

    def child(command: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        done = run_program(command[1:], env)
        print(done.stderr, end="", file=sys.stderr)
        return done

    def compare(*arguments: str, ranks: int = 1) -> tuple[int, str, str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        code = compare_memory.main([*arguments])
        return (code, *capsys.readouterr())

    monkeypatch.setattr(compare_memory.subprocess, "run", child)
    return compare


@pytest.mark.slow
def test_the_planned_half_of_several_cases(compare: Compare, tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    cases = [" ".join((*SMALL, "train.global_batch_size=16", f"precision={name}")) for name in ("bf16", "nvfp4")]
    arguments = [argument for case in cases for argument in ("--case", case)]
    code, printed, errors = compare("--plan-only", "--output", str(output), *arguments, ranks=2)
    assert code == 0, errors
    bf16, nvfp4 = json.loads(output.read_text())
    for row, case in zip((bf16, nvfp4), cases, strict=True):
        assert row["overrides"] == case.split() and row["ranks"] == 2 and "measured" not in row
        memory = row["planned"]["memory"]
        assert memory["peak"] > memory["parameters"] + memory["optimizer"] + memory["workspaces"]
        assert case in printed
    assert bf16["planned"]["memory"]["quantized_weights"] == 0 < nvfp4["planned"]["memory"]["quantized_weights"]


@pytest.mark.slow
def test_mistakes_are_one_line(compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = compare("--plan-only", "train.global_batch_size=7")
    assert code == 2 and "train.global_batch_size=7" in errors and "Traceback" not in errors
    with pytest.raises(SystemExit) as end:
        compare("--case", "model=tiny", "precision=bf16")
    assert end.value.code == 2 and "precision=bf16: put it into the quotes" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(compare: Compare) -> None:
    code, _, errors = compare("model=tiny")
    assert code == 2 and "--plan-only" in errors and len(errors.splitlines()) == 1


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
