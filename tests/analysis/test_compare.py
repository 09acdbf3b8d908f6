"""Recipes compared over seeds and branches: which runs are paired, their gaps, and the command. Then single runs: final
losses, gaps with or without an interval, and settings that differ besides the recipe."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from analysis.recipes import HeldOut, Pair, gaps, read_held_out
from analysis.runs import compare_runs, draw_runs
from megatron_fp4.logging.run_folder import open_runs
from scripts import compare
from tests.programs import cells, error_line


def held_out(seed: int, losses: dict[int, float], start: str = "", data_seed: int | None = None, **more) -> HeldOut:
    pair = Pair(start or f"seed {seed}", seed if data_seed is None else data_seed)
    folder = Path(more.pop("folder", f"/runs/{pair.start} {seed}"))
    return HeldOut(folder, seed, pair, {tokens: {"": loss, "a": loss} for tokens, loss in losses.items()}, **more)


def percents(runs: Sequence[HeldOut], base: Sequence[HeldOut], tokens: int = 10) -> dict[str, float]:
    found = gaps({"base": base, "other": runs}, "base")
    return {row.pair.start: row.percent for row in found[found["tokens"] == tokens].itertuples() if row.source == ""}


def write_run(folder: Path, seed: int, losses: dict[int, dict[str, Any]], data: str = "{}", **facts: Any) -> Path:
    """A run's folder. losses: by step, of each source. facts: fields of the `run` record."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{seed: {seed}}}\ndata: {data}\n")
    records = [
        {"kind": "validation", "step": t, "tokens": 1_000_000 * t, "losses": by_source}
        for t, by_source in losses.items()
    ]
    start = [{"kind": "run", "step": 0} | facts] if facts else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*start, *records]))
    return folder


def test_runs_are_paired_by_seed_and_order_of_the_data() -> None:
    base = [held_out(1, {10: 2.0, 20: 1.0}), held_out(2, {10: 4.0, 20: 2.0}), held_out(1, {10: 5.0}, data_seed=7)]
    runs = [held_out(2, {10: 4.4, 20: 2.0, 30: 9.0}), held_out(1, {10: 2.02}), held_out(3, {10: 1.0})]
    assert percents(runs, base) == pytest.approx({"seed 1": 1.0, "seed 2": 10.0})
    assert percents(runs, base, 20) == pytest.approx({"seed 2": 0.0}) and not percents(runs, base, 30)
    assert percents([held_out(1, {10: 6.0}, data_seed=7)], base) == pytest.approx({"seed 1": 20.0})


def test_branches_are_paired_by_their_checkpoint_and_may_share_a_partner() -> None:
    base = [held_out(1, {10: 2.0}, "a", 1), held_out(2, {10: 4.0}, "b")]
    other_rounding = held_out(5, {10: 2.06}, "a", 1)
    runs = [held_out(1, {10: 2.02}, "a"), other_rounding, held_out(2, {10: 4.04}, "b")]
    assert percents(runs, base) == pytest.approx({"a": 2.0, "b": 1.0})
    same_seed = [*base, held_out(5, {10: 2.05}, "a", 1)]  # a base run of the same seed is preferred
    assert percents([other_rounding], same_seed) == pytest.approx({"a": 100 * (2.06 / 2.05 - 1)})


def test_a_branch_without_a_partner_is_paired_with_those_of_its_trunk() -> None:
    trunk = held_out(1, {10: 2.0}, steps=100, folder="/runs/trunk")
    copied = {"trunk": Path("/elsewhere/trunk"), "steps": 100}
    branch = held_out(1, {10: 2.02}, "c", **copied, folder="/runs/branch")
    assert percents([branch], [trunk]) == pytest.approx({"seed 1": 1.0})
    for other in (
        held_out(1, {10: 2.0}, steps=200, folder="/runs/trunk"),  # other learning rates
        held_out(1, {10: 2.0}, data_seed=3, steps=100, folder="/runs/trunk"),
        held_out(1, {10: 2.0}, steps=100, folder="/runs/other"),
    ):
        assert not percents([branch], [other])
    # A branch of a branch is paired with the partners of its trunk's trunk.
    second = held_out(1, {10: 2.06}, "d", trunk=Path("/runs/branch"), steps=100)
    found = gaps({"base": [trunk], "branch": [branch], "second": [second]}, "base")
    assert list(found[found["source"] == "a"]["percent"]) == pytest.approx([1.0, 3.0])


