"""`price.py` on a real run: losses are those of real branches; wrong input is refused before anything is trained."""

import json
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pretrain
from analysis import branches
from analysis.branches import Branch
from analysis.recipes import HeldOut, Pair
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.runtime import errors
from megatron_fp4.training import build, trainer
from megatron_fp4.training.step import StepResult
from pretrain import CONFIGS
from scripts import price
from tests.distributed.one_rank import rewrite_trainer
from tests.programs import cells, error_line
from tests.spiked_run import FAST, small_corpus, stamps
from tests.test_pretrain import SMALL, records
from tests.training.harness import launch

pytestmark = pytest.mark.slow

SETTINGS = [*SMALL, *FAST, "model.pattern=M-", "model.nvfp4_bf16_blocks.last=0", "train.steps=6"]
SETTINGS += ["train.global_batch_size=4", "checkpoint.interval=3"]
WEIGHTS = "1x16 W=precision=nvfp4 precision.fprop.weight.block=1x16"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """The overrides and the folder of a run in BF16."""
    folder = tmp_path_factory.mktemp("trunk")
    overrides = [*SETTINGS, *small_corpus(folder)]
    assert pretrain.main([*overrides, "precision=bf16", f"run.dir={folder}/run"]) == 0
    yield overrides, folder / "run"


def _losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in records(run_dir, "step") if record["step"] > 3]


def price_main(checkpoint: Any, *arguments: Any) -> int:
    return price.main(["--trust-config", "--checkpoint", str(checkpoint), *map(str, arguments)])


def _branches(output: Path) -> dict[str, list[float]]:
    """Losses by recipe."""
    branches = json.loads(output.read_text())["branches"].values()
    return {branch["recipe"]: branch["branch"]["losses"] for branch in branches}


def test_losses_are_those_of_branches_to_the_last_bit(trunk: tuple[list[str], Path], tmp_path: Path, capsys) -> None:
    overrides, run_dir = trunk
    checkpoint = run_dir / "checkpoints" / "step_00000003"
    real = [*WEIGHTS.partition("=")[2].split(), "precision.switch.when=never"]
    resumed = [f"checkpoint.resume={checkpoint}", f"run.dir={tmp_path}/branch"]
    assert pretrain.main([*overrides, *real, *resumed]) == 0
    before, models = stamps(run_dir), []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        assert all(model() is None for model in models), "the model of the previous recipe is still in memory"
        run = Trainer(*arguments, **keywords)
        models.append(weakref.ref(run.model))
        return run

    Trainer, three = branches.Trainer, ["--steps", 3]
    with mock.patch.object(branches, "Trainer", watched):
        assert price_main(checkpoint, WEIGHTS, "nvfp4", *three, "--output", tmp_path / "a.json") == 0
    assert len(models) == 3
    found = _branches(tmp_path / "a.json")
    assert found["bf16"] == _losses(run_dir)
    assert found["1x16 W"] == _losses(tmp_path / "branch") != _losses(run_dir)
    printed = capsys.readouterr().out
    rows = cells(printed)
    assert [row[0] for row in rows[2:]] == ["bf16", "1x16 W", "nvfp4"]
    mean = np.mean([a / b - 1 for a, b in zip(_losses(tmp_path / "branch"), _losses(run_dir), strict=True)])
    assert rows[3][1] == f"{100 * mean:+.2f}% (no interval)" and "Not established" in printed
    assert [row[4] for row in rows[2:]] == ["1", "-", "-"], "times of emulated recipes do not predict native ones"
    assert "no --curve: prices use the curve of Transformers on C4, 30M; this model has" in printed

    # Another order, and an override for all recipes. Losses are the same: the run's seed decides the rounding.
    again = price_main(checkpoint, "nvfp4", "train.max_skipped_steps=7", *three, "--output", tmp_path / "b.json")
    assert again == 0 and _branches(tmp_path / "b.json") == {name: found[name] for name in ("bf16", "nvfp4")}
    assert stamps(run_dir) == before


