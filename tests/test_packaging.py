"""The content of a wheel, and the installed command, also beside other packages named data or models."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import megatron_fp4
from megatron_fp4 import __main__ as command
from tests.programs import ROOT
from tests.test_pretrain import small

__all__ = ["small"]
# Runs the command with several command lines, one after the other.
PROGRAM = """
import sys
from megatron_fp4.__main__ import main
for words in (["no_such_command"], ["prepare-data", "--help"], ["--check", *sys.argv[1:]]):
    sys.argv = ["megatron-fp4", *words]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""


def test_which_script_the_command_runs() -> None:
    train, prepare = ROOT / "pretrain.py", ROOT / "scripts" / "prepare_data.py"
    assert command.program([]) == command.program(["train"]) == (train, [])
    for one in ("model=tiny", "--check", "+a=1", "a='b c'"):
        assert command.program([one, "x=1"]) == (train, [one, "x=1"])
    for name in ("prepare_data", "prepare-data"):
        assert command.program([name, "--help"]) == (prepare, ["--help"])
    with pytest.raises(ValueError, match=r"trian is no override .* commands: train .*prepare_data"):
        command.program(["trian"])


def tracked() -> list[str]:
    """The files of the checkout that git does not ignore."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [name for name in listed.split() if (ROOT / name).exists()]


def copy_tracked(folder: Path, without: str) -> None:
    """Copy them to `folder`, without those whose path begins so."""
    for name in (name for name in tracked() if not name.startswith(without)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of a wheel built from the repository's files."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy_tracked(copy, without="tests/")
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_has_all_files_in_one_package(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"megatron_fp4", info.name}
    assert (info / "top_level.txt").read_text().split() == ["megatron_fp4"]
    assert "megatron-fp4 = megatron_fp4.__main__:main" in (info / "entry_points.txt").read_text()
    other = ("tests/", "docs/", ".ci/", ".github/", "setup.py")
    files = [name for name in tracked() if not name.startswith(other) and ("/" in name or name.endswith(".py"))]
    expected = {name if name.startswith("megatron_fp4/") else f"megatron_fp4/rooms/{name}" for name in files}
    there = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert expected <= there, f"missing: {sorted(expected - there)}"


@pytest.mark.slow
def test_the_installed_command_runs_beside_other_packages_of_the_same_names(
    installed: Path, tmp_path: Path, small: list[str]
) -> None:
    """The others are in the current folder and first on PYTHONPATH. No extra is installed."""
    for name in ("data", "models", "scripts", "exchange"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('of somebody else')\n")
    (tmp_path / "pretrain.py").write_text("raise RuntimeError('of somebody else')\n")
    for name in ("wandb", "datasets", "pyarrow", "transformers", "safetensors", "lm_eval", "s3fs"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('an extra')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{installed}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *small, f"run.dir={tmp_path / 'run'}"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("megatron-fp4: no_such_command is no override")
    assert done.stdout.startswith("ended with 2\n") and "--train-tokenizer" in done.stdout
    assert "\nok: 1 rank" in done.stdout


def test_the_citation_has_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == megatron_fp4.__version__
