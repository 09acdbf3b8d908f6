"""Recipes over seeds and branches: which runs are pairs, their gaps, and the command."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.final_gaps import FinalGaps
from analysis.held_out import HeldOut, Pair, read_groups, read_held_out, runs_of
from analysis.paired import gaps, gaps_of_groups, partners, table, unlike
from scripts import compare_recipes

Losses = dict[int, dict[str, Any]]


def write_run(folder: Path, seed: int, losses: Losses, data: str = "{}", **facts: Any) -> Path:
    """facts: of the `run` record, if any."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run:\n  seed: {seed}\ndata: {data}\n")
    records = [{"kind": "validation", "step": t, "tokens": 1_000_000 * t, "losses": of} for t, of in losses.items()]
    start = [{"kind": "run", "step": 0, **facts}] if facts else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*start, *records]))
    return folder


def origin(run: str, content: str, contents: str = "") -> dict[str, Any]:
    """contents: if it was recorded."""
    found = {"path": f"/there/{run}/checkpoints/step_00000006", "step": 6, "manifest_sha256": content * 32}
    return found | ({"contents_sha256": contents * 32} if contents else {})


def percents(found: dict[Pair, Any]) -> dict[str, float]:
    return {pair.start: gap.percent for pair, gap in found.items()}


def test_runs_are_paired_by_seed_whatever_their_order():
    base = [HeldOut(1, {10: 2.0, 20: 1.0}), HeldOut(2, {10: 4.0, 20: 2.0})]
    runs = [HeldOut(2, {10: 4.4, 20: 2.0, 30: 9.0}), HeldOut(1, {10: 2.02})]
    found = gaps(runs, base)
    assert list(found) == [10, 20]
    assert percents(found[10]) == pytest.approx({"seed 1": 1.0, "seed 2": 10.0})
    assert percents(found[20]) == pytest.approx({"seed 2": 0.0})
    assert found[10][Pair("seed 1", 1)].nats == pytest.approx(0.02)


def test_another_order_of_the_data_is_no_partner():
    base = [HeldOut(1, {10: 2.0}), HeldOut(1, {10: 4.0}, data_seed=7)]
    assert percents(gaps([HeldOut(1, {10: 5.0}, data_seed=7)], base)[10]) == pytest.approx({"seed 1": 25.0})
    with pytest.raises(ValueError, match="the runs began with seed 1, data seed 8, the base with seed 1; seed 1, data"):
        gaps([HeldOut(1, {10: 5.0}, data_seed=8)], base)


def test_branches_are_paired_by_their_start_and_share_a_partner():
    base = [HeldOut(1, {10: 2.0}, start="a", data_seed=1), HeldOut(2, {10: 4.0}, start="b")]
    runs = [
        HeldOut(1, {10: 2.02}, start="a"),
        HeldOut(5, {10: 2.06}, start="a", data_seed=1),  # other rounding from the same start
        HeldOut(2, {10: 4.04}, start="b"),
    ]
    assert percents(gaps(runs, base)[10]) == pytest.approx({"a": 2.0, "b": 1.0})
    of_seed = [*base, HeldOut(5, {10: 2.05}, start="a", data_seed=1)]  # the base's run of the same seed goes first
    assert percents(gaps(runs, of_seed)[10]) == pytest.approx({"a": (1.0 + 100 * (2.06 / 2.05 - 1)) / 2, "b": 1.0})
    with pytest.raises(ValueError, match="no pair: the runs began with a, data seed 1; b, data seed 2, the base with"):
        gaps(runs, [HeldOut(1, {10: 1.0}), HeldOut(2, {10: 1.0})])


