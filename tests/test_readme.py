"""The README's file tree is the repository's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tree() -> set[str]:
    """Paths of the README's tree: two spaces of indent a level, folders end in a slash, then a description."""
    text = (ROOT / "README.md").read_text()
    block = text.split("## Files", 1)[1].split("```", 2)[1]
    paths, folders = set(), []
    for line in filter(str.strip, block.splitlines()):
        match = re.match(r"( *)(\S+)  +\S", line)
        assert match, f"no description: {line!r}"
        depth, name = len(match[1]) // 2, match[2]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.add("".join(folders) + name)
    return paths


def test_every_source_file_has_its_line() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = {p for p in tracked if p.endswith(".py") and not p.startswith("tests/") and not p.endswith("__init__.py")}
    listed = {p for p in tree() if p.endswith(".py")}
    assert sources - listed == set(), "missing in the README's tree"
    assert listed - sources == set(), "in the README's tree, but not in the repository"


def test_links_and_pictures_exist() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
