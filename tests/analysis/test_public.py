"""Prices from a table of losses, against losses whose curves are known; the published table that is shipped."""

from pathlib import Path

import numpy as np
import pytest

from analysis.price import Curve
from analysis.public import public_table
from scripts import price
from tests.programs import cells, error_line

BASE, RECIPE = (Curve("", 1, *of) for of in ((2.0, 0.8, 0.4), (2.02, 0.82, 0.39)))
LENGTHS = np.arange(2.0, 22.0, 2.0)
SHIPPED = Path(__file__).parents[2] / "docs" / "records" / "public_8b.csv"


def table(folder: Path, base: np.ndarray, recipe: np.ndarray, decayed: str = "") -> Path:
    rows = [f"{d},no,{b},{r}" for d, b, r in zip(LENGTHS, base, recipe, strict=True)]
    path = folder / "table.csv"
    path.write_text("\n".join(["# by others", "tokens,decayed,bf16,nvfp4", *rows, decayed]))
    return path


def price_and_ends(row: list[str]) -> list[float]:
    return [float(number) for number in row[4].replace("[", "").replace("]", "").replace(",", "").split()]


def test_exact_losses_have_the_price_of_their_curves(tmp_path: Path) -> None:
    path = table(tmp_path, BASE.loss(LENGTHS), RECIPE.loss(LENGTHS), "22,yes,2.0,2.1\n24,yes,1.9,1.95")
    rows = cells(public_table(path, {}, ""))[2:]
    for length, row in zip(LENGTHS, rows, strict=False):
        # The base's curve has the recipe's loss after length / price.
        truth = BASE.price(RECIPE.loss(length) - BASE.loss(length), length)
        assert BASE.loss(length / truth) == pytest.approx(RECIPE.loss(length))
        assert price_and_ends(row) == pytest.approx([truth] * 3, abs=0.006)
    # The base passes 1.95 half way from 22 to 24.
    assert rows[-1] == ["nvfp4", "24", "0.0500", "2.63%", "-", f"{24 / 23:.2f}"]


def test_intervals_contain_the_truth_as_often_as_they_say(tmp_path: Path) -> None:
    rng, contained = np.random.default_rng(0), 0
    for _ in range(60):
        noise = rng.normal(0, 0.002, (2, len(LENGTHS)))
        path = table(tmp_path, BASE.loss(LENGTHS) + noise[0], RECIPE.loss(LENGTHS) + noise[1])
        truth = BASE.price(RECIPE.loss(12.0) - BASE.loss(12.0), 12.0)
        _, low, high = price_and_ends(cells(public_table(path, {}, ""))[7])
        contained += low <= truth <= high
    assert 50 <= contained < 60


def test_the_verdict_follows_from_prices_and_times(tmp_path: Path) -> None:
    path = table(tmp_path, BASE.loss(LENGTHS), RECIPE.loss(LENGTHS))
    truth = BASE.price(RECIPE.loss(20.0) - BASE.loss(20.0), 20.0)
    for time, verdict in ((0.5, "nvfp4 costs least of these."), (0.99, "bf16 costs least of these.")):
        printed = public_table(path, {"bf16": 1.0, "nvfp4": time, "mxfp8": 0.75}, "")
        assert verdict in printed
        assert f"nvfp4 takes {time:.2f} of bf16's time: {truth * time:.2f} of its cost." in printed
    assert f"below 0.76 times its tokens, so only if mxfp8 needs more than {truth * 0.99 / 0.75:.2f} times" in printed
    assert "No verdict: give --gpu" in public_table(path, {}, "")


def test_the_shipped_table_is_priced_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    planned = ["nvfp4", "mxfp8", "--gpu", "b200", "--model", "nemotron_h_8b", "train.sequence_length=8192"]
    assert price.main(["--public", str(SHIPPED), *planned]) == 0
    printed = capsys.readouterr().out
    by_row = {(name, step): rest for name, step, *rest in cells(printed)}
    assert by_row["nvfp4", "12500"] == ["0.0427", "1.74%", "1.36 [1.33, 1.40]", "-"]
    assert by_row["nvfp4", "30000"] == ["0.0476", "2.09%", "-", "1.09"]
    assert "planned for nemotron_h_8b on b200" in printed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no CSV of losses, as the top of analysis/public.py describes"),
        ("step,bf16,nvfp4\n1,high,2", "is no CSV of losses"),
        ("step,bf16\n1,2", "has 1 columns of losses: give a base, then one recipe or more"),
        ("step,bf16,nvfp4\n2,2,2\n1,2,2", "step has to be above 0 and to rise from row to row"),
        ("step,decayed,bf16,nvfp4\n1,yes,2,2\n2,no,2,2", "decayed is no in the first rows and yes in the last"),
        ("step,decayed,bf16,nvfp4\n1,maybe,2,2", "decayed is no in the first rows"),
        ("step,bf16,nvfp4\n1,,2", "bf16 has one in every row"),
        ("step,bf16,nvfp4\n1,2,inf", "losses are positive and finite"),
        ("step,bf16,nvfp4\n1,1,2\n2,2,2\n3,3,2\n4,4,2\n5,5,2", "the losses do not fall as a power of tokens"),
    ],
)
def test_a_table_that_has_no_price_is_refused(text: str, expected: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "table.csv").write_text(text)
    assert price.main(["--public", str(tmp_path / "table.csv")]) == 2
    assert expected in error_line(capsys, "price.py")


def test_options_that_do_nothing_with_a_table_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        ([], "give --checkpoint or --public"),
        (["--public", "a.csv", "nvfp4"], "for planned times give --gpu, --model and recipes"),
        (["--public", "a.csv", "--output", "b.json"], "leave --curve and --output out"),
    ):
        with pytest.raises(SystemExit):
            price.main(arguments)
        assert expected in capsys.readouterr().err