def test_a_trunk_that_went_on_is_the_partner_of_its_branches():
    trunks = [HeldOut(s, {5: 3.0, 10: 2.0 * s}, steps=100, folder=f"/runs/trunk{s}") for s in (1, 2)]
    branches = [
        HeldOut(s, {10: 2.02 * s}, start=f"c{s}", trunk=f"/elsewhere/trunk{s}", steps=100, folder=f"/runs/branch{s}")
        for s in (1, 2)
    ]
    assert percents(gaps(branches, trunks)[10]) == pytest.approx({"seed 1": 1.0, "seed 2": 1.0})
    own = HeldOut(1, {10: 2.01}, start="c1", steps=100)  # a branch of the base goes first
    assert percents(gaps(branches, [*trunks, own])[10])["c1"] == pytest.approx(100 * (2.02 / 2.01 - 1))
    for other in (
        replace(trunks[0], steps=200),
        replace(trunks[0], data_seed=3),
        replace(trunks[0], folder="/runs/other"),
    ):
        with pytest.raises(ValueError, match="no pair"):
            gaps(branches[:1], [other])
    with pytest.raises(ValueError, match="no pair"):  # two of that name, and none lies where the trunk lay
        gaps(branches[:1], [trunks[0], replace(trunks[0], seed=3, data_seed=1, folder="/b/trunk1")])
    there = replace(trunks[0], seed=3, data_seed=1, folder="/elsewhere/trunk1")
    assert percents(gaps(branches[:1], [trunks[0], there])[10]) == pytest.approx({"seed 3": 1.0})
    # A second branch of a trunk shares that as its partner, wherever it began, and so is no pair of its own.
    later = replace(branches[0], losses={10: 2.06}, start="c1 later", folder="/runs/later1")
    assert percents(gaps([*branches, later], trunks)[10]) == pytest.approx({"seed 1": 2.0, "seed 2": 1.0})


