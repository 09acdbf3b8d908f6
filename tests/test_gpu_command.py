"""The command of make test-gpu, without a GPU: its steps and how it reports them."""

import time
from pathlib import Path

import pytest
import torch

from scripts.test_gpu import STEPS, Step, main, run
from tests.programs import ROOT


def test_steps_name_files_that_exist_and_all_gpu_tests() -> None:
    named = {part for step in STEPS for part in step.command if part.endswith(".py")}
    assert named and all((ROOT / part).is_file() for part in named)
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= named


def test_a_step_passes_only_with_its_summary(tmp_path: Path) -> None:
    def outcome(program: str, seconds: float = 300) -> tuple[str, str]:
        step = Step("a step", ("-c", program), r"^\d+ done")
        return run(step, "0", 1, tmp_path, str(tmp_path), time.perf_counter() + seconds)[:2]

    assert outcome("print('3 done')") == ("passed", "3 done")
    assert outcome("print('nothing')") == ("FAILED", "exit code 0; nothing")
    assert outcome("print('3 done'); print('not'); raise SystemExit(1)") == ("FAILED", "exit code 1; not")
    assert outcome("import time; time.sleep(60)", 0.5) == ("FAILED", "not done in time")


def test_steps_that_cannot_run_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, other = Step("on two", ("-c", ""), ".*", gpus=2), Step("more", ("-c", ""), ".*", needs=("no_such_package",))
    assert run(two, "0,1", 1, tmp_path, "", 0.0) == ("not run", "needs 2 GPUs", 0.0)
    assert run(other, "0", 1, tmp_path, "", 0.0) == ("not run", "no_such_package not installed", 0.0)
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    if not torch.cuda.is_available():
        assert main([]) == 2 and "there is no CUDA device" in capsys.readouterr().err
