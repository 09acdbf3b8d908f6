"""The links between the pages of the documentation, its notebook, and the tables of docs/research.md."""

import contextlib
import io
import json
import re
import tarfile
from pathlib import Path

from tests.programs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = ROOT / "docs" / "records"


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


def final_losses(run: str, packed: str = "") -> dict[str, float]:
    with tarfile.open(RECORDS / f"{packed or run}.tar.xz") as archive:
        metrics = archive.extractfile(f"{run}/metrics.jsonl")
        assert metrics is not None
        return [record["losses"] for record in map(json.loads, metrics) if record["kind"] == "validation"][-1]


def test_the_losses_of_the_page_are_those_of_the_records() -> None:
    text = (ROOT / "docs" / "research.md").read_text()
    rows = re.findall(r"^\| `(\w+_(?:5|10|15|25))` \|(.*)\|$", text, re.MULTILINE)
    cells = {f"{name}_s{seed}": cell.strip() for name, row in rows for seed, cell in enumerate(row.split("|"), start=1)}
    printed = {run: cell for run, cell in cells.items() if cell}
    assert printed.keys() == {path.name.split(".")[0] for path in RECORDS.glob("*_[0-9]*_s[0-9].tar.xz")}
    for run, cell in printed.items():
        base = re.sub(r"(nvfp4(_best|_gates)?|control|mxfp8|mxfp4(_none)?)_", "bf16_", run)
        mean, of_bf16 = (sum(losses.values()) / len(losses) for losses in (final_losses(run), final_losses(base)))
        assert cell == f"{mean:.4f}" + (f" ({100 * (mean / of_bf16 - 1):.2f}%)" if base != run else ""), run


def test_the_shares_of_nvfp4s_gap_are_those_of_the_records() -> None:
    text, found = (ROOT / "docs" / "research.md").read_text(), dict[str, list[str]]()
    for seed in (1, 2, 3):
        bf16, nvfp4, *others = (
            sum(final_losses(f"{name}_10_s{seed}").values()) for name in ("bf16", "nvfp4", "nvfp4_best", "control")
        )
        for name, value in zip(("best", "control"), others, strict=True):
            found.setdefault(name, []).append(f"{(value - bf16) / (nvfp4 - bf16):.2f}")
    best, control = ("{}, {} and {}".format(*found[name]) for name in ("best", "control"))
    assert f"`nvfp4_best` leaves {best} of `nvfp4`'s gap in seeds 1 to 3, the control {control}:" in text


def test_the_gaps_of_the_model_of_experts_are_those_of_the_records() -> None:
    text, gaps = (ROOT / "docs" / "research.md").read_text(), dict[str, list[float]]()
    for seed in (1, 2, 3, 4):
        recipes = ("bf16", "nvfp4", "nvfp4_nemotron_3")
        losses = [sum(final_losses(f"moe_{name}_s{seed}", f"moe_s{seed}").values()) for name in recipes]
        for name, loss in zip(recipes, losses, strict=True):
            gaps.setdefault(name, []).append(100 * (loss / losses[0] - 1))
    _, nvfp4, nemotron = (sum(found) / len(found) for found in gaps.values())
    assert f"| `nvfp4` above BF16 | 0.7% [0.4, 1.1] | {nvfp4:.2f}% [" in text
    assert f"**`nvfp4_nemotron_3` costs {nemotron:.2f}%**" in text
    assert f"`nvfp4` costs {min(gaps['nvfp4']):.2f} to {max(gaps['nvfp4']):.2f}%" in text
