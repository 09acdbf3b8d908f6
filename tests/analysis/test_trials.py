from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import trials as trials_module
from analysis.trials import Trial, block_estimate, draw_trials, gap, results, said, trial_table


def _trial(losses: list[float | None], **more: object) -> Trial:
    return Trial(losses, [0.25] * len(losses), **more)  # type: ignore[arg-type]


def test_the_error_of_steps_that_are_not_independent() -> None:
    draws = np.random.default_rng(0).standard_normal((400, 50 + 20))
    series = np.zeros_like(draws)
    for i in range(1, draws.shape[1]):
        series[:, i] = 0.5 * series[:, i - 1] + draws[:, i]  # a correlation of 0.5 between neighbours
    within, naive = [], []
    for row in series[:, 20:]:
        found = block_estimate(row.tolist())
        assert found.mean == pytest.approx(row.mean()) and found.freedom == 5
        within.append(not found.beyond_noise)  # the mean of all is zero
        naive.append(abs(row.mean()) <= 2.01 * row.std(ddof=1) / np.sqrt(len(row)))
    assert np.mean(within) > 0.9 > 0.8 > np.mean(naive)


def test_blocks_of_steps() -> None:
    found = block_estimate([float(i // 2) for i in range(12)])  # the means of the blocks are 0 to 5
    assert found.mean == 2.5 and found.error == pytest.approx(np.std(range(6), ddof=1) / np.sqrt(6))
    few = block_estimate([1.0, 2.0])
    assert few.mean == 1.5 and few.error is None and few.beyond_noise is None
    uneven = block_estimate([float(i) for i in range(17)])
    assert uneven.mean == 8.0 and uneven.error is not None


def test_gaps_are_paired_by_step() -> None:
    base = _trial([9.0, 3.0, 2.0, 4.0] * 5)
    above = _trial([loss * (1.01 if i % 2 else 1.03) for i, loss in enumerate(base.losses) if loss])
    found = gap(above, base, skip=4)
    assert found is not None
    assert found.percent.mean == pytest.approx(2.0) and found.nats.mean == pytest.approx(
        np.mean([0.27, 0.03, 0.06, 0.04])
    )
    assert found.percent.beyond_noise  # although the losses themselves go up and down by far more
    for other in (
        _trial([*base.losses[:-1], None]),
        _trial(base.losses[:10], ended="ended after step 10: too many"),
    ):
        assert gap(other, base, skip=4) is None and gap(base, other, skip=4) is None
    assert gap(_trial([None, *base.losses[1:]]), base, skip=4) is not None  # a step that does not count


def test_the_table_and_what_it_says() -> None:
    losses = [3.0 + 0.1 * (i % 4) for i in range(24)]
    wobble = [0.001 * (-1) ** i for i in range(24)]
    trials = {
        "bf16": _trial(losses, held_out={"a": 3.0, "b": 5.0}),
        "nvfp4": _trial([x * (1.02 + w) for x, w in zip(losses, wobble, strict=True)], held_out={"a": 3.0, "b": 5.08}),
        "same": _trial([x * (1 + w) for x, w in zip(losses, wobble, strict=True)], skipped=1, notes=["switched"]),
        "bad": _trial(losses[:3], ended="ended after step 3: nan"),
    }
    lines = trial_table(trials, "nvfp4", start=600, skip=4).splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in lines[2:6]}
    assert rows["bf16"][1:6] == ["-"] * 5 and rows["bf16"][6:8] == ["250 ms", "4.0000"]
    assert rows["nvfp4"][1].startswith("+2.00% ± 0.0") and rows["nvfp4"][3] == "yes" and rows["nvfp4"][-1] == "+1.00%"
    assert rows["nvfp4"][6] == "1.00 x" and rows["nvfp4"][4] == "-"
    assert rows["same"][3] == "no" and rows["same"][4].startswith("-1.96%") and rows["same"][5] == "yes"
    assert rows["bad"][:7] == ["-"] * 7
    notes = "\n".join(lines[6:])
    assert "steps 605 to 624, without the first 4" in notes and "5 degrees of freedom" in notes
    assert "bad: ended after step 3: nan" in notes and "same: switched" in notes
    assert "same: 1 step made no update" in notes
    for trial in trials.values():
        trial.notes.append("other data")
    assert trial_table(trials, None, 600, 4).count("other data") == 1
    assert "too few for a standard error" in trial_table({"a": _trial([1.0]), "b": _trial([1.1])}, None, 0, 0)
    numbers = results(trials, skip=4)
    assert numbers["nvfp4"]["beyond_noise"] is True and numbers["nvfp4"]["held_out_percent"] == pytest.approx(1.0)
    assert numbers["bad"]["percent"] is None and numbers["same"]["held_out_percent"] is None
    assert said("nvfp4", trials["nvfp4"], trials["bf16"], 4).startswith("nvfp4: 24 steps in 6 s, training loss 3.")
    assert said("bad", trials["bad"], trials["bf16"], 4).endswith("ended after step 3: nan")


def test_the_picture_has_the_tables_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(trials_module, "draw_rows", lambda *told, **more: drawn.append((*told, more)))
    base = _trial([4.0, 3.9, 4.1] * 6)
    trials = {
        "bf16": base,
        "worse": _trial([loss * 1.02 for loss in base.losses if loss]),
        "ended": Trial([4.0], [0.1]),
    }
    draw_trials(trials, "worse", 100, 2, tmp_path / "gaps.png")
    [(rows, target, words, more)] = drawn
    assert [(row.label, round(row.gap.mean, 6)) for row in rows] == [("worse", 2.0)]
    assert target == tmp_path / "gaps.png" and more["mark"] == ("worse", pytest.approx(2.0))
    assert "bf16" in words.axis and words.title == "steps 103 to 118"


ENDED = Trial([4.0], [0.1], ended="ended after step 1: no data")


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        (
            {"bf16": ENDED, "nvfp4": _trial([4.0, 4.1])},
            "bf16, which gaps are measured from, ended after step 1: no data",
        ),
        (
            {"bf16": _trial([4.0, 4.1]), "a": ENDED, "b": _trial([None, None]), "c": _trial([4.0, None])},
            "a ended after step 1: no data; b has 2 losses that are not finite; c has 1 loss that is not finite",
        ),
        (
            {"bf16": _trial([4.0, None]), "a": ENDED},
            "bf16, which gaps are measured from, has 1 loss that is not finite",
        ),
    ],
)
def test_without_any_gap_the_picture_says_why(trials: dict[str, Trial], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        draw_trials(trials, None, 0, 0, tmp_path / "gaps.png")
    assert str(error.value) == f"nothing to draw: {why}"
    assert not any(tmp_path.iterdir())
