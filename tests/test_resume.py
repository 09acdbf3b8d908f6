"""Second starts of pretrain.py, with intact, damaged, lost and changed checkpoints, and of finished runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain
from data.indexed import write_dataset
from megatron_fp4.training import trainer
from tests.spiked_run import printed_by
from tests.test_pretrain import SMALL, STEPS, assert_same_checkpoint, losses, records

pytestmark = pytest.mark.slow

# As in configs/data/builtin.yaml.
PHASES = ", ".join(
    f"{{name: {name}, fraction: {fraction}, blend: {{code: {code}, prose: {1 - code:.1f}}}}}"
    for name, fraction, code in (("broad", 0.7, 0.7), ("balanced", 0.2, 0.5), ("prose", 0.1, 0.3))
)
FEW = [*SMALL, "checkpoint.interval=2", "logging.tensorboard=false", "data=indexed", "data.num_workers=0"]
FEW += [f"data.phases=[{PHASES}]"]
Start = Callable[..., str]


def write_text(path: Path, documents: int) -> None:
    generator = np.random.default_rng(documents)
    write_dataset(path, generator.zipf(1.3, (documents, 200)) % 512, np.uint16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small corpus with the built-in one's source names."""
    folder = tmp_path_factory.mktemp("corpus")
    sizes = {"code": 300, "prose": 200, "held_out_code": 30, "held_out_prose": 31}
    for name, documents in sizes.items():
        write_text(folder / name, documents)
    return [
        f"data.sources={{code: {folder}/code, prose: {folder}/prose}}",
        f"data.validation={{code: {folder}/held_out_code, prose: {folder}/held_out_prose}}",
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> Path:
    """The folder of a run of 8 steps, with checkpoints of steps 2, 4, 6 and 8. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert pretrain.main([*FEW, *data, f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def start(request: pytest.FixtureRequest, data: list[str], capsys: pytest.CaptureFixture[str]) -> Start:
    """Start pretrain.py with the module's FEW, run.dir and overrides; it must end with `code`. Returns what it
    printed."""
    few = [*request.module.FEW, *data]
    return lambda run_dir, *given, code=0: printed_by([*few, f"run.dir={run_dir}", *given], capsys, code)


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.json without the goodput, which changes with each start."""
    content = json.loads((run_dir / "summary.json").read_text())
    return {key: value for key, value in content.items() if key != "goodput"}


def rewrite_metrics(run_dir: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(line for line in lines if keep(json.loads(line))))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_a_damaged_checkpoint_is_moved_aside(finished: Path, copy: Path, start: Start) -> None:
    """The start also copes with an empty pointer and the folder of an unfinished save."""
    cut(checkpoint(copy, 8) / "__0_0.distcp")
    (copy / "checkpoints" / "latest").write_text("")
    (copy / "checkpoints" / "step_00000010.tmp").mkdir()
    assert "kept as step_00000008.damaged, training again from step 6" in start(copy)
    (event,) = records(copy, "damaged")
    assert event["step"] == 6 and event["moved_to"] == "step_00000008.damaged" and "__0_0.distcp" in event["problem"]
    assert losses(copy) == losses(finished) and not (copy / "checkpoints" / "step_00000010.tmp").exists()
    assert checkpoint(copy, 8).is_dir() and (copy / "checkpoints" / "latest").read_text() == "step_00000008\n"


def only_state(run_dir: Path) -> bytes:
    """Remove all but state.json from a run's folder; returns its content."""
    content = (run_dir / "state.json").read_bytes()
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    (run_dir / "state.json").write_bytes(content)
    return content


def test_a_run_with_lost_checkpoints_does_not_begin_again(finished: Path, copy: Path, start: Start) -> None:
    """It is refused even if only state.json is left, after another refusal or of a killed run."""
    shutil.rmtree(copy / "checkpoints")
    metrics = (copy / "metrics.jsonl").read_bytes()
    output = start(copy, code=2)
    for text in ("metrics.jsonl has 8 steps and 4 saved checkpoints", "state.json", "checkpoint.resume=never"):
        assert text in output
    assert (copy / "metrics.jsonl").read_bytes() == metrics
    start(copy, "train.stepz=3", code=2)
    before = only_state(copy)
    killed = {**json.loads(before), "state": "running", "step": 0}
    for content in (before, json.dumps(killed).encode()):
        (copy / "state.json").write_bytes(content)
        for override in ("checkpoint.resume=auto", "train.stepz=3"):
            output = start(copy, override, code=2)
            assert ("a checkpoint of step 8" in output and "checkpoint.resume=never" in output) or "stepz" in output
            assert (copy / "state.json").read_bytes() == content
    (copy / "metrics.jsonl").write_bytes(metrics)
    start(copy, "checkpoint.resume=never")  # the remedy of the message
    assert losses(copy) == losses(finished) and (copy / "metrics.jsonl.1").read_bytes() == metrics


def test_a_resume_with_other_code_or_on_another_machine_says_so(copy: Path, start: Start, monkeypatch) -> None:
    now = trainer.made_by(torch.device("cpu"))
    monkeypatch.setattr(trainer, "made_by", lambda _: now | {"torch": "2.99", "ATEN_CPU_CAPABILITY": "DEFAULT"})
    shutil.rmtree(checkpoint(copy, 8))
    output = start(copy)
    for key, value in (("torch", "2.99"), ("ATEN_CPU_CAPABILITY", "DEFAULT")):
        assert f"changed since the checkpoint: {key} {now[key]} -> {value}\n" in output
    assert output.count("changed since the checkpoint") == 2 and len(records(copy, "made_by")[0]["changes"]) == 2


def test_a_finished_run_can_be_lengthened(finished: Path, copy: Path, start: Start, tmp_path: Path) -> None:
    before = (copy / "metrics.jsonl").read_bytes()
    output = start(copy, "train.steps=16", "train.max_skipped_steps=10")
    for text in (
        "changed since the checkpoint: train.steps 8 -> 16",
        "the precision switched before step 7 and stays switched",
        "WARNING: the learning rate had begun to decay and rises again, from 2.00e-05 in step 8",
        "was before step 7, to bf16",
        "resumed after step 8 of 16",
    ):
        assert text in output
    assert {"key": "train.steps", "before": 8, "now": 16} in records(copy, "configuration")[0]["changes"]
    # Records and checkpoint of the first part keep every byte.
    assert (copy / "metrics.jsonl").read_bytes().startswith(before)
    for path in checkpoint(finished, STEPS).iterdir():
        assert (checkpoint(copy, STEPS) / path.name).read_bytes() == path.read_bytes()
    phases = ["broad"] * 6 + ["balanced", "prose"] + ["broad"] * 3 + ["balanced"] * 3 + ["prose"] * 2
    assert [record["phase"] for record in records(copy, "step")] == phases
    assert {step: losses(copy)[step] for step in range(1, STEPS + 1)} == losses(finished)
    assert json.loads((copy / "summary.json").read_text())["steps"] == 16 and (copy / "summary.json.1").exists()

    again = Path(shutil.copytree(copy, tmp_path / "again"))
    for step in (12, 14, 16):
        shutil.rmtree(checkpoint(again, step))
    output = start(again, "train.steps=16")  # as if it had stopped in the middle of a lengthened phase
    assert "resumed after step 10 of 16" in output and "changed since" not in output
    assert losses(again) == losses(copy)
    assert_same_checkpoint(checkpoint(copy, 16), checkpoint(again, 16), tmp_path)


def test_a_start_of_a_finished_run_writes_missing_outputs(finished: Path, copy: Path, start: Start) -> None:
    (copy / "loss.png").unlink()
    (copy / "summary.json").write_text("")  # a power cut while it was written
    rewrite_metrics(copy, lambda record: record["step"] < STEPS or record["kind"] == "step")
    output = start(copy)
    assert "lacks its last checkpoint's event, its last validation, loss.png, summary.json; writing it now" in output
    assert summary(copy) == summary(finished)
    assert (copy / "loss.png").stat().st_size > 10_000
    assert records(copy, "validation") == records(finished, "validation")
    assert [event["step"] for event in records(copy, "checkpoint")] == [2, 4, 6, 8]
    before = (copy / "metrics.jsonl").read_bytes()
    assert "is finished" in start(copy) and (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "differs", "accepts"),
    [
        ("run.seed=7", "run.seed: 1234 in the checkpoint, 7 now", "checkpoint.allow_mismatch=true"),
        ("data.seed=7", "data.seed (by default run.seed) was 1234 and is now 7", "checkpoint.allow_mismatch=true"),
        ("precision.switch.when=never", "after the precision switch", "precision.switch.target"),
    ],
)
def test_refusals_name_the_difference_and_the_remedy(
    finished: Path, start: Start, override: str, differs: str, accepts: str
) -> None:
    before = sorted(finished.rglob("*"))
    output = start(finished, override, code=2)
    assert differs in output and accepts in output
    assert {*finished.rglob("*")} ^ {*before} <= {finished / ".lock"}


