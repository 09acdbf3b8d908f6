"""What makes a run's numbers: the commit that runs record, and what all ranks must have the same."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_fp4 import __version__
from megatron_fp4.runtime import revision as module
from tests.composing import composed
from tests.programs import ROOT, Program, environments_of_ranks
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL


def test_the_revision_is_the_commit_and_a_hash_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git or a commit it is the version."""
    revision = module.revision.__wrapped__  # without its cache
    monkeypatch.setattr(module, "_ROOT", tmp_path)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert revision() == f"version {__version__}"
    git("init")
    assert revision() == f"version {__version__}"
    (tmp_path / "a").write_text("one")
    git("add", "a")
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert revision() == commit
    found = []
    for text in ("two", "three"):
        (tmp_path / "a").write_text(text)
        found.append(revision())
    assert all(each.startswith(f"{commit}+") and len(each) == 21 for each in found) and found[0] != found[1]
    monkeypatch.setenv("PATH", "")
    assert revision() == f"version {__version__}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_rank_1", "environment", "words"),
    [
        (["parallel.tensor=2"], {}, ["has parallel.tensor=2, and rank 0 has 1"]),  # other groups of ranks
        (["checkpoint.interval=3", "train.micro_batch_size=1"], {}, ["micro_batch_size=1, ", "checkpoint.interval=3"]),
        ([], {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ["has ONEDNN_MAX_CPU_ISA=AVX2, and rank 0 has ALL"]),
    ],
)
def test_ranks_that_differ_do_not_train(
    of_rank_1: list[str], environment: Mapping[str, str], words: list[str], tmp_path: Path
) -> None:
    command = [ROOT / "pretrain.py", *SMALL, *FAST, *small_corpus(tmp_path), "train.steps=2", f"run.dir={tmp_path}/run"]
    first, second = environments_of_ranks(2)
    ranks = [Program(command, first), Program([*command, *of_rank_1], {**second, **environment})]
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], printed
    _, line = printed[0].splitlines()  # the first says that torch is being imported
    assert "rank 1 (" in line and all(text in line for text in words) and printed[1] in ("", printed[0])


def test_values_from_the_environment_are_compared_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and data may differ between nodes; a number may not."""
    found = []
    for value in ("0.00125", "0.00250"):
        monkeypatch.setenv("SOME_VALUE", value)
        overrides = ("optimizer.lr=${oc.env:SOME_VALUE}", "run.dir=/${oc.env:SOME_VALUE}", "logging.wandb=disabled")
        found.append(module.settings_of(composed.__wrapped__(*overrides, "data.cache_dir=${oc.env:SOME_VALUE}")))
        assert value not in str(found[-1])
    ((key, before, now),) = module.changed_facts(*found)
    assert key == "optimizer.lr" and before.startswith("${oc.env:SOME_VALUE} (") and before != now
    assert found[0]["run.dir"] == "/${oc.env:SOME_VALUE}" and "data.cache_dir" not in found[0]
    assert found[0]["data.phases[0].name"] == "broad" and found[0]["run.seed"] == "1234"


def test_a_commit_that_changed_no_code_is_no_change() -> None:
    before = {"code": "1", "commit": "a", "torch": "2.11"}
    assert module.changed_facts(before, {**before, "commit": "b"}) == []
    after = {"code": "2", "commit": "b", "torch": "2.11"}
    assert module.changed_facts(before, after) == [("code", "1", "2"), ("commit", "a", "b")]
