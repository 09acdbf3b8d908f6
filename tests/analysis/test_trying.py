"""`compare.py try` on a real run: the losses are those of branches, and what cannot be tried is refused before."""

from __future__ import annotations

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
from analysis import trying
from analysis.trials import Trial
from data.indexed import IndexedDatasetWriter
from megatron_fp4.config.compose import as_saved, config_from_saved
from megatron_fp4.training import trainer
from megatron_fp4.training.step import StepResult
from pretrain import CONFIGS
from scripts import compare
from tests.training.harness import launch

pytestmark = pytest.mark.slow

SMALL = [
    "model=tiny", "model.pattern=M-", "model.vocab_size=128", "model.hidden_dim=64", "model.ffn_dim=64",
    "model.mamba_num_heads=4", "model.mamba_head_dim=32", "model.mamba_state_dim=16",
    "model.nvfp4_bf16_blocks.last=0", "train.steps=6", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.sequence_length=32", "data=indexed", "data.num_workers=0", "data.phases=[{name: main, blend: tokens}]",
    "validation.interval=6", "validation.num_samples=2", "checkpoint.interval=3", "checkpoint.keep=0",
    "logging.tensorboard=false", "logging.report=false", "run.device=cpu",
]  # fmt: skip
WEIGHTS = "1x16 W=precision=nvfp4 precision.fprop.weight.block=1x16"