def test_a_run_from_scratch_is_paired_with_the_branch_that_lengthened_the_run_of_its_seed(tmp_path: Path) -> None:
    """Runs of a curve lengthen each other: 4 steps; from before their decay to 8; from before that decay to 16."""

    def longer(name: str, trunk: str, start: int, end: int, seed: int = 1) -> Path:
        origin = {"path": f"/lost/{trunk}/checkpoints/step_{start:08}", "step": start, "manifest_sha256": name}
        facts = {"steps": end, "decay_start": end - 1, "origin": origin}
        return write_run(tmp_path / name, seed, {end: {"a": 2.0}}, step=start, **facts)

    write_run(tmp_path / "four", 1, {4: {"a": 3.0}}, steps=4, decay_start=4)
    eight, sixteen = longer("eight", "four", 3, 8), longer("sixteen", "eight", 6, 16)
    run = read_held_out(write_run(tmp_path / "run", 1, {16: {"a": 2.1}}, steps=16))
    assert percents([run], [read_held_out(sixteen)], 16_000_000) == pytest.approx({"origin step 6 (sixteen)": 5.0})
    for other in (
        eight,  # not as long
        longer("decayed", "four", 4, 16),
        longer("seed_2", "four", 3, 16, seed=2),
        longer("lost", "none", 3, 16),
    ):
        assert not percents([run], [read_held_out(other)], 16_000_000), other
    with (tmp_path / "four" / "config.yaml").open("a") as config:
        config.write("precision: {name: nvfp4}\n")
    assert not percents([run], [read_held_out(sixteen)], 16_000_000)


def test_reading_a_run_finds_its_start_and_its_end(tmp_path: Path) -> None:
    origin = {"path": "/there/trunk/checkpoints/step_00000006", "step": 6, "manifest_sha256": "m" * 64}
    losses = {2: {"a": 3.0, "b": 5.0}, 4: {"a": 2.0, "b": 4.0}}
    run = read_held_out(write_run(tmp_path / "a", 3, losses, "{seed: 8}", steps=4, origin=origin))
    assert run.pair == Pair("origin step 6 (mmmmmmmmmmmm)", 8) and run.trunk == Path("/there/trunk")
    assert run.losses[4_000_000] == {"a": 2.0, "b": 4.0, "": 3.0} and run.final == 4_000_000
    same = {**origin, "path": "/b/step_00000006", "manifest_sha256": "n" * 64, "contents_sha256": "c" * 64}
    weights = read_held_out(write_run(tmp_path / "b", 3, losses, initialized_from=same, steps=8))
    assert weights.pair.start == "initialized_from step 6 (cccccccccccc)" and weights.trunk is None
    assert weights.final is None and weights.problem == "not finished, last validated after 4M tokens"
    lost = read_held_out(write_run(tmp_path / "c", 1, {2: {"a": 3.0}, 4: {"a": None}}))
    assert lost.final is None and "is not finite and positive" in lost.problem and list(lost.losses) == [2_000_000]


def test_the_command_prints_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = {1: 0.001, 2: -0.001, 3: 0.0}
    for name, gap in (("bf16", 0.0), ("nvfp4", 0.02), ("best", 0.01)):
        for seed, own in noise.items():
            factor = 1 + gap + (own if gap else 0.0)
            losses = {t: {"a": 2.0 * factor + seed / 10, "b": 4.0 * factor} for t in (2, 4)}
            write_run(tmp_path / f"{name}_{seed}", seed, losses, steps=4)
    write_run(tmp_path / "late", 9, {4: {"a": 1.0, "b": 1.0}}, steps=4)
    groups = [f"{name}={tmp_path}/{name}_*" for name in ("bf16", "nvfp4")]
    drawn = ["--output", f"{tmp_path}/gaps.png"]
    assert compare.main(["recipes", *groups, f"best={tmp_path}/best_*,{tmp_path}/late", *drawn]) == 0
    printed = capsys.readouterr().out
    by_tokens, at_the_end, by_source = (cells(table) for table in printed.split("\n\n") if table[0] == "|")
    assert by_tokens[0] == ["tokens", "bf16", "standard deviation", "nvfp4 above it", "best above it"]
    assert [row[:2] for row in by_tokens[2:]] == [["2M", "3.1000 (3)"], ["4M", "3.1000 (3)"]]
    nvfp4, best = at_the_end[3:]
    assert nvfp4[2] == "3" and nvfp4[-1] == "1.00 ± 0.00"
    assert nvfp4[3].startswith("+1.94% [") and nvfp4[3].endswith("]*")
    assert best[5].startswith("-0.95% [") and best[6].startswith("0.50 ±")
    assert by_source[0] == ["recipe above bf16", "a", "b"] and by_source[2][2].startswith("+2.00% [")
    assert "late (best): no finished run of bf16 has the same start (seed 9), data and length" in printed
    assert (tmp_path / "gaps.png").stat().st_size > 10_000
    # Group y has two branches. Both count after 4M tokens, but only `short` at the end: `long` is not finished.
    origin = {"path": "trunk/checkpoints/step_00000001", "step": 1, "manifest_sha256": "m"}
    for name, seed, steps in (("base", 1, 4), ("short", 2, 4), ("long", 3, 8)):
        write_run(tmp_path / name, seed, {4: {"a": 2.0 + seed}}, "{seed: 1}", steps=steps, origin=origin)
    assert compare.main(["recipes", f"x={tmp_path}/base", f"y={tmp_path}/short,{tmp_path}/long"]) == 0
    printed = capsys.readouterr().out
    assert "+50.00% (no interval) (1)" in printed and "+33.33% (no interval)" in printed


