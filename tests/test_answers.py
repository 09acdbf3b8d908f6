"""What pretrain.py answers without torch: programs in which importing it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4 import __version__
from megatron_fp4.answers import answer
from megatron_fp4.config.help import help_text
from tests.programs import ROOT

WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
run, program, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program
getattr(runpy, run)(program, run_name="__main__")
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", [("run_path", "pretrain.py"), ("run_module", "megatron_fp4")])
def test_the_version_needs_no_torch(program: tuple[str, str]) -> None:
    done = without_torch(*program, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"megatron_fp4 {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["train.steps=3", "-h"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    done = without_torch("run_path", "pretrain.py", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, help_text(ROOT / "configs") + "\n", "")


def test_a_run_does() -> None:
    """Else the tests above would say nothing."""
    assert "import of torch halted" in without_torch("run_path", "pretrain.py", "train.steps=3").stderr


def test_nothing_else_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["train.steps=3", "--check"], ROOT / "configs") is None
    assert capsys.readouterr() == ("", "")


def test_a_configuration_without_help_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["--help"], tmp_path) == 2
    assert capsys.readouterr() == (
        "",
        f"pretrain.py: config_dir={tmp_path} has no config.yaml; name the folder that holds it\n",
    )
