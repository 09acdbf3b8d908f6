"""What pretrain.py can answer without torch, in programs where importing torch fails; and sweeps of several runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fp4 import __version__
from megatron_fp4.answers import answer
from megatron_fp4.config.help import help_text
from megatron_fp4.multirun import multirun
from tests.composing import CONFIGS
from tests.programs import ROOT

WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
run, program, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program
getattr(runpy, run)(program, run_name="__main__")
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-c", WITHOUT_TORCH, *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_version_and_help_need_no_torch() -> None:
    version, usage = f"megatron_fp4 {__version__}\n", help_text(ROOT / "configs") + "\n"
    for program, message in (
        (("run_path", "pretrain.py", "--version"), version),
        (("run_module", "megatron_fp4", "--version"), version),
        (("run_path", "pretrain.py", "train.steps=3", "-h"), usage),
    ):
        done = without_torch(*program)
        assert (done.returncode, done.stdout, done.stderr) == (0, message, "")
    # A run does need torch; otherwise the test would prove nothing.
    assert "has no torch; run `make setup`" in without_torch("run_path", "pretrain.py", "train.steps=3").stderr


def test_the_configuration_is_printed_and_other_arguments_are_left_to_the_run(capsys, tmp_path: Path) -> None:
    assert answer(["train.steps=3", "--check"], CONFIGS) is None and capsys.readouterr() == ("", "")
    assert answer(["train.steps=3", "--cfg", "job"], CONFIGS) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 3
    reference = "data.cache_dir=${oc.env:HOME}"
    for more, shown in (([], "${oc.env:HOME}"), (["--resolve"], os.environ["HOME"])):
        assert answer([reference, "--cfg", "job", *more], CONFIGS) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["cache_dir"] == shown
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text("name: mine\n")
    command = [sys.executable, "pretrain.py", "--info", "defaults", f"--config-dir={tmp_path}", "precision=mine"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0 and re.search(r"\| precision/mine .*\| precision ", told.stdout)
    assert answer(["--info", "keys"], CONFIGS) == 2 and "write one of all, config" in capsys.readouterr().err
    assert answer(["--cfg", "all"], CONFIGS) == 2 and answer(["--cfg", "job", "train.stepz=3"], CONFIGS) == 2


@pytest.mark.parametrize("program", ["pretrain.py", "scripts/compare.py"])
def test_missing_packages_give_one_line(program: str) -> None:
    bare = [sys.executable, "-S", "-E", ROOT / program, "train.steps=3"]  # without site-packages
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{Path(program).name}: {sys.executable} has no torch, numpy, hydra-core")
    assert "source .venv/bin/activate" in done.stderr


def test_a_sweep_runs_all_combinations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "pretrain.py"
    program.write_text("import sys; print(*sys.argv[1:]); sys.exit('precision=mine' in sys.argv)")
    for group, text in {"precision": "name: mine\n", "hydra/sweeper": "defaults: [basic]\n"}.items():
        (tmp_path / group / "of" / group).mkdir(parents=True)
        (tmp_path / group / "of" / group / "mine.yaml").write_text(text)
    folders = [f"--config-dir={tmp_path / group / 'of'}" for group in ("precision", "hydra/sweeper")]
    given = ["run.seed=1,2", "precision=nvfp4,mine", "train.steps=3", "run.dir=sweep", "hydra/sweeper=mine"]
    assert multirun([*given, *folders], program, CONFIGS) == 1
    started = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("---")]
    assert [line.rpartition(" ")[0] for line in started] == [
        f"run.seed={seed} precision={precision} train.steps=3 {' '.join(folders)}"
        for seed in (1, 2)
        for precision in ("nvfp4", "mine")
    ]
    names = sorted(path.name for path in Path("sweep").iterdir() if path.is_dir())
    assert names == [f"precision_{precision}-run.seed_{seed}" for precision in ("mine", "nvfp4") for seed in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--multirun"], "--multirun has nothing to vary; give a key several values"),
        (["-m", "run.seed=1,2", "hydra/launcher=submitit_slurm"], "hydra/launcher=submitit_slurm needs the package"),
        (["-m", "run.seed=1,2", "hydra/launcher=joblib"], "hydra/launcher=joblib: there is no hydra/launcher"),
        (["-m", "run.seed=1,2", "10"], "cannot parse '10'"),
        (["-m", "train.steps=1,x"], "train.steps=x: Input should be a valid integer"),
        (["-m", "precision=nvfp4,nvfp5"], "precision=nvfp5: there is no precision config of that name"),
    ],
)
def test_a_sweep_is_refused_before_it_starts(arguments: list[str], message: str, capsys) -> None:
    assert answer(arguments, CONFIGS) == 2
    assert capsys.readouterr().err.startswith(f"pretrain.py: {message}")