@pytest.mark.parametrize("there", (True, False), ids=("by folder", "by name"))
def test_a_branch_of_a_branch_has_the_partners_of_its_trunk(tmp_path, there):
    """BF16; from its step 2 on NVFP4; from step 4 of that BF16 again, and from step 6 of it."""

    def start(run: str, content: str) -> dict[str, Any]:
        return origin(run, content) | ({"path": str(tmp_path / run / "checkpoints" / "step_00000006")} if there else {})

    def write(name: str, at: dict[int, float], seed: int = 1, **facts: Any) -> str:
        return str(write_run(tmp_path / name, seed, {t: {"a": loss} for t, loss in at.items()}, "{seed: 1}", **facts))

    base = write("bf16", {4: 3.0, 6: 2.5, 8: 2.0}, steps=8)
    nvfp4 = write("nvfp4", {4: 3.03, 6: 2.55, 8: 2.06}, steps=8, origin=start("bf16", "a0"))
    switch = write("switch", {6: 2.525, 8: 2.02}, steps=8, origin=start("nvfp4", "a1"))
    late = write("late", {8: 2.04}, steps=8, origin=start("nvfp4", "a2"))
    last = write("last", {8: 2.01}, seed=7, steps=8, origin=start("switch", "a3"))
    groups = read_groups([f"bf16={base}", f"last={last}", f"switch={switch}", f"nvfp4={nvfp4}", f"late={late}"])
    pair, M = Pair("seed 1", 1), 1_000_000
    found = {
        name: {tokens // M: at[pair].percent for tokens, at in of.items()}
        for name, of in gaps_of_groups(groups).items()
    }
    assert found["switch"] == pytest.approx({6: 1.0, 8: 1.0}) and found["nvfp4"] == pytest.approx({4: 1, 6: 2, 8: 3})
    assert found["late"] == pytest.approx({8: 2.0}) and found["last"] == pytest.approx({8: 0.5})
    final = FinalGaps(groups, "bf16")
    assert final.left_out() == [] and [final.percent[name].count for name in found] == [1] * 4
    against = FinalGaps(groups, "nvfp4").percent
    assert against["switch"].mean == pytest.approx(100 * (2.02 / 2.06 - 1)) and "bf16" not in against

    together = read_groups([f"bf16={base}", f"fp4={nvfp4},{switch},{late}"])  # one partner: one pair
    [gap] = FinalGaps(together, "bf16").gaps["fp4"]
    assert gap.percent == pytest.approx(2.0)

    without = read_groups([f"bf16={base}", f"nvfp4={nvfp4}", f"last={last}"])
    [left] = FinalGaps(without, "bf16").left_out()
    assert "last (last): no finished run of bf16" in left and "its trunk, switch, lends it its partners" in left
    for name, config, facts in (("longer", "{seed: 1}", {"steps": 9}), ("other data", "{seed: 2}", {"steps": 8})):
        run = write_run(tmp_path / name, 1, {8: {"a": 2.0}}, config, origin=start("nvfp4", "a1"), **facts)
        assert partners(read_held_out(run), groups["bf16"], final.compared) == []


def test_the_trunk_of_a_branch_may_be_a_run_from_scratch():
    base = [HeldOut(s, {10: 2.0 * s}, steps=9, folder=f"/bf16/{s}") for s in (1, 2)]
    trunks = [HeldOut(s, {10: 2.1 * s}, steps=9, folder=f"/fp4/{s}") for s in (1, 2)]
    branches = [HeldOut(s, {10: 2.02 * s}, start=f"c{s}", trunk=f"/fp4/{s}", steps=9, folder=f"/b/{s}") for s in (1, 2)]
    found = gaps_of_groups({"bf16": base, "fp4": trunks, "branch": branches})
    assert percents(found["branch"][10]) == pytest.approx({"seed 1": 1.0, "seed 2": 1.0})
    own = HeldOut(1, {10: 2.01}, start="c1", steps=9)  # a run of the base from the same checkpoint goes first
    assert partners(branches[0], [*base, own], trunks) == [own]


def test_trunks_in_a_circle_or_of_a_name_that_two_have_lend_nothing():
    def branch(name: str, trunk: str) -> HeldOut:
        return HeldOut(1, {10: 2.0}, start=f"of {trunk}", trunk=f"/there/{trunk}", steps=9, folder=f"/here/{name}")

    base = [HeldOut(1, {10: 2.0}, steps=9, folder="/here/base")]
    one, other, itself = branch("one", "other"), branch("other", "one"), branch("itself", "itself")
    for run in (one, other, itself):
        assert partners(run, base, [*base, one, other, itself]) == []
    run, known = branch("run", "trunk"), HeldOut(1, {}, steps=9, folder="/a/trunk")
    assert partners(run, base, [*base, known]) == base
    alike = branch("trunk", "trunk")  # of its own name
    assert partners(alike, base, [*base, alike, known]) == base
    assert partners(run, base, [*base, known, replace(known, folder="/b/trunk")]) == []


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"no pair: the runs began with seed 3, the base with seed 1;"):
        gaps([HeldOut(3, {10: 1.0})], [HeldOut(1, {10: 1.0})])
    with pytest.raises(ValueError, match=r"x and y have the same start \(seed 1\), run.seed=1 .* name one run of each"):
        gaps([HeldOut(1, {10: 1.0}, folder="/x"), HeldOut(1, {10: 1.0}, folder="/y")], [HeldOut(1, {10: 1.0})])
    late, never = HeldOut(1, dict.fromkeys((20, 30, 40, 50), 1.0), folder="/late"), HeldOut(1, {}, folder="/never")
    wanted = (
        r"no pair: never has no held-out loss yet, and its partner late has held-out losses after 20, 30, 40 and more"
    )
    with pytest.raises(ValueError, match=wanted):
        gaps([never], [late])
    with pytest.raises(ValueError, match=r"late has .* partner x has held-out losses after 10 tokens; both must have"):
        gaps([late], [HeldOut(1, {10: 1.0}, folder="/x")])
    one, two = HeldOut(1, {10: 1.0}, {10: {"a": 1.0}}, folder="/x"), HeldOut(1, {10: 1.0}, {10: {"a": 1.0, "b": 1.0}})
    with pytest.raises(ValueError, match=r"tokens x was validated on a and .* on a, b: compare runs of the same data"):
        gaps([one], [two])


def test_sources_weigh_alike_and_one_that_was_not_measured_leaves_its_point_out(tmp_path):
    run = write_run(tmp_path / "run", 7, {1: {"a": 1.0, "b": 3.0}, 2: {"a": 1.0, "b": None}})
    expected = HeldOut(7, {1_000_000: 2.0}, {1_000_000: {"a": 1.0, "b": 3.0}}, lost=2_000_000, folder=str(run))
    assert read_held_out(run) == expected
    for number, wrong in enumerate((math.nan, math.inf, 0.0, -1.0, "2.0")):
        run = write_run(tmp_path / f"run{number}", 7, {1: {"a": 1.0, "b": 3.0}, 2: {"a": 1.0, "b": wrong}})
        assert read_held_out(run) == replace(expected, folder=str(run))
    run = write_run(tmp_path / "back", 7, {1: {"a": None, "b": 3.0}, 2: {"a": 1.0, "b": 3.0}}, steps=2)
    assert (read_held_out(run).lost, read_held_out(run).final) == (None, 2_000_000)
    for config in ("model: {}\n", "run: {seed: '${oc.env:SEED}'}\n"):
        (run / "config.yaml").write_text(config)
        with pytest.raises(ValueError, match=r"names no run\.seed"):
            read_held_out(run)