def _overrides(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for name in ("text", "held_out"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for _ in range(20):
                writer.add_document(rng.integers(0, 128, 64))
    return [*SMALL, f"data.sources={{text: {folder}/text}}", f"data.validation={{text: {folder}/held_out}}"]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """The overrides of a run in BF16, and its folder."""
    folder = tmp_path_factory.mktemp("trunk")
    overrides = _overrides(folder)
    assert pretrain.main([*overrides, "precision=bf16", f"run.dir={folder}/run"]) == 0
    yield overrides, folder / "run"


def _records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def _losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in _records(run_dir, "step") if record["step"] > 3]


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def compare_try(*arguments: Any) -> int:
    return compare.main(["try", "--trust-config", *map(str, arguments)])


def _tried(checkpoint: Path, output: Path, *arguments: str) -> dict[str, Any]:
    assert compare_try(checkpoint, "--steps", 3, "--output", output, *arguments) == 0
    return dict(json.loads(output.read_text()))


def test_losses_are_those_of_branches_to_the_last_bit(
    trunk: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, run_dir = trunk
    checkpoint = run_dir / "checkpoints" / "step_00000003"
    real = [*WEIGHTS.partition("=")[2].split(), "precision.switch.when=never"]
    resumed = [f"checkpoint.resume={checkpoint}", f"run.dir={tmp_path}/branch"]
    assert pretrain.main([*overrides, *real, *resumed]) == 0
    before, models = _state(run_dir), []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        assert all(model() is None for model in models), "the model of the recipe before is still there"
        run = Trainer(*arguments, **keywords)
        models.append(weakref.ref(run.model))
        return run

    Trainer = trying.Trainer
    with mock.patch.object(trying, "Trainer", watched):
        tried = _tried(checkpoint, tmp_path / "a.json", "bf16", WEIGHTS, "nvfp4", "--validate", "--skip", "1")
    assert len(models) == 3
    assert tried["trials"]["bf16"]["losses"] == _losses(run_dir)
    assert tried["trials"]["1x16 W"]["losses"] == _losses(tmp_path / "branch") != _losses(run_dir)
    for name, folder in (("bf16", run_dir), ("1x16 W", tmp_path / "branch")):
        assert tried["trials"][name]["held_out"] == _records(folder, "validation")[-1]["losses"]
    lines = capsys.readouterr().out.splitlines()
    heads, _, base, first, second, *_ = (line.split(" | ") for line in lines if line.startswith("|"))
    assert [cells[0] for cells in (base, first, second)] == ["| bf16", "| 1x16 W", "| nvfp4"]
    assert heads[4] == "above 1x16 W" and base[2] == "-" and first[4] == "-" and second[4] != "-"
    mean = np.mean([a / b - 1 for a, b in zip(_losses(tmp_path / "branch"), _losses(run_dir), strict=True)][1:])
    assert first[2] == f"{100 * mean:+.2f}% (no interval)"

    # Another order, and a key for all: the seed of rounding is the run's, whatever was tried before.
    again = _tried(checkpoint, tmp_path / "b.json", "nvfp4", "bf16", "train.max_skipped_steps=7")
    for name in ("nvfp4", "bf16"):
        assert again["trials"][name]["losses"] == tried["trials"][name]["losses"]
    assert _state(run_dir) == before


def test_the_same_command_resumes_with_what_is_missing(
    trunk: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, output = trunk[1] / "checkpoints" / "step_00000003", tmp_path / "tried.json"
    trained = []

    def counted(config: Any, *rest: Any) -> Any:
        if config.precision.name == "mxfp4":
            raise KeyboardInterrupt
        trained.append(config.precision.name)
        return Trial([5.0 + len(trained), 4.0], [0.1, 0.1])

    common = checkpoint, "--steps", 2, "--output", output
    with mock.patch.object(trying, "train", counted):
        with pytest.raises(KeyboardInterrupt):
            compare_try(*common, "bf16", "mxfp8", "mxfp4")
        first = json.loads(output.read_text())
        assert trained == ["bf16", "mxfp8"] == [*first["trials"]]
        more = "bf16", "mxfp8", "fewer=precision=mxfp8 precision.bf16_blocks.last=1 optimizer.lr=1e-4"
        assert compare_try(*common, *more, "--picture", tmp_path / "gaps.png") == 0
        assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert trained == ["bf16", "mxfp8", "mxfp8 with bf16_blocks.last=1"]
    unlike = [line for line in capsys.readouterr().out.splitlines() if "recipe alone" in line]
    assert unlike == ["not the recipe alone: fewer differs from bf16 in optimizer.lr (0.0001, not 0.002), too"]
    then = json.loads(output.read_text())
    assert {name: then["trials"][name] for name in first["trials"]} == first["trials"]
    for arguments, expected in (
        (["bf16", "mxfp8", "--steps", 3], "another number of steps (2, and this is 3)"),
        (["bf16", "mxfp8=precision=nvfp4", "--steps", 2], "another mxfp8, whose configuration"),
    ):
        assert compare_try(checkpoint, *arguments, "--output", output) == 2
        assert expected in capsys.readouterr().err
    assert json.loads(output.read_text()) == then


def test_a_checkpoint_that_a_recipe_has_shaped_is_said(
    trunk: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copytree(trunk[1] / "checkpoints" / "step_00000003", tmp_path / "step_00000003")
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    overrides = ["precision=mxfp8", "precision.switch.when=never"]
    shaped = as_saved(config_from_saved(trainer["config"], overrides, CONFIGS, trusted=True))
    with mock.patch.object(trying, "train", lambda *_: Trial([5.0, 4.0], [0.1, 0.1])):
        for config, said in ((trainer["config"], False), (shaped, True)):
            (checkpoint / "trainer.json").write_text(json.dumps({**trainer, "config": config}))
            assert compare_try(checkpoint, "bf16", "nvfp4", "--steps", 2) == 0
            assert ("its run trains in mxfp8, to which its weights have come to fit" in capsys.readouterr().out) == said


def test_wrong_input_is_one_line_before_anything_is_trained(
    trunk: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, steps = trunk[1], ["--steps", "2"]
    checkpoint = run_dir / "checkpoints" / "step_00000003"
    switched = shutil.copytree(checkpoint, tmp_path / "switched")
    trainer = json.loads((switched / "trainer.json").read_text())
    trainer["switch"]["switched_at"] = 2
    (switched / "trainer.json").write_text(json.dumps(trainer))
    nvfp4 = "a=precision=nvfp4"
    with mock.patch.object(trying, "train", side_effect=AssertionError("trained")):
        for folder, arguments, expected in (
            (tmp_path / "none", ["bf16", "nvfp4"], "is not a folder"),
            (run_dir, ["bf16", "nvfp4"], "steps 7 to 66 lie beyond the run's end (train.steps=6)"),
            (switched, ["bf16", "nvfp4", *steps], "after the precision switch of its run (before step 3)"),
            (checkpoint, ["bf16", *steps], "name two recipes at least"),
            (checkpoint, ["bf16", "nvfp5", *steps], "nvfp5 is no precision config"),
            (checkpoint, ["bf16", "a=precision=nvfp5", *steps], "did you mean nvfp4"),
            (checkpoint, ["bf16", "nvfp4", "nvfp4", *steps], "a name of its own"),
            (checkpoint, ["bf16", "a=", *steps], "give NAME=OVERRIDES"),
            (checkpoint, ["bf16", "a=precision='x", *steps], "quote as in a shell"),
            (checkpoint, ["bf16", f"{nvfp4} data.seed=7", *steps], "data.seed would differ from bf16's"),
            (checkpoint, ["bf16", f"{nvfp4} run.seed=7", *steps], "give data.seed=1234 as"),
            (checkpoint, ["bf16", f"{nvfp4} precision.bf16_blocks.file=none.yaml", *steps], "none.yaml"),
            (checkpoint, ["bf16", "nvfp4", "--against", "mxfp4", *steps], "no recipe has this name"),
            (checkpoint, ["bf16", "nvfp4", "--skip", "2", *steps], "at least one step must count"),
            (checkpoint, ["bf16", "nvfp4", *steps, "--output", tmp_path], "it is a folder; name a file"),
            (checkpoint, ["bf16", "nvfp4", *steps, "--picture", "gaps.txt"], "gaps.txt is no name of a picture"),
        ):
            assert compare_try(folder, *arguments) == 2, arguments
            printed = capsys.readouterr().err
            assert printed.startswith("compare.py: ") and expected in printed and printed.count("\n") == 1, printed


def _on_ranks(rank: int, overrides: list[str], folder: str) -> tuple[list[float], list[float], str]:
    """On the ranks of a launch: a run of one more step than its checkpoint, this one tried, and a refusal of the first
    rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29999}
    os.environ.update({name: str(value) for name, value in place.items()})
    split = [*overrides, "parallel.tensor=2", "checkpoint.interval=1", "train.steps=2", "validation.interval=0"]
    tried = Path(folder) / "tried.json"
    with (
        mock.patch.object(pretrain, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(trying, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(pretrain, "leave_distributed", lambda: None),
        mock.patch("megatron_fp4.parallel.mesh.leave_distributed", lambda: None),
    ):
        assert pretrain.main([*split, "precision=nvfp4", "precision.switch.when=never", f"run.dir={folder}/run"]) == 0
        arguments = [f"{folder}/run/checkpoints/step_00000001", "nvfp4", "bf16", "--steps", 1, "--output", tried]
        assert compare_try(*arguments) == 0
        wrong = compare_try(*arguments, "precision.recheck_interval=5")
    if rank:
        return [], [], str(wrong)
    steps = [record["loss"] for record in _records(Path(folder) / "run", "step")][1:]
    return json.loads(tried.read_text())["trials"]["nvfp4"]["losses"], steps, str(wrong)


def test_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    found = launch(_on_ranks, 2, _overrides(tmp_path), str(tmp_path), seconds=600.0)
    tried, recorded, _ = found[0]
    assert tried == recorded and len(tried) == 1
    assert [code for *_, code in found] == ["2", "2"]


def test_spikes_and_steps_that_are_not_finite(
    trunk: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A spike goes back to the checkpoint as in the run; a recipe that diverges ends, and not the command."""
    nan = StepResult(float("nan"), float("nan"), skipped=True)
    steps = [StepResult(2.0, 1.0, False), StepResult(9.0, 1.0, True, spike=True), StepResult(2.0, 1.0, False), nan, nan]
    checkpoint = str(trunk[1] / "checkpoints" / "step_00000003")
    settings = ["spikes.action=rollback", "spikes.window=2", "train.max_skipped_steps=2", "--steps", "3"]
    with (
        mock.patch.object(trainer, "accumulate"),
        mock.patch.object(trainer, "update", side_effect=steps),
        mock.patch.object(trainer.Trainer, "roll_back", autospec=True, return_value=3) as roll_back,
    ):
        assert compare_try(checkpoint, "bf16", "nvfp4", *settings) == 0
    assert [call.args[1:] for call in roll_back.call_args_list] == [(5,)]
    printed = capsys.readouterr().out
    assert "bf16: step 5 was a spike" in printed and "all recipes: 1 step made no update" in printed
    assert "nvfp4: ended after step 5: 2 steps in a row were not finite" in printed
    assert "| nvfp4 | - | - | - | - |" in printed
