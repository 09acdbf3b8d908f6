"""The commit that runs carry."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fp4 import __version__
from megatron_fp4.runtime import revision as module
from megatron_fp4.runtime.revision import revision


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    revision.cache_clear()
    yield tmp_path
    revision.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_has_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    git(checkout, "init")
    (checkout / "a").write_text("one")
    git(checkout, "add", "a")
    git(checkout, "commit", "-m", "first")
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert revision() == commit
    found = []
    for text in ("two", "three"):
        (checkout / "a").write_text(text)
        assert revision() == (found or [commit])[-1]  # asked once a process
        revision.cache_clear()
        found.append(revision())
    assert all(each.startswith(f"{commit}+") and len(each) == 21 for each in found) and found[0] != found[1]


def test_without_git_it_is_the_version(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision() == f"version {__version__}"
    git(checkout, "init")  # no commit yet
    revision.cache_clear()
    assert revision() == f"version {__version__}"
    monkeypatch.setenv("PATH", "")
    revision.cache_clear()
    assert revision() == f"version {__version__}"