def test_saved_branches_are_not_trained_again(trunk: tuple[list[str], Path], tmp_path: Path) -> None:
    checkpoint, output = trunk[1] / "checkpoints" / "step_00000003", tmp_path / "kept.json"
    trained = []

    def counted(config: Any, *rest: Any) -> Any:
        if config.precision.name == "mxfp4":
            raise KeyboardInterrupt
        trained.append(config.precision.name)
        return Branch([5.0 + len(trained), 4.0], [0.1, 0.1])

    common = "--steps", 2, "--output", output
    with mock.patch.object(branches, "train", counted):
        with pytest.raises(KeyboardInterrupt):
            price_main(checkpoint, "mxfp8", "mxfp4", *common)
        first = _branches(output)
        assert trained == ["bf16", "mxfp8"] == [*first]
        assert price_main(checkpoint, "mxfp8", "nvfp4", *common) == 0
        assert trained == ["bf16", "mxfp8", "nvfp4"] == [*_branches(output)]
        # A branch of another length, or with another configuration of the same name, is trained.
        assert price_main(checkpoint, "mxfp8", "--steps", 3, "--output", output) == 0
        assert price_main(checkpoint, "mxfp8=precision=nvfp4", *common) == 0
    assert trained[3:] == ["bf16", "mxfp8"]  # the last configuration was saved before, as nvfp4
    assert len(json.loads(output.read_text())["branches"]) == len(trained)


def test_the_curve_is_fitted_to_runs_and_the_time_is_planned(trunk: tuple[list[str], Path], capsys) -> None:
    checkpoint, kinds = trunk[1] / "checkpoints" / "step_00000003", {20000: "builtin"}

    def finished(folder: Path, *_: Any) -> HeldOut:
        tokens = int(folder.name)
        losses, settings = {tokens: {"": 2.0 + 50 * tokens**-0.4}}, {"data.kind": kinds.get(tokens, "indexed")}
        return HeldOut(folder, 1, Pair("seed 1", 1), losses, final=tokens, settings=settings)

    def constant(config: Any, *_: Any) -> Branch:
        return Branch([4.0 if config.precision.name == "bf16" else 4.1] * 12, [1.0] * 12)

    more = ["train.steps=99", "--steps", 12, "--gpu", "b200", "--model", "transformer_60m", "--curve"]
    saved = json.loads((checkpoint / "trainer.json").read_text())["config"]
    config = config_from_saved(saved, [], CONFIGS, trusted=True)
    with (
        mock.patch.object(branches, "train", constant),
        mock.patch("analysis.recipes.read_held_out", finished),
        mock.patch("analysis.recipes.configs_of", lambda *_: {"curve": config}),
    ):
        assert price_main(checkpoint, "nvfp4", *more, 10000, 20000, 40000, 80000) == 0
    printed = capsys.readouterr().out
    assert "by the curve of 4 runs of yours, all within 0.0000 nats of it (2.000" in printed
    assert "planned for transformer_60m on b200 with sequences of" in printed
    assert "parameters, and the times are those of transformer_60m" in printed
    other = "its runs differ from the checkpoint's in model or text: data.kind (builtin, not indexed)"
    assert printed.count(other) == 1


def test_wrong_input_gives_one_line_before_anything_is_trained(trunk: tuple[list[str], Path], tmp_path, capsys) -> None:
    run_dir, steps = trunk[1], ["--steps", "2"]
    checkpoint = run_dir / "checkpoints" / "step_00000003"
    switched = shutil.copytree(checkpoint, tmp_path / "switched")
    trainer = json.loads((switched / "trainer.json").read_text())
    rewrite_trainer(switched, trainer | {"switch": trainer["switch"] | {"switched_at": 2}})
    (tmp_path / "other.json").write_text("[]")
    longer = shutil.copytree(checkpoint, tmp_path / "longer")
    trainer["config"]["train"]["steps"] = 7
    rewrite_trainer(longer, trainer)
    rewrite_trainer(shutil.copytree(checkpoint, tmp_path / "wrong"), {"config": {"model": 3}, "switch": []})
    with mock.patch.object(branches, "train", side_effect=AssertionError("trained")):
        for folder, arguments, expected in (
            (tmp_path / "none", ["nvfp4"], "is not a folder"),
            (run_dir, ["nvfp4"], "steps 7 to 66 are after the end of the run (train.steps=6)"),
            (switched, ["nvfp4", *steps], "after the precision switch of its run (before step 3)"),
            (checkpoint, ["bf16", *steps], "name at least one recipe"),
            (checkpoint, ["nvfp5", *steps], "nvfp5 is not a precision config"),
            (checkpoint, ["a=precision=nvfp5", *steps], "did you mean nvfp4"),
            (checkpoint, ["nvfp4", "nvfp4", *steps], "a different name"),
            (checkpoint, ["bf16=precision=nvfp4", *steps], "a different name"),
            (checkpoint, ["a=", *steps], "give NAME=OVERRIDES"),
            (checkpoint, ["a=precision='x", *steps], "quote as in a shell"),
            (checkpoint, ["a=precision=nvfp4 data.seed=7", *steps], "data.seed or run.seed would differ from BF16's"),
            (checkpoint, ["a=precision=nvfp4 run.seed=7", *steps], "data.seed or run.seed would differ"),
            (checkpoint, ["a=precision=nvfp4 precision.bf16_blocks.file=none.yaml", *steps], "none.yaml"),
            (checkpoint, ["nvfp4", *steps, "--output", tmp_path], "it is a folder; name a file"),
            (checkpoint, ["nvfp4", *steps, "--output", tmp_path / "other.json"], "has no branches"),
            (checkpoint, ["nvfp4", *steps, "--gpu", "h100"], "name a GPU with FP4 tensor cores: b200"),
            (checkpoint, ["nvfp4", *steps, "--curve", run_dir], "not yet validated; leave it out"),
            (checkpoint, ["nvfp4", *steps, "--checkpoint", checkpoint], "one is given twice"),
            (checkpoint, ["nvfp4", *steps, "--checkpoint", longer], "train.steps (7, not 6)"),
            (checkpoint, ["nvfp4", *steps, "--checkpoint", checkpoint.with_name("step_00000006")], "two are of one"),
            (tmp_path / "wrong", ["nvfp4", *steps], "trainer.json does not have what this program writes"),
        ):
            assert price_main(folder, *arguments) == 2, arguments
            assert expected in error_line(capsys, "price.py")


