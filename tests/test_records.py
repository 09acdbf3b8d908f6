"""The tables of docs/research.md are those of docs/records."""

import json
import re
import tarfile

from tests.programs import ROOT

RECORDS = ROOT / "docs" / "records"


def final_losses(run: str) -> dict[str, float]:
    with tarfile.open(RECORDS / f"{run}.tar.xz") as archive:
        metrics = archive.extractfile(f"{run}/metrics.jsonl")
        assert metrics is not None
        return [record["losses"] for record in map(json.loads, metrics) if record["kind"] == "validation"][-1]


def test_the_losses_of_the_page_are_those_of_the_records() -> None:
    rows = re.findall(r"^\| `(\w+_s\d)` \| \d+ \|(.*)\|$", (ROOT / "docs" / "research.md").read_text(), re.MULTILINE)
    assert len(rows) == len([*RECORDS.glob("*_s[0-9].tar.xz")])
    for run, cells in rows:
        losses, base = final_losses(run), re.sub(r"(nvfp4_best|nvfp4_gates|nvfp4|control|mxfp8)_", "bf16_", run)
        mean = sum(losses.values()) / len(losses)
        expected = [f"{value:.4f}" for value in (losses["prose"], losses["code"], mean)]
        of_bf16 = sum(final_losses(base).values()) / len(losses)
        gap = f"{mean - of_bf16:.4f} ({100 * (mean / of_bf16 - 1):.2f}%)" if base != run else ""
        assert [cell.strip() for cell in cells.split("|")] == [*expected, gap], run


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
