"""The commit that runs record."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_fp4 import __version__
from megatron_fp4.runtime import revision as module


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