def _on_ranks(rank: int, overrides: list[str], folder: str) -> tuple[list[float], list[float], str]:
    """Train two steps, price the second one as a branch of the first's checkpoint, and give wrong input, which rank 0
    refuses. Returns the branch's losses, the recorded losses and the exit code of the refusal."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29999}
    os.environ.update({name: str(value) for name, value in place.items()})
    split = [*overrides, "parallel.tensor=2", "checkpoint.interval=1", "train.steps=2", "validation.interval=0"]
    output = Path(folder) / "kept.json"
    with (
        mock.patch.object(build, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(pretrain, "leave_distributed", lambda: None),
        mock.patch.object(errors, "leave_distributed", lambda: None),
    ):
        assert pretrain.main([*split, "precision=nvfp4", "precision.switch.when=never", f"run.dir={folder}/run"]) == 0
        arguments = [f"{folder}/run/checkpoints/step_00000001", "nvfp4", "--steps", 1, "--output"]
        assert price_main(*arguments, output) == 0
        (Path(folder) / "other.json").write_text("[]")
        wrong = price_main(*arguments, Path(folder) / "other.json")
    if rank:
        return [], [], str(wrong)
    steps = [record["loss"] for record in records(Path(folder) / "run", "step")][1:]
    return _branches(output)["nvfp4"], steps, str(wrong)


def test_losses_on_two_tensor_parallel_ranks_are_those_of_the_run(tmp_path: Path) -> None:
    found = launch(_on_ranks, 2, [*SETTINGS, *small_corpus(tmp_path)], str(tmp_path), seconds=600.0)
    tried, recorded, _ = found[0]
    assert tried == recorded and len(tried) == 1
    assert [code for *_, code in found] == ["2", "2"]


def test_spikes_and_nonfinite_steps(trunk: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A spike rolls back to the checkpoint, as in the run; a recipe that diverges ends without ending the command."""
    nan = StepResult(float("nan"), float("nan"), skipped=True)
    steps = [StepResult(2.0, 1.0, False), StepResult(9.0, 1.0, True, spike=True), StepResult(2.0, 1.0, False), nan, nan]
    checkpoint = str(trunk[1] / "checkpoints" / "step_00000003")
    settings = ["spikes.action=rollback", "spikes.window=2", "train.max_skipped_steps=2", "--steps", "3"]
    with (
        mock.patch.object(trainer, "accumulate"),
        mock.patch.object(trainer, "update", side_effect=steps),
        mock.patch.object(trainer.Trainer, "roll_back", autospec=True, return_value=3) as roll_back,
    ):
        assert price_main(checkpoint, "nvfp4", *settings) == 0
    assert [call.args[1:] for call in roll_back.call_args_list] == [(5,)]
    printed = capsys.readouterr().out
    bf16, nvfp4 = (line for line in printed.splitlines() if line.startswith("run/step_00000003, ") and ";" in line)
    assert "step 5 was a spike" in bf16 and "1 step made no update" in bf16
    assert "ended after step 5: 2 steps in a row were not finite" in nvfp4
    assert ["nvfp4", *"-----"] in cells(printed)
