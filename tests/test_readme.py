"""The links between the pages of the documentation, and its notebook."""

import contextlib
import io
import json
import re
from pathlib import Path

from tests.programs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"(?s)^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_targets_of_links_exist() -> None:
    for page in PAGES:
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(other), f"{page.name} points to {target}#{anchor}"


def test_the_notebook_prints_what_it_shows() -> None:
    cells, names = json.loads((ROOT / "docs/quantizers.ipynb").read_text())["cells"], dict[str, object]()
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert printed.getvalue() == shown, cell["source"]


def test_every_page_and_picture_is_linked() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "pictures").iterdir()]:
        assert f"{path.name})" in text, f"no page points to {path.name}"
