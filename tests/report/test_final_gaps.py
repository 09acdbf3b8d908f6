"""What recipes cost at the end: the table, its notes, and who is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp4.report.final_gaps import FinalGaps, draw_final, final_table, source_table
from megatron_fp4.report.held_out import HeldOut
from megatron_fp4.report.noise import student_quantile

M = 1_000_000


def run(seed: int, loss: float, *, finished: bool = True, name: str = "") -> HeldOut:
    """One of 10M tokens with two sources, 0.4 nats apart."""
    if not finished:
        return HeldOut(seed, {5 * M: 3.0}, name=name)
    sources = {10 * M: {"code": loss - 0.2, "prose": loss + 0.2}}
    return HeldOut(seed, {5 * M: 3.0, 10 * M: loss}, sources, final=10 * M, name=name)


BASE = [run(1, 2.0), run(2, 2.0), run(3, 2.0)]
GROUPS = {
    "bf16": BASE,
    "fp4": [run(1, 2.02), run(2, 2.04), run(3, 2.06)],  # 1, 2 and 3%: standard error 0.577
    "two": [run(1, 2.04), run(2, 2.08)],  # 2 and 4%
    "one": [run(3, 2.2)],  # 10%
    "late": [run(1, 2.0, finished=False, name="late_seed1")],
    "alone": [run(9, 2.0, name="alone_seed9")],
}


def test_gaps_with_their_own_errors_and_with_pooled_ones():
    found = FinalGaps(GROUPS, "bf16")
    # Squares around the means: 2 of fp4 with two degrees of freedom, 2 of `two` with one.
    assert found.shared is not None
    assert (found.shared.deviation, found.shared.freedom) == (pytest.approx((4 / 3) ** 0.5), 3)
    assert list(found.percent) == ["fp4", "two", "one"]
    fp4, two, one = found.percent.values()
    assert (fp4.mean, fp4.error, fp4.beyond_noise) == (pytest.approx(2.0), pytest.approx(3**-0.5), False)
    assert (two.mean, two.error) == (pytest.approx(3.0), pytest.approx((4 / 3) ** 0.5 / 2**0.5))
    assert one.half_width == pytest.approx(student_quantile(3) * (4 / 3) ** 0.5) and one.beyond_noise
    assert found.nats["fp4"].mean == pytest.approx(0.04)


def test_the_table_says_all_of_it():
    lines = final_table(GROUPS, "fp4").splitlines()
    assert lines[2:7] == [
        "| fp4 | 3 | +2.00% ± 0.58 | +0.0400 ± 0.0115 | no | - | - |",
        "| two | 2 | +3.00% ± 0.82* | +0.0600 ± 0.0163* | yes | +1.48% ± 0.62* | no |",
        "| one | 1 | +10.00% ± 1.15* | +0.2000 ± 0.0231* | yes | +6.80% ± 0.88* | yes |",
        "| late | 0 | - | - | - | - | - |",
        "| alone | 0 | - | - | - | - | - |",
    ]
    notes = "\n".join(lines[7:])
    assert "bf16: 3 finished runs after 10M tokens, losses 2.0000, 2.0000, 2.0000, standard deviation 0.00%." in notes
    assert "pooled over all groups with several: 1.15%, 3 degrees of freedom." in notes
    assert "pooled over all groups with several: 0.88%, 3 degrees of freedom, of those above fp4." in notes
    assert "left out: late_seed1 (late): not finished, last validated after 5M tokens" in notes
    assert "left out: alone_seed9 (alone): no finished run of bf16 has its start (seed 9), data and length" in notes


def test_by_source():
    rows = (source_table(GROUPS) or "").splitlines()
    assert rows[0] == "| recipe above bf16 | code | prose |"
    assert rows[2].startswith("| fp4 | +2.22% ± 0.64 | +1.82% ± 0.52 |") and rows[5] == "| late | - | - |"
    one_source = {"a": [HeldOut(1, {M: 1.0}, {M: {"x": 1.0}}, final=M)], "b": [HeldOut(1, {M: 1.0}, final=M)]}
    assert source_table(one_source) is None


def test_without_replicates_there_is_no_error():
    groups = {"bf16": BASE[:1], "fp4": [run(1, 2.02)]}
    assert final_table(groups).splitlines()[2] == "| fp4 | 1 | +1.00% | +0.0200 | - |"


def test_where_nothing_is_finished_there_is_no_end(tmp_path: Path):
    groups = {"bf16": BASE, "late": GROUPS["late"]}
    assert final_table(groups).splitlines() == [
        "no finished run has a finished partner in bf16, so nothing can be said of the end",
        "left out: late_seed1 (late): not finished, last validated after 5M tokens",
    ]
    assert source_table(groups) is None
    with pytest.raises(ValueError, match="no finished run has a finished partner in bf16"):
        draw_final(groups, tmp_path / "final.png")
