"""README, quickstart and recipes can be followed in one clone: their commands run in this order. Runs have four steps,
a smaller model and a smaller vocabulary."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_program
from tests.test_packaging import copy_tracked

pytestmark = pytest.mark.slow(seconds=35)
PAGES = ["README.md", "docs/quickstart.md", "docs/recipes.md"]
# What needs GPUs, a cluster, a download, or minutes; price.py has tests of its own.
LEFT_OUT = ("nemotron_h_", "backend=", "docker ", "sbatch ", "make ", "pip ", "source ", "price.py", "evaluate.py")
CHANGED = {"step_00000200": "step_00000002", "switch.when=250": "switch.when=3", "4096": "512"}
SHORT = [
    *("train.steps=4", "checkpoint.interval=2", "validation.interval=0", "validation.num_samples=2", "run.device=cpu"),
    *("model.pattern=M-*-", "model.hidden_dim=64", "model.ffn_dim=64", "model.mamba_num_heads=2"),
    *("train.sequence_length=64", "train.global_batch_size=4", "train.micro_batch_size=2", "logging.report=false"),
    *("model.vocab_size=512", "data.num_workers=0", "logging.tensorboard=false"),
]
# Prints the words of commands instead of running them.
RECORD = r"""
show() { printf '%s\n' "$@" ---; }
for name in python torchrun; do eval "$name() { show $name \"\$@\"; }"; done
"""


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command of a page's blocks, loops and continued lines included."""
    found = list[list[str]]()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", " ", block)
        lines = [line for line in joined.splitlines() if not any(word in line for word in LEFT_OUT)]
        if language not in ("", "bash") or not any("python" in line or "torchrun" in line for line in lines):
            continue
        shell = "\n".join(re.sub(r"\bWORLD_SIZE=\d+ ", "", line) for line in lines)
        printed = subprocess.run(["bash", "-ec", RECORD + shell], capture_output=True, text=True, check=True).stdout
        found += [words.splitlines() for words in printed.split("\n---\n") if words]
    return found


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that git tracks, as they are now, and a corpus."""
    copy_tracked(tmp_path, without="docs/records/")
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "corpus").mkdir()
    for name, folder in (("web", "email"), ("notes", "json")):
        texts = [path.read_text() for path in sorted(Path(os.__file__).with_name(folder).glob("*.py"))]
        lines = [json.dumps({"text": part}) for text in texts for part in text.split("\n\n") if len(part) > 40]
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_can_be_followed_in_one_clone(clone: Path, corpus: Path) -> None:
    (described,) = re.findall(r"^```yaml\n(.*?)^```", (clone / PAGES[1]).read_text(), re.MULTILINE | re.DOTALL)
    (clone / "configs/data/my_corpus.yaml").write_text(described)
    commands = [words for page in PAGES for words in commands_of(clone / page)]
    assert len(commands) > 20
    # Data first, which README says to prepare by the quickstart.
    for words in sorted(commands, key=lambda words: "scripts/prepare_data.py" not in words):
        program = next(index for index, word in enumerate(words) if word.endswith(".py"))
        given = [re.sub("|".join(CHANGED), lambda found: CHANGED[found[0]], word) for word in words[program:]]
        if given[0] == "pretrain.py" and "--help" not in given:
            given += [*SHORT, f"data.cache_dir={corpus}"]
        done = run_program([clone / given[0], *given[1:]], timeout=120)
        assert done.returncode == 0, (given, done.stdout[-500:], done.stderr)