def test_some_sources_count_alone(tmp_path):
    at = {1: {"a": 1.0, "b": None, "c": 3.0}, 2: {"a": 1.0, "b": 9.0, "c": 2.0}, 3: {"a": 1.0}}
    run = write_run(tmp_path / "run", 7, at, steps=3)
    found = read_held_out(run, ["c", "a"])
    assert found.losses == {1_000_000: 2.0, 2_000_000: 1.5} and found.only == ("c", "a") and found.final is None
    assert list(found.sources[2_000_000]) == ["c", "a"]
    assert read_held_out(run, ["a"]).final_losses == {3_000_000: 1.0} and read_held_out(run, ["a"]).lost is None
    assert read_held_out(run, ["a", "b", "c"]).losses == {2_000_000: 4.0}
    assert read_held_out(run, ["a", "b", "c"]).only == () == read_held_out(run).only
    with pytest.raises(ValueError, match=r"--sources a,x: .*run was not validated on 'x'; name some of a, b, c$"):
        read_held_out(run, ["a", "x"])
    assert read_held_out(write_run(tmp_path / "begun", 7, {}), ["x"]).losses == {}


def test_what_a_run_says_of_its_start_its_data_and_its_end(tmp_path):
    losses: Losses = {8: {"a": 1.0}}
    one = read_held_out(write_run(tmp_path / "one", 1, losses, "{seed: 4}", steps=8, origin=origin("trunk", "ab")))
    assert (one.pair, one.final) == (Pair("trunk step 6 (" + "ab" * 6 + ")", 4), 8_000_000)
    elsewhere = {**origin("trunk", "ab"), "path": "/here/trunk/checkpoints/step_00000006"}
    longer = read_held_out(write_run(tmp_path / "longer", 4, losses, steps=9, origin=elsewhere))
    assert longer.pair == one.pair and longer.final is None
    weights = read_held_out(write_run(tmp_path / "w", 4, losses, steps=8, initialized_from=origin("trunk", "ab")))
    other = read_held_out(write_run(tmp_path / "o", 4, losses, steps=8, origin=origin("trunk", "ac")))
    assert len({run.pair for run in (one, weights, other)}) == 3


def test_checkpoints_equal_in_every_bit_are_one_start(tmp_path):
    def start_in(name: str, how: str = "origin", **begun: Any) -> str:
        return str(write_run(tmp_path / name, 1, {8: {"a": 2.0}}, steps=8, **{how: begun}))

    first = start_in("first", **origin("trunk", "a0", "c0"))
    made_again = start_in("made_again", **origin("other_folder", "a1", "c0"))
    old = start_in("old", **origin("copied", "a1"))  # of the same checkpoint as `made_again`
    alone = start_in("alone", **origin("trunk", "a2"))  # nobody knows its contents
    other = start_in("other", **origin("trunk", "a3", "c1"))
    later = start_in("later", **origin("trunk", "a0", "c0") | {"step": 7})
    weights = start_in("weights", "initialized_from", **origin("trunk", "a0", "c0"))
    scratch = str(write_run(tmp_path / "scratch", 1, {8: {"a": 2.0}}, steps=8))
    others = f"x={alone},{other},{later},{weights},{scratch}"
    for names in ([first, made_again, old], [old, first, made_again]):
        one, *rest = [run.pair.start for run in runs_of(read_groups([f"base={','.join(names)}", others]))]
        assert rest[:2] == [one] * 2 and len({one, *rest[2:]}) == 6
        assert one == (f"trunk step 6 ({'a0' * 6})" if names[0] == first else f"copied step 6 ({'a1' * 6})")
        assert rest[-1] == "seed 1"
    groups = read_groups([f"base={first}", f"x={old}"])  # what joins them is not among the runs
    with pytest.raises(ValueError, match=r"no pair: the runs began with copied step 6 .*, the base with trunk step 6 "):
        gaps(groups["x"], groups["base"])
    groups = read_groups([f"base={first}", f"x={made_again},{old}"])
    with pytest.raises(ValueError, match=r"made_again and old have the same start \(trunk step 6 "):
        gaps(groups["x"], groups["base"])


