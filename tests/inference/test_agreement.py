"""scripts/evaluate.py --validation: the framework's validation loss is that of the exported model in transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain
from data.indexed import write_dataset
from inference.agreement import TOLERANCE
from megatron_fp4.parallel.mesh import leave_distributed
from scripts import evaluate
from tests.inference.folders import checkpoint_of, folder_of
from tests.programs import error_line
from tests.test_pretrain import SMALL, records

pytestmark = pytest.mark.slow


def write_text(path: Path, documents: int, vocab_size: int) -> None:
    """Write documents of 1 to 60 tokens: some windows have a dozen documents, others two."""
    draws = np.random.default_rng(documents)
    lengths = (draws.integers(1, 9 if document % 20 < 10 else 60) for document in range(documents))
    write_dataset(path, (draws.zipf(1.3, length) % vocab_size for length in lengths), np.uint16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run on its own data, with two held-out sets."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, documents in (("web", 600), ("held_out", 90), ("other", 40)):
        write_text(folder / name, documents, 300)
    sources = f"data.sources={{web: {folder}/web}}"
    held_out = f"data.validation={{web: {folder}/held_out, other: {folder}/other}}"
    phases = "data.phases=[{name: main, fraction: 1.0, blend: {web: 1.0}}]"
    return ["data=indexed", "data.num_workers=0", sources, held_out, phases]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> Iterator[Path]:
    """A run of two steps of a hybrid in NVFP4 with masked documents, the second after the switch. Not to be changed."""
    folder = tmp_path_factory.mktemp("run") / "small"
    steps = ["train.steps=2", "validation.interval=1", "checkpoint.interval=1", "schedule.warmup_fraction=0"]
    # A rate that moves the weights: the loss of an initial model hardly depends on the arithmetic.
    switch = ["precision.switch.when=1", "optimizer.lr=0.02"]
    masked = ["data.documents=masked", "data.boundary_loss=false", "logging.tensorboard=false"]
    assert pretrain.main([*SMALL, *data, *steps, *switch, *masked, f"run.dir={folder}"]) == 0
    yield folder
    leave_distributed()


def validated(arguments: list[str], tmp_path: Path, code: int = 0) -> dict[str, Any]:
    record = tmp_path / "validation.json"
    assert evaluate.main(["--device", "cpu", "--trust-config", "--json", str(record), *arguments]) == code
    return json.loads(record.read_text())


@pytest.mark.parametrize("step", [1, 2])
def test_the_loss_of_a_masked_hybrid_agrees_before_and_after_its_switch(step: int, run: Path, tmp_path, capsys) -> None:
    """The loss in FP32 agrees with transformers, and differs from the one that the run recorded with its plan."""
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    found = validated(["--validation", str(checkpoint)], tmp_path)
    ours, theirs = found["nats"]["framework, FP32"], found["nats"]["transformers, FP32: FP32 export"]
    assert ours.keys() == {"web", "other"} and theirs == pytest.approx(ours, abs=TOLERANCE)
    for name, loss in ours.items():
        assert abs(found["nats"]["recorded by the run"][name] - loss) > 2 * TOLERANCE
    assert found["agrees"] is True
    printed = capsys.readouterr().out
    assert "framework and transformers agree to 1e-05 nats" in printed
    (recorded,) = [record["losses"] for record in records(run, "validation") if record["step"] == step]
    assert found["nats"]["recorded by the run"] == recorded


def test_the_loss_of_a_transformer_agrees_with_joined_and_masked_documents(data: list[str], tmp_path: Path) -> None:
    """Positions begin again in each masked document."""
    ours: dict[str, dict[str, float]] = {}
    for documents in ("joined", "masked"):
        checkpoint = checkpoint_of(tmp_path / documents, "transformer", [*data, f"data.documents={documents}"])
        nats = validated(["--validation", str(checkpoint.folder)], tmp_path)["nats"]
        ours[documents] = nats["framework, FP32"]
        assert nats["transformers, FP32: FP32 export"] == pytest.approx(ours[documents], abs=TOLERANCE)
    assert abs(ours["joined"]["web"] - ours["masked"]["web"]) > 1e-3  # masking matters


def test_folders_are_judged_if_they_are_in_fp32(data: list[str], tmp_path: Path, capsys) -> None:
    """The loss of a BF16 folder is only shown. An FP32 folder of another model differs, and gives exit code 4."""
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "hybrid", data)
    rounded = folder_of(tmp_path / "rounded", checkpoint, torch.bfloat16)
    other = folder_of(tmp_path / "other", checkpoint_of(tmp_path / "another", "hybrid", seed=1))
    given = ["--validation", str(checkpoint.folder)]
    ours, theirs = validated([*given, str(rounded)], tmp_path)["nats"].values()
    assert TOLERANCE < max(abs(theirs[name] - loss) for name, loss in ours.items()) < 0.05
    assert "(stored in bfloat16)" in capsys.readouterr().out
    found = validated([*given, f"wrong={other}"], tmp_path, code=4)
    assert found["agrees"] is False and "DIFFERS: transformers, FP32: wrong is " in capsys.readouterr().out
    for arguments, message in (
        (["--set", "train.sequence_length=32"], "--set train.sequence_length=32 is not about data"),
        (["--trust-config", "--set", "data.validation={web: /nowhere/web}"], "/nowhere/web"),
        ([], "which is not used without your consent; give --trust-config if the run is yours"),
        ([str(tmp_path)], "is neither a checkpoint nor a run with checkpoints"),
    ):
        assert evaluate.main([*given, *arguments]) == 2
        assert message in error_line(capsys, "evaluate.py")
