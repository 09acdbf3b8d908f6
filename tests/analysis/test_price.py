"""Curves, prices and costs, against losses whose true curve is known; planned times of recipes. Prices from a table of
losses, and the published table that is shipped."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.branches import Branch, recipes_of_branches
from analysis.price import GROWTH, SHIPPED, Curve, RecipeCost, fit, nearest, planned_times, price_table, verdict
from analysis.public import public_table
from analysis.statistics import Estimate
from megatron_fp4.config.compose import compose_config
from pretrain import CONFIGS
from scripts import price
from tests.programs import cells, error_line

TRUE = Curve("the truth", 1e8, 2.7, 1.4, 0.43)
LENGTHS = [25.0, 50.0, 100.0, 200.0, 400.0]


def test_a_fit_finds_the_true_curve_and_its_price() -> None:
    noise = np.random.default_rng(0).normal(0, 0.0007, len(LENGTHS))
    for scatter, tolerance in ((0 * noise, 1e-4), (noise, 0.05)):
        found = fit(
            "found", 1e8, LENGTHS, [TRUE.loss(length) + error for length, error in zip(LENGTHS, scatter, strict=True)]
        )
        assert found.exponent == pytest.approx(TRUE.exponent, rel=tolerance)
        assert found.price(0.05, 98) == pytest.approx(TRUE.price(0.05, 98), rel=max(tolerance / 5, 1e-4))
    # BF16 reaches the recipe's loss after `price` times fewer tokens.
    assert TRUE.loss(98 / TRUE.price(0.05, 98)) == pytest.approx(TRUE.loss(98) + 0.05)
    assert TRUE.price(0.0, 98) == 1.0
    with pytest.raises(ValueError, match="do not fall as a power of tokens"):
        fit("rising", 1e8, LENGTHS, [1.0, 1.1, 1.2, 1.3, 1.4])
    with pytest.raises(ValueError, match="do not fall as a power of tokens"):
        fit("below zero", 1e8, LENGTHS, [4 * length**-0.1 - 3 for length in LENGTHS])


def test_the_shipped_curve_of_the_nearest_size_is_used() -> None:
    assert nearest(1e6) is SHIPPED[0] and nearest(8e9) is SHIPPED[-1]
    # Gaps of four over six with NVIDIA's recipe, and of Quartet II, in their public runs of 30M and 100M parameters.
    for curve, tokens, gap, tokens_of_bf16 in (
        (SHIPPED[0], 24.6, 0.0570, 1.30),
        (SHIPPED[0], 98.4, 0.0592, 1.61),
        (SHIPPED[2], 24.3, 0.0417, 1.30),
        (SHIPPED[2], 97.3, 0.0680, 2.04),
    ):
        assert curve.price(gap, tokens) == pytest.approx(tokens_of_bf16, abs=0.03)


def test_gaps_from_one_checkpoint_and_from_several() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(60)
    starts = []
    for level in (5.0, 6.0, 7.0):
        bf16 = level - 0.01 * steps + rng.normal(0, 0.1, 60)
        nvfp4 = bf16 + 0.03 + rng.normal(0, 0.002, 60)
        starts.append({"bf16": Branch(list(bf16), [1.0] * 60), "nvfp4": Branch(list(nvfp4), [1.2] * 60)})
    for found in (recipes_of_branches(starts[:1]), recipes_of_branches(starts)):
        (recipe,) = found
        assert recipe.nats is not None and recipe.nats.half_width is not None
        assert abs(recipe.nats.mean - 0.03) < recipe.nats.half_width < 0.01
        assert recipe.time == pytest.approx(1.2)
    ended = {**starts[0], "nvfp4": Branch([5.0], [1.0], ended="diverged")}
    for ended_once in ([ended], [ended, *starts[1:]]):
        (recipe,) = recipes_of_branches(ended_once)
        assert recipe.nats is None and recipe.time is None


def recipe(name: str, gap: float, time: float, error: float = 1e-4) -> RecipeCost:
    return RecipeCost(name, Estimate(gap * 30, error * 30, 6, 5), Estimate(gap, error, 6, 5), time)


def test_the_cheapest_recipe_is_named_only_if_intervals_decide() -> None:
    slow, fast = recipe("nvfp4", 0.02, 0.98), recipe("mxfp8", 0.0002, 0.8)
    price = slow.price(TRUE, 98)
    assert price is not None and slow.nats is not None and slow.nats.half_width is not None
    assert price.high == pytest.approx(TRUE.price(GROWTH[1] * (0.02 + slow.nats.half_width), 98))
    assert "mxfp8 costs least here" in verdict([slow, fast], TRUE, 98)
    doubted = verdict([slow, fast], TRUE, 98, ["its weights favor nvfp4"])
    assert "Not established that mxfp8 costs least, as these numbers say:\n- its weights favor nvfp4" in doubted
    assert "With a switch to BF16 no recipe costs less than mxfp8." in verdict([slow, fast], TRUE, 98)
    assert "bf16 costs least here" in verdict([slow], TRUE, 98)
    assert "mxfp8 and other overlap" in verdict([fast, recipe("other", 0.0003, 0.8)], TRUE, 98)
    # A switch that closes most of the gap for few steps in BF16 pays where the gap is expensive.
    assert "With a switch to BF16: nvfp4 with the last 30%" in verdict([recipe("nvfp4", 0.05, 0.6)], TRUE, 98)
    # Its range overlaps the one without a switch, but both follow from the same gap, and both ends are lower.
    expensive = recipe("nvfp4", 0.015, 0.7, error=0.002)
    assert "nvfp4 with the last 8% in BF16 costs less, 0.75 to 0.85," in verdict([expensive], TRUE, 98)
    # It is not cheaper than another recipe whose range it overlaps.
    assert "Not established whether a switch" in verdict([expensive, recipe("other", 0.0135, 0.7, 0.005)], TRUE, 98)
    assert "no recipe costs less than bf16" in verdict([recipe("nvfp4", 0.05, 1.2)], TRUE, 98)
    assert "no recipe's gap has an interval; train more" in verdict([RecipeCost("nvfp4", None, None, 0.8)], TRUE, 98)
    assert "give --gpu" in verdict([replace(fast, time=None)], TRUE, 98)
    # The gap may be zero; then a switch saves nothing.
    may_be_nothing = verdict([recipe("nvfp4", 0.001, 0.72, error=0.003)], TRUE, 98)
    assert "Not established whether a switch to BF16 costs less: nvfp4 with the last 8%" in may_be_nothing
    table = price_table([slow, RecipeCost("diverged", None, None, None)], TRUE, 5.0, "planned")
    assert ["diverged", *"-----"] in cells(table) and "- D = 5 is far from the range 25 to 800 of" in table
    assert "Not established that bf16 costs least" in table and "costs least here" not in table
    assert "Not compared, without an interval or a time: diverged." in table
    own = fit("4 runs of yours", 1e8, [5, 10, 15, 25], [TRUE.loss(length) for length in (5, 10, 15, 25)])
    assert "far from" not in price_table([slow], own, 5.0, "planned")
    assert "D = 98 is far from the range 5 to 25" in price_table([slow], own, 98, "planned")


def test_times_are_planned_for_the_gpu_that_is_named() -> None:
    configs = {
        name: compose_config(["model=nemotron_h_8b", f"precision={name}", "precision.switch.when=never"], CONFIGS)
        for name in ("bf16", "nvfp4", "mxfp4")
    }
    times = planned_times("b200", configs)
    assert times["bf16"] == 1.0 and 0.6 < times["nvfp4"] < 0.9
    assert times["mxfp4"] > 1.0  # no native backend computes it there
    with pytest.raises(ValueError, match="switched switches its precision during the run"):
        planned_times("b200", {"switched": compose_config(["precision=nvfp4"], CONFIGS)})


BASE, RECIPE = (Curve("", 1, *of) for of in ((2.0, 0.8, 0.4), (2.02, 0.82, 0.39)))
STEPS = np.arange(2.0, 22.0, 2.0)
PUBLISHED = Path(__file__).parents[2] / "docs" / "records" / "public_8b.csv"


def written(folder: Path, base: np.ndarray, recipe: np.ndarray, decayed: str = "") -> Path:
    rows = [f"{d},no,{b},{r}" for d, b, r in zip(STEPS, base, recipe, strict=True)]
    path = folder / "table.csv"
    path.write_text("\n".join(["# by others", "tokens,decayed,bf16,nvfp4", *rows, decayed]))
    return path


def price_and_ends(row: list[str]) -> list[float]:
    return [float(number) for number in row[4].replace("[", "").replace("]", "").replace(",", "").split()]


def test_exact_losses_have_the_price_of_their_curves(tmp_path: Path) -> None:
    path = written(tmp_path, BASE.loss(STEPS), RECIPE.loss(STEPS), "22,yes,2.0,2.1\n24,yes,1.9,1.95")
    rows = cells(public_table(path, {}, ""))[2:]
    for length, row in zip(STEPS, rows, strict=False):
        # The base's curve has the recipe's loss after length / price.
        truth = BASE.price(RECIPE.loss(length) - BASE.loss(length), length)
        assert BASE.loss(length / truth) == pytest.approx(RECIPE.loss(length))
        assert price_and_ends(row) == pytest.approx([truth] * 3, abs=0.006)
    # The base passes 1.95 half way from 22 to 24.
    assert rows[-1] == ["nvfp4", "24", "0.0500", "2.63%", "-", f"{24 / 23:.2f}"]


def test_intervals_contain_the_truth_as_often_as_they_say(tmp_path: Path) -> None:
    rng, contained = np.random.default_rng(0), 0
    for _ in range(60):
        noise = rng.normal(0, 0.002, (2, len(STEPS)))
        path = written(tmp_path, BASE.loss(STEPS) + noise[0], RECIPE.loss(STEPS) + noise[1])
        truth = BASE.price(RECIPE.loss(12.0) - BASE.loss(12.0), 12.0)
        _, low, high = price_and_ends(cells(public_table(path, {}, ""))[7])
        contained += low <= truth <= high
    assert 50 <= contained < 60


def test_the_verdict_follows_from_prices_and_times(tmp_path: Path) -> None:
    path = written(tmp_path, BASE.loss(STEPS), RECIPE.loss(STEPS))
    truth = BASE.price(RECIPE.loss(20.0) - BASE.loss(20.0), 20.0)
    for time, said in ((0.5, "nvfp4 costs least of these."), (0.99, "bf16 costs least of these.")):
        printed = public_table(path, {"bf16": 1.0, "nvfp4": time, "mxfp8": 0.75}, "")
        assert said in printed
        assert f"nvfp4 takes {time:.2f} of bf16's time: {truth * time:.2f} of its cost." in printed
    assert f"below 0.76 times its tokens, so only if mxfp8 needs more than {truth * 0.99 / 0.75:.2f} times" in printed
    assert "No verdict: give --gpu" in public_table(path, {}, "")


def test_the_shipped_table_is_priced_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    planned = ["nvfp4", "mxfp8", "--gpu", "b200", "--model", "nemotron_h_8b", "train.sequence_length=8192"]
    assert price.main(["--public", str(PUBLISHED), *planned]) == 0
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