def test_the_trunk_of_an_equal_start_serves():
    def branch(name: str, trunk: str, **facts: Any) -> HeldOut:
        of_all: dict[str, Any] = {"start": "c", "steps": 9, **facts}
        return HeldOut(1, {10: 2.02}, trunk=trunk, folder=f"/here/{name}", **of_all)

    base = [HeldOut(s, {10: 2.0}, steps=9, folder=f"/here/trunk{s}") for s in (1, 2)]
    run, sibling = branch("run", "/gone/made_again"), branch("sibling", "/here/trunk1")
    assert partners(run, base, [*base, run]) == []
    assert partners(run, base, [*base, run, sibling]) == base[:1]
    for other in (replace(sibling, start="d"), replace(sibling, trunk="/gone/too"), replace(sibling, trunk=None)):
        assert partners(run, base, [*base, run, other]) == []
    # The trunk has to fit the run; whether it fits the other branch is nothing to the run.
    elsewhere = replace(sibling, steps=12, data_seed=5)
    assert partners(run, base, [*base, run, elsewhere]) == base[:1]
    for stranger in (replace(run, steps=12), replace(run, data_seed=5)):
        assert partners(stranger, base, [*base, stranger, sibling]) == []
    own = HeldOut(2, {10: 2.1}, data_seed=1, steps=9, folder="/gone/made_again")  # goes first, and has other partners
    assert partners(run, base, [*base, own, sibling]) == []
    # A trunk that is in another group lends its partners.
    fp4 = HeldOut(1, {10: 2.1}, steps=9, folder="/here/fp4")
    assert partners(run, base, [*base, run, fp4, replace(sibling, trunk="/here/fp4")]) == base[:1]


def test_a_run_that_has_just_begun_leaves_the_others_to_be_compared(tmp_path):
    begun = read_held_out(write_run(tmp_path / "begun", 1, {}, steps=8))
    assert (begun.losses, begun.final) == ({}, None)
    groups = {"bf16": [HeldOut(1, {1_000_000: 2.0})], "new": [begun], "fp4": [HeldOut(1, {1_000_000: 2.02})]}
    assert table(groups).splitlines()[-1] == "| 1M | 2.0000 (1) | - | - | +1.00% (1) |"
    with pytest.raises(ValueError, match="no pair"):
        table({name: groups[name] for name in ("bf16", "new")})


def test_what_a_run_has_other_than_its_partner_besides_the_recipe_is_said(tmp_path):
    tokens = {1: {"a": 2.0, "b": 2.0}}
    alike = "{seed: null, order: documents, num_workers: 1, phases: [{name: main}], validation: {a: x, b: y}}"
    base = write_run(tmp_path / "base", 1, tokens, alike)
    moved = "{seed: 1, order: documents, num_workers: 4, phases: [{name: main, steps: null}], validation: {a: x, c: z}}"
    same = write_run(tmp_path / "same", 1, tokens, moved)
    other = write_run(
        tmp_path / "other", 1, tokens, "{order: windows, phases: [{name: rest}], validation: {a: w, b: y}}"
    )
    (other / "config.yaml").write_text((other / "config.yaml").read_text() + "optimizer: {lr: 1.0, clip_norm: 1}\n")
    (base / "config.yaml").write_text((base / "config.yaml").read_text() + "optimizer: {lr: 2.0, deoscillation: {}}\n")
    groups = read_groups([f"bf16={base}", f"fp4={same}", f"x={other}"])
    assert unlike(groups) == [
        "not the recipe alone: other (x) differs from base in data.order (windows, not documents), data.phases, "
        "data.validation, optimizer.lr (1.0, not 2.0), too"
    ]
    assert table(groups).endswith("\n\n" + unlike(groups)[0])
    assert unlike(groups, ["fp4"]) == []


