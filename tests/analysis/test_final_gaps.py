"""What recipes cost at the end: the table, its notes, and who is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.final_gaps import FinalGaps, draw_final, final_table, source_table
from analysis.held_out import HeldOut
from analysis.noise import Pooled, student_quantile

M = 1_000_000


def run(seed: int, loss: float, *, finished: bool = True, folder: str = "") -> HeldOut:
    """One of 10M tokens with two sources, 0.4 nats apart."""
    if not finished:
        return HeldOut(seed, {5 * M: 3.0}, folder=folder)
    sources = {10 * M: {"code": loss - 0.2, "prose": loss + 0.2}}
    return HeldOut(seed, {5 * M: 3.0, 10 * M: loss}, sources, final=10 * M, folder=folder)


BASE = [run(1, 2.0), run(2, 2.0), run(3, 2.0)]
GROUPS = {
    "bf16": BASE,
    "fp4": [run(1, 2.02), run(2, 2.04), run(3, 2.06)],  # 1, 2 and 3%
    "two": [run(1, 2.04), run(2, 2.08)],  # 2 and 4%
    "one": [run(3, 2.2)],  # 10%
    "late": [run(1, 2.0, finished=False, folder="/runs/late_seed1")],
    "alone": [run(9, 2.0, folder="/runs/alone_seed9")],
}


def test_gaps_of_few_pairs_share_their_deviation():
    found = FinalGaps(GROUPS, "bf16")
    # Squares around the means: 2 of fp4 with two degrees of freedom, 2 of `two` with one.
    assert found.shared is not None
    assert (found.shared.deviation, found.shared.freedom) == (pytest.approx((4 / 3) ** 0.5), 3)
    assert list(found.percent) == ["fp4", "two", "one"]
    fp4, two, one = found.percent.values()
    assert (fp4.mean, fp4.error, fp4.beyond_noise) == (pytest.approx(2.0), pytest.approx(2 / 3), False)
    assert (two.mean, two.error) == (pytest.approx(3.0), pytest.approx((4 / 3) ** 0.5 / 2**0.5))
    assert one.half_width == pytest.approx(student_quantile(3) * (4 / 3) ** 0.5) and one.beyond_noise
    assert found.nats["fp4"].mean == pytest.approx(0.04)


def test_the_table_says_all_of_it():
    lines = final_table(GROUPS, "fp4").splitlines()
    assert lines[2:8] == [
        "| bf16 | 2.0000 ± 0.00% (3) | - | - | - | - | -1.95% ± 0.51* | yes | - |",
        "| fp4 | 2.0400 ± 0.98% (3) | 3 | +2.00% ± 0.67* | +0.0400 ± 0.0133* | no | - | - | 1 |",
        "| two | 2.0600 ± 1.37% (2) | 2 | +3.00% ± 0.82* | +0.0600 ± 0.0163* | yes | +1.48% ± 0.62* | no | - |",
        "| one | 2.2000 (1) | 1 | +10.00% ± 1.15* | +0.2000 ± 0.0231* | yes | +6.80% ± 0.88* | yes | - |",
        "| late | (0) | 0 | - | - | - | - | - | - |",
        "| alone | 2.0000 (1) | 0 | - | - | - | - | - | - |",
    ]
    # A share of what is not beyond the noise would mean nothing; of `two`, which is, seeds 1 and 2 have a half each.
    shares = [line.removesuffix(" |").split(" | ")[-1] for line in final_table(GROUPS, "two").splitlines()[2:8]]
    assert shares == ["-", "0.50 ± 0.00", "1", "-", "-", "-"]
    notes = "\n".join(lines[8:])
    assert "of bf16 after 10M tokens" in notes
    assert "gaps within all groups, pooled: 1.15%, 3 degrees of freedom." in notes
    assert "gaps within all groups, pooled: 0.88%, 3 degrees of freedom, of those above fp4." in notes
    assert "left out: late_seed1 (late): not finished, last validated after 5M tokens" in notes
    assert "left out: alone_seed9 (alone): no finished run of bf16 has its start (seed 9), data and length" in notes


def test_ends_after_other_numbers_of_tokens_have_no_common_mean():
    runs = [HeldOut(s, {t * M: loss}, final=t * M) for s, t, loss in ((1, 1, 2.0), (2, 1, 4.0), (3, 9, 1.0))]
    found = FinalGaps({"a": runs, "b": [HeldOut(s.seed, s.losses, final=s.final) for s in runs]}, "a")
    assert found.ends("a") == {M: [2.0, 4.0], 9 * M: [1.0]}
    assert found.noise("a") == Pooled(pytest.approx(100 * 2**0.5 / 3), 1)
    table = final_table(found.groups).splitlines()
    assert table[2].startswith("| a | ± 47.14% (3) | - |") and "after 1M to 9M tokens" in table[5]


def test_five_pairs_have_their_own_deviation():
    base, percents = [run(seed, 2.0) for seed in range(5)], (1.0, 2.0, 3.0, 4.0, 5.0)
    fp4 = [run(seed, 2.0 * (1 + p / 100)) for seed, p in enumerate(percents)]
    found = FinalGaps({"bf16": base, "fp4": fp4, "calm": [run(0, 2.02), run(1, 2.02)]}, "bf16").percent
    assert (found["fp4"].error, found["fp4"].freedom, found["fp4"].shared) == (pytest.approx(0.5**0.5), 4, False)
    assert (found["calm"].error, found["calm"].freedom) == (pytest.approx(1.0), 5)


def test_by_source():
    rows = (source_table(GROUPS) or "").splitlines()
    assert rows[0] == "| recipe above bf16 | code | prose |"
    assert rows[2].startswith("| fp4 | +2.22% ± 0.74* | +1.82% ± 0.61* |") and rows[5] == "| late | - | - |"
    one_source = {"a": [HeldOut(1, {M: 1.0}, {M: {"x": 1.0}}, final=M)], "b": [HeldOut(1, {M: 1.0}, final=M)]}
    assert source_table(one_source) is None


def test_without_replicates_there_is_no_error():
    groups = {"bf16": BASE[:1], "fp4": [run(1, 2.02)]}
    assert final_table(groups).splitlines()[3] == "| fp4 | 2.0200 (1) | 1 | +1.00% | +0.0200 | - |"


def test_where_nothing_is_finished_there_is_no_end(tmp_path: Path):
    groups = {"bf16": BASE, "late": GROUPS["late"]}
    assert final_table(groups).splitlines() == [
        "no finished run has a finished partner in bf16, so nothing can be said of the end",
        "left out: late_seed1 (late): not finished, last validated after 5M tokens",
    ]
    lost, begun = HeldOut(1, {5 * M: 3.0}, lost=10 * M, folder="/lost"), HeldOut(2, {}, folder="/begun")
    assert FinalGaps({"bf16": BASE, "late": [lost, begun]}, "bf16").left_out() == [
        "lost (late): its held-out loss after 10M tokens is no number to compare",
        "begun (late): not finished, and not yet validated",
    ]
    assert source_table(groups) is None
    with pytest.raises(ValueError, match="no finished run has a finished partner in bf16"):
        draw_final(groups, tmp_path / "final.png")
