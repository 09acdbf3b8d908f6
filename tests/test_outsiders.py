"""What CONTRIBUTING.md says about adding to the project, done on a copy of the tree: the run trains with the right
numbers, or is refused in one line.

The steps are the page's own: each block of code, with the sentence above it that says where it belongs.
"""

import re
import shutil
from pathlib import Path
from unittest import mock

import pytest

from scripts import fingerprint
from tests.programs import ROOT
from tests.test_fingerprint import FORKED
from tests.test_pretrain import SMALL, records

pytestmark = pytest.mark.slow

COPIED = ["configs", "data", "exchange", "inference", "megatron_fp4", "models", "pretrain.py"]
SETTINGS = [*SMALL, "train.steps=3", "checkpoint.interval=3", "validation.interval=0", "data=indexed"]
SETTINGS += ["data.sources={{a:{corpus}_a}}", "data.phases=[{{name:main,blend:{{a:1}}}}]"]
STEP = re.compile(
    r"(?:`(?P<new>[^`\n]+)`, a new file|In `(?P<path>[^`\n]+)`, (?P<how>below|instead of) `(?P<line>[^`\n]+)`):\n\n"
    r"```\w+\n(?P<code>.*?)```",
    re.DOTALL,
)


class Tree:
    """A copy of what a run imports, in a folder, and short runs of it, as those of scripts/fingerprint.py."""

    def __init__(self, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scratch, self.root, self._monkeypatch = scratch, scratch / "tree", monkeypatch
        self.root.mkdir()
        fingerprint.write_corpus(scratch)
        for path in (ROOT / name for name in COPIED):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, self.root / path.name)

    def follow(self, page: str, **changes: str) -> None:
        """Take the steps of the section "Add `page`". changes: other texts for some of it."""
        section = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## Add {page}\n")[2].partition("\n## ")[0]
        for old, new in changes.items():
            assert section.count(old) == 1
            section = section.replace(old, new)
        steps = list(STEP.finditer(section))
        assert len(steps) == section.count("```") // 2
        for step in steps:
            path = self.root / (step["new"] or step["path"])
            lines = [] if step["new"] else path.read_text().splitlines(keepends=True)
            [place] = [index for index, line in enumerate(lines) if step["line"] in line] if lines else [0]
            lines[place : place + 1] = [*(lines[place : place + 1] if step["how"] == "below" else []), step["code"]]
            path.write_text("".join(lines))

    def run(self, name: str, ranks: int, *overrides: str, changed: bool = True) -> str:
        """The fingerprint, or after FAILED what was printed. changed: False: of the checkout instead of the copy."""
        self._monkeypatch.setitem(fingerprint.CASES, name, (ranks, " ".join([*SETTINGS, *overrides])))
        with mock.patch.object(fingerprint, "subprocess", FORKED):
            line = fingerprint.fingerprint(name, self.root if changed else ROOT, self.scratch)
        return line.partition("FAILED\n")[2] if "FAILED\n" in line else line.removeprefix(name).strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_block(tree: Tree) -> None:
    """It has the bits of the block whose formula it repeats."""
    tree.follow("a block")
    assert tree.run("own", 1, "model.pattern=MP*PM-") == tree.run("MLP", 1, "model.pattern=M-*-M-", changed=False)


def test_a_callback_that_decides(tree: Tree) -> None:
    """It skips just the steps that it does not accept."""

    def train(name: str, changed: bool) -> dict[float, bool]:
        """Gradient norm of each step -> whether it was skipped."""
        line = tree.run(name, 1, changed=changed)
        assert "  state " in line, line
        run_dir = tree.scratch / str([*fingerprint.CASES].index(name))
        return {step["grad_norm"]: step["skipped"] for step in records(run_dir, "step")}

    free = train("free", changed=False)
    limit = sorted(free)[1]  # of three
    tree.follow("a callback", **{"limit=2.0": f"limit={limit}"})
    limited = train("limited", changed=True)
    assert not any(free.values()) and any(limited.values())
    assert all(skipped == (norm > limit) for norm, skipped in limited.items())


def test_a_mesh_axis_that_divides_nothing_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.follow("a mesh axis", **{'"mirror", ("batch",)': '"mirror", ("tokens",)'})
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert tree.run("axis", 1, "--check", "parallel.mirror=2") == (
        "pretrain.py: parallel.mirror=2, but nothing in this run is divided among the ranks of that axis; set "
        "parallel.mirror=1\n"
    )


def test_a_mesh_axis_of_other_micro_batches_follows_from_its_row(tree: Tree) -> None:
    """Losses, norms, weights and moments have the bits of two replicas."""
    tree.follow("a mesh axis")
    assert tree.run("axis", 2, "parallel.mirror=2") == tree.run("replicas", 2, "parallel.replicate=2", changed=False)
    both = tree.run("axis", 1, "--check", "parallel.mirror=2", "parallel.replicate=2")
    assert "parallel.mirror=2 and parallel.replicate=2: gradients are summed over one such axis" in both


SGD = """
        sgd = torch.optim.SGD(groups, config.lr, momentum=0.9)
        for parameter in optimizer_parameters(sgd):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return sgd
"""


def test_an_optimizer(tree: Tree) -> None:
    """It has the bits of torch's."""
    tree.follow("an optimizer")
    common = ("optimizer.name=momentum", "optimizer.weight_decay=0", "optimizer.lr=0.02")
    own = tree.run("momentum", 1, *common)
    checkpoint = tree.scratch / str([*fingerprint.CASES].index("momentum")) / "checkpoints"
    newest = checkpoint / (checkpoint / "latest").read_text().strip()
    refused = tree.run("adamw", 1, *common[1:], f"checkpoint.resume={newest}", "train.steps=9")
    assert "was saved by another optimizer: the checkpoint has no tensor optimizer." in refused
    checked = tree.run("adamw", 1, *common[1:], f"checkpoint.resume={newest}", "train.steps=9", "--check")
    assert checked.splitlines()[-1] == refused.splitlines()[-1]
    builder = tree.root / "megatron_fp4/training/optimizer.py"
    builder.write_text(builder.read_text().replace("        return Momentum(groups, config.lr)", SGD))
    assert tree.run("sgd", 1, *common).split()[:3] == own.split()[:3]  # the last loss, and the hash of all
