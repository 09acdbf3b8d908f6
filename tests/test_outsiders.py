"""What CONTRIBUTING.md says about adding to the project, done on a copy of the tree: the run trains with the right
numbers, or is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import fingerprint
from tests.programs import ROOT

pytestmark = pytest.mark.slow

COPIED = ["configs", "data", "exchange", "inference", "megatron_fp4", "models", "pretrain.py"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a run imports."""
    (tmp_path / "tree").mkdir()
    for path in (ROOT / name for name in COPIED):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "tree" / path.name)
    return tmp_path / "tree"


def insert(path: Path, before: str, line: str) -> None:
    """Insert `line` before the only line that begins with `before`."""
    lines = path.read_text().split("\n")
    [place] = [index for index, text in enumerate(lines) if text.startswith(before)]
    path.write_text("\n".join([*lines[:place], line, *lines[place:]]))


def add_axis(tree: Path, divides: str) -> None:
    """The first two rows of "Add a mesh axis"."""
    insert(tree / "megatron_fp4/config/schema.py", "    replicate: AtLeastOne", "    context: AtLeastOne = 1")
    row = f'    Axis("cp", "context", "context-parallel rank", {divides}),'
    insert(tree / "megatron_fp4/config/axes.py", '    Axis("tp",', row)


@pytest.mark.parametrize("divides", ['("tokens",)', '("layers",)', '("batch", "tokens")', "()"])
def test_an_axis_that_divides_nothing_is_refused(
    divides: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_axis(tree, divides)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(fingerprint.CASES, "context", (1, "--check parallel.context=2"))
    _, _, printed = fingerprint.fingerprint("context", tree, tmp_path).partition("FAILED\n")
    assert printed == (
        "pretrain.py: parallel.context=2, but nothing in this run is divided among the ranks of that axis; set "
        "parallel.context=1\n"
    )


def test_an_axis_of_other_micro_batches_follows_from_its_row(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and moments have the bits of two replicas."""
    add_axis(tree, '("batch",)')
    monkeypatch.setitem(fingerprint.CASES, "replicas", (2, "train.steps=3 parallel.replicate=2"))
    monkeypatch.setitem(fingerprint.CASES, "context", (2, "train.steps=3 parallel.context=2"))
    replicas, context = (fingerprint.fingerprint(name, tree, tmp_path) for name in ("replicas", "context"))
    assert "FAILED" not in context and context.split()[1:] == replicas.split()[1:], context
