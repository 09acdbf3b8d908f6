"""make test-gpu without a GPU: which steps it has, what it says of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import test_gpu
from scripts.test_gpu import STEPS, Result, Step, run, table

ROOT = Path(__file__).resolve().parents[1]


def test_every_step_names_files_that_exist() -> None:
    named = [part for step in STEPS for part in step.command if part.endswith(".py")]
    assert named and all((ROOT / part).is_file() for part in named)


def test_every_file_of_gpu_tests_is_in_a_step() -> None:
    named = {part for step in STEPS for part in step.command}
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= named


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("print('3 done')", "passed", "3 done"),
        ("print('nothing')", "FAILED", "exit code 0; nothing"),
        ("print('3 done'); print('then not'); raise SystemExit(1)", "FAILED", "exit code 1; then not"),
        ("import time; time.sleep(60)", "FAILED", "not done in time"),
    ],
)
def test_a_step_passes_only_with_its_summary(tmp_path: Path, program: str, verdict: str, detail: str) -> None:
    step = Step("a step", ("-c", program), r"^\d+ done")
    result = run(step, "0", 1, tmp_path, tmp_path, time.perf_counter() + (20 if "sleep" not in program else 0.5))
    assert (result.verdict, result.detail) == (verdict, detail)


def test_what_cannot_run_is_named(tmp_path: Path) -> None:
    two = Step("on two", ("-c", ""), ".*", gpus=2)
    assert run(two, "0,1", 1, tmp_path, tmp_path, 0.0) == Result(two, "not run", "needs 2 GPUs")
    other = Step("with more", ("-c", ""), ".*", needs=("no_such_package",))
    assert run(other, "0", 1, tmp_path, tmp_path, 0.0).detail == "no_such_package not installed"


def test_what_is_tuned_here_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    monkeypatch.setattr(test_gpu, "table", lambda results, *_: results_of.extend(results))
    results_of: list[Result] = []
    program = "import os; folder = os.environ['XDG_CACHE_HOME']; print('in', folder, os.path.isdir(folder))"
    monkeypatch.setattr(test_gpu, "STEPS", [Step(name, ("-c", program), r"^in .*") for name in "ab"])
    assert test_gpu.main(["--output", str(tmp_path / "results"), "--commit", "abc"]) == 0
    first, second = (result.detail.split() for result in results_of)
    assert first == second and first[2] == "True"
    assert first[1] != str(tmp_path / "mine") and not Path(first[1]).exists()


def test_the_table() -> None:
    step = Step("a | b", (sys.executable,), ".*")
    printed = table([Result(step, "passed", "1 | 2", 3.4)], "a chip", 2, "abc", 5.0)
    assert "Commit abc, 2 x a chip" in printed
    assert "| passed | 1 \\| 2 | 3 |" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert test_gpu.main([]) == 2
    assert "there is no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        test_gpu.main(["--only", "nothing"])
