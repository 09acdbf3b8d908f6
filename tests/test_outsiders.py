"""What CONTRIBUTING.md says about adding to the project, done on a copy of the tree: the run trains with the right
numbers, or is refused in one line.

The steps are the page's own: each block of code, with the sentence above it that says where it belongs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from scripts import fingerprint
from tests.programs import ROOT
from tests.test_pretrain import records

pytestmark = pytest.mark.slow

COPIED = ["configs", "data", "exchange", "inference", "megatron_fp4", "models", "pretrain.py"]
STEP = re.compile(
    r"(?:`(?P<new>[^`\n]+)`, a new file|In `(?P<path>[^`\n]+)`, (?P<how>below|instead of) `(?P<line>[^`\n]+)`):\n\n"
    r"```\w+\n(?P<code>.*?)```",
    re.DOTALL,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a run imports."""
    (tmp_path / "tree").mkdir()
    for path in (ROOT / name for name in COPIED):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "tree" / path.name)
    return tmp_path / "tree"


def follow(page: str, tree: Path, **changes: str) -> None:
    """Take the steps of the section "Add `page`". changes: other texts for some of it."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## Add {page}\n")[2].partition("\n## ")[0]
    for old, new in changes.items():
        assert section.count(old) == 1
        section = section.replace(old, new)
    steps = list(STEP.finditer(section))
    assert len(steps) == section.count("```") // 2
    for step in steps:
        if step["new"]:
            (tree / step["new"]).write_text(step["code"])
            continue
        lines = (tree / step["path"]).read_text().splitlines(keepends=True)
        [place] = [index for index, line in enumerate(lines) if step["line"] in line]
        lines[place : place + 1] = [step["code"]] if step["how"] == "instead of" else [lines[place], step["code"]]
        (tree / step["path"]).write_text("".join(lines))


class Runs:
    """Short runs of the tree, as those of scripts/fingerprint.py."""

    def __init__(self, tree: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree, self.scratch, self._monkeypatch = tree, scratch, monkeypatch

    def __call__(self, name: str, ranks: int, *overrides: str) -> str:
        """The fingerprint, or after FAILED what was printed."""
        self._monkeypatch.setitem(fingerprint.CASES, name, (ranks, " ".join(["train.steps=3", *overrides])))
        line = fingerprint.fingerprint(name, self.tree, self.scratch)
        return line.partition("FAILED\n")[2] if "FAILED\n" in line else line.removeprefix(name).strip()

    def folder(self, name: str) -> Path:
        return self.scratch / str([*fingerprint.CASES].index(name))


@pytest.fixture
def runs(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tree, tmp_path, monkeypatch)


def test_a_block(runs: Runs) -> None:
    """It has the bits of the block whose formula it repeats; it has no published form."""
    follow("a block", runs.tree)
    assert runs("own", 1, "model.pattern=MP*PM-") == runs("MLP", 1, "model.pattern=M-*-M-")
    refused = runs("export", 1, "--check", "model.pattern=MP*PM-", "checkpoint.export_interval=3")
    assert len(refused.splitlines()) == 1 and "model.pattern=MP*PM- has plain FFN blocks; leave it out" in refused


def test_a_callback_that_decides(runs: Runs) -> None:
    """It skips just the steps that it does not accept."""
    follow("a callback", runs.tree, **{"limit=2.0": "limit=9e9"})

    def train(name: str) -> dict[float, bool]:
        """Gradient norm of each step -> whether it was skipped."""
        line = runs(name, 1)
        assert "  state " in line, line
        return {step["grad_norm"]: step["skipped"] for step in records(runs.folder(name), "step")}

    free, program = train("free"), runs.tree / "pretrain.py"
    limit = sorted(free)[1]  # of three
    program.write_text(program.read_text().replace("limit=9e9", f"limit={limit}"))
    limited = train("limited")
    assert not any(free.values()) and any(limited.values())
    assert all(skipped == (norm > limit) for norm, skipped in limited.items())


@pytest.mark.parametrize("divides", ['("tokens",)', '("batch", "layers")'])
def test_a_mesh_axis_that_divides_nothing_is_refused(divides: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("a mesh axis", runs.tree, **{'"mirror", ("batch",)': f'"mirror", {divides}'})
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert runs("axis", 1, "--check", "parallel.mirror=2") == (
        "pretrain.py: parallel.mirror=2, but nothing in this run is divided among the ranks of that axis; set "
        "parallel.mirror=1\n"
    )


def test_a_mesh_axis_of_other_micro_batches_follows_from_its_row(runs: Runs) -> None:
    """Losses, norms, weights and moments have the bits of two replicas."""
    follow("a mesh axis", runs.tree)
    assert runs("axis", 2, "parallel.mirror=2") == runs("replicas", 2, "parallel.replicate=2")


SGD = """
        sgd = torch.optim.SGD(groups, momentum=0.9, foreach=False)
        for parameter in optimizer_parameters(sgd):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return sgd
"""


def test_an_optimizer(runs: Runs) -> None:
    """It has the losses of torch's, is named and planned, resumes on two ranks, and AdamW does not resume it."""
    follow("an optimizer", runs.tree)
    common = ("optimizer.name=momentum", "optimizer.weight_decay=0", "optimizer.lr=0.02", "checkpoint.interval=2")
    whole = runs("momentum", 1, *common)
    [start] = records(runs.folder("momentum"), "run")
    assert start["optimizer"] == "Momentum"
    resume = f"checkpoint.resume={runs.folder('momentum')}/checkpoints/step_00000002"
    assert float(runs("resumed", 2, *common, resume).split()[0]) == pytest.approx(float(whole.split()[0]), rel=1e-5)
    refused = runs("adamw", 1, *common[1:], resume)
    assert "was saved by another optimizer: the checkpoint has no tensor optimizer." in refused
    assert "set the optimizer back, or begin another run.dir from its weights" in refused
    builder = runs.tree / "megatron_fp4/training/optimizer.py"
    builder.write_text(builder.read_text().replace("        return Momentum(groups, config.lr)", SGD))
    assert runs("sgd", 1, *common).split()[:3] == whole.split()[:3]  # the last loss, and the hash of all