def test_files_are_added_and_future_phases_replaced(
    finished: Path, copy: Path, start: Start, data: list[str], tmp_path: Path
) -> None:
    """The changes are printed and recorded, the past stays, and a resume in the middle gives the same run."""
    write_text(tmp_path / "more", 250)
    served = ("{name: broad, steps: 6", "{name: balanced, steps: 1", "{name: prose, steps: 1")
    phases = PHASES
    for name, fraction in zip(served, ("0.7", "0.2", "0.1"), strict=True):
        phases = phases.replace(f"{name.rpartition(',')[0]}, fraction: {fraction}", name)
    large = "{name: large, steps: 3, blend: tokens, global_batch_size: 16}"
    short = "{name: short, blend: {code: 1}, sequence_length: 16}"
    change = [
        data[0].replace("code: ", "code: [").replace(", prose", f", {tmp_path}/more], prose"),
        f"data.phases=[{phases}, {large}, {short}]",
        "train.steps=14",
    ]
    printed = start(copy, *change)
    assert "source 'code' has 1 new files of 50,000 tokens" in printed
    assert "phases after sample 64: were none" in printed
    (event,) = records(copy, "data")
    assert event["step"] == STEPS and len(event["changes"]) == 2
    steps = records(copy, "step")
    assert {step: losses(copy)[step] for step in range(1, STEPS + 1)} == losses(finished)
    assert [record["phase"] for record in steps[STEPS:]] == ["large"] * 3 + ["short"] * 3
    assert np.diff([0, *(record["tokens"] for record in steps)]).tolist() == [512] * 8 + [1024] * 3 + [512] * 3
    epochs = [record["epochs"]["code"] for record in steps]
    assert epochs == sorted(epochs) and 0 < epochs[0] < epochs[-1]

    again = Path(shutil.copytree(copy, tmp_path / "again"))
    for step in (12, 14):
        shutil.rmtree(checkpoint(again, step))
    assert "new files" not in start(again, *change)
    assert losses(again) == losses(copy)
    assert_same_checkpoint(checkpoint(copy, 14), checkpoint(again, 14), tmp_path)

    refused = start(copy, *change, "data.max_epochs={code: 0.1}", "train.steps=20", code=2)
    assert "would go through code" in refused and "raise data.max_epochs" in refused
