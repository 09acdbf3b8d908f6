"""The command of make test-gpu, without a GPU: its steps and how it reports them."""

from scripts.test_gpu import STEPS
from tests.programs import ROOT


def test_steps_name_files_that_exist_and_all_gpu_tests() -> None:
    named = {part for step in STEPS for part in step.command if part.endswith(".py")}
    assert named and all((ROOT / part).is_file() for part in named)
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= named