def test_the_table_has_errors_and_counts():
    base = [HeldOut(1, {10_000_000: 2.0}), HeldOut(2, {10_000_000: 2.2})]
    groups = {
        "bf16": base,
        "fp4": [HeldOut(1, {10_000_000: 2.02}), HeldOut(2, {10_000_000: 2.266})],
        "fp8": [HeldOut(2, {10_000_000: 2.2})],
    }
    *_, row = table(groups).splitlines()
    assert row == "| 10M | 2.1000 (2) | 6.73% | +2.00% ± 1.00 (2) | +0.00% (1) |"


def test_groups_are_folders_and_patterns(tmp_path, monkeypatch):
    for seed in (1, 2):
        write_run(tmp_path / f"run{seed}", seed, {1: {"a": 2.0}})
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "base", 1, {1: {"a": 2.0}})
    found = read_groups(["b=base", "f=run*"])
    assert [run.name for run in found["b"]] == ["base"] and [run.seed for run in found["f"]] == [1, 2]
    for wrong, words in (
        (["f=run2,run2"], "a run comes twice in f"),
        (["f=run*"], r"f=run\*: run1 is in b, too"),
        (["f=no*"], "no folder"),
        (["b=run2"], "once"),
        (["f=run2,"], "f=run2,: write each group once, as NAME=RUN,RUN"),
    ):
        with pytest.raises(ValueError, match=words):
            read_groups(["b=run1", *wrong])


def test_the_command_prints_draws_and_refuses(tmp_path, monkeypatch, capsys):
    runs = [
        write_run(tmp_path / f"{name}{seed}", seed, {1: {"a": 2.0 + gap, "b": 2.0}})
        for name, gap in (("b", 0), ("f", 0.04), ("g", 0.08))
        for seed in (1, 2)
    ]
    pictures = [tmp_path / "tokens.png", tmp_path / "final.png"]
    command = ["compare_recipes.py", f"bf16={runs[0]},{runs[1]}"]
    groups = [f"fp4={runs[2]},{runs[3]}", f"g={tmp_path}/g*"]
    monkeypatch.setattr(sys, "argv", [*command, *groups, "--output", str(pictures[0]), "--final", str(pictures[1])])
    compare_recipes.main()
    printed = capsys.readouterr().out
    assert "+1.00% ± 0.00 (2)" in printed and "above fp4" in printed and "| recipe above bf16 | a | b |" in printed
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    monkeypatch.setattr(sys, "argv", [*command, *groups, "--sources", "a", "--output", str(pictures[0])])
    compare_recipes.main()
    printed = capsys.readouterr().out
    assert "| 1M | 2.0000 (2) | 0.00% | +2.00% ± 0.00 (2) |" in printed and "recipe above" not in printed
    assert printed.splitlines().count("held-out losses: of a alone") == 2
    monkeypatch.setattr(sys, "argv", [*command, *groups, "--sources", "b,a"])
    compare_recipes.main()
    printed = capsys.readouterr().out
    assert "+1.00% ± 0.00 (2)" in printed and "| recipe above bf16 | b | a |" in printed and "alone" not in printed
    for wrong, words in (
        ([], "two groups"),
        ([groups[0], "--sources", "a,prose"], "not validated on 'prose'; name some of a, b"),
        ([groups[0], "--sources", ""], "not validated on ''; name some of a, b"),
        (["fp4"], "NAME=RUN"),
        ([f"fp4={tmp_path / 'none'}"], "none/config.yaml does not exist; name the folder of a run"),
        ([groups[0], "--output", "gap.txt"], "gap.txt is no name of a picture"),
        ([groups[0], "--final", f"{tmp_path}/none/gap.png"], "none; make it, or name another"),
        ([groups[0], "--against", "fp8"], "--against fp8: no group has this name; the groups are bf16, fp4"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *wrong])
        with pytest.raises(SystemExit) as end:
            compare_recipes.main()
        printed, errors = capsys.readouterr()
        assert (end.value.code, printed) == (2, "") and words in errors and len(errors.splitlines()) == 1