def test_wrong_groups_give_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", 1, {2: {"s": 2.0}})
    b = write_run(tmp_path / "b", 2, {2: {"s": 2.0}})
    c = write_run(tmp_path / "c", 1, {2: {"t": 2.0}})
    write_run(tmp_path / "twin", 1, {2: {"s": 2.0}})
    for group in "uv":  # each with a run of 1M tokens and one of 2M
        for seed in (1, 2):
            write_run(tmp_path / f"{group}_{seed}", seed, {seed: {"s": 2.0}}, steps=seed)
    for arguments, expected in (
        ([f"x={a}"], "at least two groups"),
        ([f"x={a}", f"x={b}"], "write each group once"),
        ([f"x={a}", f"y={a}"], "name each run once"),
        ([f"x={a}", f"y={tmp_path}/none*"], "no folder matches"),
        ([f"x={a}", f"y={tmp_path}/none"], "does not exist"),
        ([f"x={a}", f"y={b}"], "no pair"),
        ([f"x={a}", f"y={c}"], "were validated on different sources"),
        ([f"x={a},{tmp_path}/twin", f"y={b}"], "have the same start and seeds"),
        ([f"x={a}", f"y={tmp_path}/twin", "--against", "z"], "no group has this name"),
        ([f"u={tmp_path}/u_*", f"v={tmp_path}/v_*"], "v: its runs end after 1M and 2M tokens; name a group for each"),
    ):
        assert compare.main(["recipes", *map(str, arguments)]) == 2, arguments
        assert expected in error_line(capsys, "compare.py")


def test_final_gaps_are_converted_to_tokens_by_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BF16's loss is 2 + 8 / sqrt(M tokens). The recipe's loss after 400M is BF16's after 100M, so its price is 4."""
    of_lengths = {
        n: write_run(tmp_path / f"bf16_{n}", 1, {n: {"a": 2 + 8 / n**0.5}}, steps=n) for n in (25, 100, 400, 900)
    }
    second = write_run(tmp_path / "bf16_2", 2, {400: {"a": 2.4}}, steps=400)
    recipe = [write_run(tmp_path / f"nvfp4_{seed}", seed, {400: {"a": 2.8}}, steps=400) for seed in (1, 2)]
    groups = [f"bf16={of_lengths[400]},{second}", f"nvfp4={recipe[0]},{recipe[1]}"]
    command = ["recipes", *groups, "--curve", *map(str, of_lengths.values())]
    assert compare.main(command) == 0
    assert "tokens for the loss of bf16" in (out := capsys.readouterr().out) and "4.00 [4.00, 4.00]" in out
    curve = "by the curve of 4 runs of yours, all within 0.0000 nats of it (2.000 + 8.000 * D^-0.500), D in millions;"
    assert curve in out
    assert "--curve: another" not in out
    with (tmp_path / "bf16_25" / "config.yaml").open("a") as config:
        config.write("model: {hidden_dim: 64}\n")
    with (tmp_path / "bf16_400" / "config.yaml").open("a") as config:
        config.write("model: {hidden_dim: 32}\n")
    assert compare.main(command) == 0
    other = "--curve: its runs differ from bf16's in model or text: model.hidden_dim (64, not 32)\n"
    assert other in capsys.readouterr().out
    # With planned times, each interval of tokens is multiplied by the time of its recipe.
    planned = {"bf16": 1.0, "nvfp4": 0.75}
    composed = mock.patch("analysis.recipes.configs_of", return_value={})
    with composed, mock.patch("analysis.price.planned_times", return_value=planned):
        assert compare.main([*command, "--gpu", "b200"]) == 0
    out = capsys.readouterr().out
    row = next(row for row in cells(out) if row[0] == "nvfp4" and len(row) == 8)
    assert row[5:] == ["4.00 [4.00, 4.00]", "0.75", "3.00 [3.00, 3.00]"] and "planned, not measured" in out
    # An interval may end below the lowest loss of the curve.
    wide = write_run(tmp_path / "wide", 2, {400: {"a": 3.6}}, steps=400)
    assert compare.main(["recipes", groups[0], f"nvfp4={recipe[0]},{wide}", *command[3:]]) == 0
    assert " [0.00, " in capsys.readouterr().out
    other = write_run(tmp_path / "other", 1, {900: {"b": 2.2}}, steps=900)
    unfinished = write_run(tmp_path / "unfinished", 1, {900: {"a": 2.2}}, steps=901)
    for runs, expected in (
        ([], "runs of at least four lengths, and these have 3; name more runs, or leave --curve out"),
        ([other], "runs were validated on different sources (a or b)"),
        ([unfinished], "unfinished: not finished, last validated after 900M tokens; leave it out"),
    ):
        assert compare.main([*command[:-1], *map(str, runs)]) == 2 and expected in capsys.readouterr().err


