"""The pages as a whole: the file tree is the repository's, links lead somewhere, README can be read in a minute."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def tree() -> set[str]:
    """Paths of the tree in docs/files.md: two spaces of indent a level, folders end in a slash, then a description."""
    block = (ROOT / "docs" / "files.md").read_text().split("```", 2)[1]
    paths: set[str] = set()
    folders: list[str] = []
    for line in filter(str.strip, block.splitlines()):
        match = re.match(r"( *)(\S+)  +\S", line)
        assert match, f"no description: {line!r}"
        depth, name = len(match[1]) // 2, match[2]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            path = "".join(folders) + name
            assert path not in paths, f"{path} has two lines"
            paths.add(path)
    return paths


def test_every_source_file_has_its_line() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = {p for p in tracked if p.endswith(".py") and not p.startswith("tests/") and not p.endswith("__init__.py")}
    listed = {p for p in tree() if p.endswith(".py")}
    assert sources - listed == set(), "missing in docs/files.md"
    assert listed - sources == set(), "in docs/files.md, but not in the repository"


def anchors(page: Path) -> set[str]:
    """What `#...` may name on a page, as GitHub makes it of its headings."""
    text = re.sub(r"(?s)^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_pictures_exist() -> None:
    for page in PAGES:
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(other), f"{page.name} points to {target}#{anchor}"


def test_every_page_and_picture_is_shown_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "pictures").iterdir()]:
        assert f"{path.name})" in text, f"no page points to {path.name}"


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 110 and lines.index("## Two commands") < 15