def write_steps(folder: Path, steps: int, gap: float = 0.0, noise: float = 0.0, lr: float = 0.1) -> Path:
    """A run whose loss is `gap` percent above that of gap=0, with `noise` percent of noise in each step."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = (5 - step / steps) * (1 + (gap + noise * rng.normal()) / 100)
        lines.append({"kind": "step", "step": step, "tokens": 10 * step, "loss": loss, "tokens_per_second": 2e4})
    last = {"code": 2.0 * (1 + gap / 100), "prose": 3.0}
    lines.append({"kind": "validation", "step": steps, "tokens": 10 * steps, "losses": last})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"run: {{seed: 1}}\noptimizer: {{lr: {lr}}}\ndata: {{seed: null}}\n")
    return folder


def test_24_noisy_steps_give_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_steps(tmp_path / "a", 24), write_steps(tmp_path / "b", 24, gap=-1.0, noise=1.0, lr=0.2)]
    (tmp_path / "multirun.yaml").touch()  # SWEEP/* matches it too
    given = [*runs, tmp_path / "multirun.yaml", "--output", tmp_path / "gap.png"]
    assert compare.main(["runs", *map(str, given)]) == 0
    printed = capsys.readouterr().out
    _, _, first, second = cells(printed)
    assert first[2] == "-" and second[2].endswith("% (no interval)") and second[4] == "-1.00% (no interval)"
    assert "b also differs from a in optimizer.lr (0.2, not 0.1)" in printed
    assert (tmp_path / "gap.png").stat().st_size > 20_000


def test_many_steps_give_an_interval(tmp_path: Path) -> None:
    runs = open_runs([write_steps(tmp_path / "a", 3000), write_steps(tmp_path / "b", 3000, gap=1.0, noise=0.1)])
    _, _, first, second = cells(compare_runs(runs))
    assert first[:2] == ["a", f"{5 - 2970.5 / 3000:.4f}"] and first[-1] == "20.0k"
    low, high = map(float, second[2].partition("[")[2].strip("]").split(","))
    assert low < 1.0 < high and high - low < 0.3 and second[5:7] == ["3.0000", "+0.00% (no interval)"]
    assert draw_runs(runs, tmp_path / "a.png").exists()


def test_runs_that_cannot_be_compared_give_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps in (("a", 24), ("b", 24), ("short", 20)):
        write_steps(tmp_path / name, steps)
    for arguments, expected in (
        (["a"], "name two runs or more"),
        (["a", "none"], "name the folder of a run"),
        (["a", "short"], "short ended at step 20 and a at 24; compare runs that end at the same"),
        (["a", "a"], "two runs are called a"),
        (["a", "b", "--output", "gap.txt"], "is not the name of a picture"),
    ):
        assert compare.main(["runs", *arguments]) == 2
        assert expected in error_line(capsys, "compare.py")
