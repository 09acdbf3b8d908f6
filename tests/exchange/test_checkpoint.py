from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from exchange.checkpoint import Checkpoint, load_model, open_checkpoint
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from pretrain import CONFIGS
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of
from tests.models.builders import tokens_and_targets
from tests.test_pretrain import run as start

TINY = [
    "train.steps=2", "train.sequence_length=32", "train.global_batch_size=4", "train.micro_batch_size=2",
    "model.pattern=M*-M", "model.hidden_dim=64", "model.ffn_dim=64", "model.head_dim=16", "model.num_query_heads=4",
    "model.mamba_num_heads=4", "model.mamba_head_dim=16", "model.mamba_state_dim=16",
    "precision.bf16_blocks.first=0", "precision.bf16_blocks.last=1", "precision.switch.when=never",
    "validation.num_samples=2", "checkpoint.asynchronous=false", "logging.tensorboard=false",
    "logging.report=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run on two tensor-parallel ranks: pieces of rows, and of columns."""
    folder = tmp_path_factory.mktemp("run")
    data = ["model.vocab_size=512", f"data.cache_dir={corpus}"]
    start(2, [*TINY, *data, "parallel.tensor=2", "checkpoint.interval=1", f"run.dir={folder}"])
    return folder


@pytest.mark.slow
def test_tensors_of_a_mesh_are_read_as_torch_reads_them(run: Path) -> None:
    checkpoint = open_checkpoint(run, CONFIGS)
    checkpoint.verify()
    assert checkpoint.step == 2 and checkpoint.tokens == 2 * 4 * 32 and not checkpoint.weights_only
    expected = {f"model.{name}": torch.empty(shape) for name, shape in checkpoint.tensors.items()}
    dcp.load(expected, checkpoint_id=str(checkpoint.folder), no_dist=True)
    for name, shape in checkpoint.tensors.items():
        values = checkpoint.tensor(name)
        assert values.shape == shape and torch.equal(values, expected[f"model.{name}"]), name
        first, last = shape[0] // 3, shape[0] - shape[0] // 4
        assert torch.equal(checkpoint.tensor(name, slice(first, last)), values[first:last]), name


@pytest.mark.slow
def test_the_model_of_a_run_has_its_loss(run: Path, mesh: ParallelMesh) -> None:
    checkpoint = open_checkpoint(run / "checkpoints" / files.folder_name(2), CONFIGS)
    model = load_model(checkpoint)
    tokens, targets = tokens_and_targets(checkpoint.config.model, length=32)
    assert {name: p.shape for name, p in model.named_parameters()} == checkpoint.tensors
    loss = model(tokens, targets).item()
    by_hand = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(by_hand, rel=1e-6)


def test_a_written_one_is_read_back_and_says_what_it_is(tmp_path: Path, mesh: ParallelMesh) -> None:
    model = strong_model(CASES["hybrid"], mesh)
    checkpoint = checkpoint_of(tmp_path / "w", CASES["hybrid"], tensors_of(model))
    checkpoint.verify()
    assert checkpoint.weights_only and checkpoint.step == 0 and checkpoint.config.model == CASES["hybrid"]
    loaded = tensors_of(load_model(checkpoint))
    assert loaded.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(loaded[name], values) for name, values in tensors_of(model).items())
    assert json.loads((tmp_path / "w" / files.MANIFEST).read_text())["weights_only"] is True


def test_many_small_files_hold_the_same(tmp_path: Path, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exchange.weights_only._FILE_BYTES", 4096)
    tensors = tensors_of(strong_model(CASES["hybrid"], mesh))
    checkpoint = checkpoint_of(tmp_path / "w", CASES["hybrid"], tensors)
    assert len(list((tmp_path / "w").glob("*.distcp"))) > 5
    assert all(torch.equal(checkpoint.tensor(name), values) for name, values in tensors.items())


def test_what_fails_leaves_nothing(tmp_path: Path, mesh: ParallelMesh) -> None:
    config = checkpoint_of(tmp_path / "w", CASES["mamba"], tensors_of(strong_model(CASES["mamba"], mesh))).config

    def breaks() -> torch.Tensor:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_weights_only(tmp_path / "b", config, [NewTensor("head.weight", (4, 4), breaks)], imported={})
    with pytest.raises(ValueError, match="exists already"):
        write_weights_only(tmp_path / "w", config, [], imported={})
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.fixture
def whole(tmp_path: Path, mesh: ParallelMesh) -> Checkpoint:
    return checkpoint_of(tmp_path / "w", CASES["mamba"], tensors_of(strong_model(CASES["mamba"], mesh)))


def opened(folder: Path) -> str:
    """The refusal."""
    with pytest.raises(ValueError) as caught:
        open_checkpoint(folder, CONFIGS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damage_is_named(whole: Checkpoint) -> None:
    shard = whole.folder / "__0_0.distcp"
    content = shard.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    shard.write_bytes(changed)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp has changed"):
        open_checkpoint(whole.folder, CONFIGS).verify()
    shard.write_bytes(content[:-7])
    assert "__0_0.distcp has" in opened(whole.folder)
    shard.unlink()
    assert "__0_0.distcp is missing" in opened(whole.folder)


def test_values_are_never_taken_from_the_wrong_place(whole: Checkpoint) -> None:
    shard = whole.folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().replace(b"data/0", b"data/9"))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        for name in whole.tensors:
            whole.tensor(name)


def test_nothing_outside_the_folder_is_read(tmp_path: Path, whole: Checkpoint) -> None:
    (whole.folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    (whole.folder / "__0_0.distcp").symlink_to(tmp_path / "__0_0.distcp")
    assert "is a link" in opened(whole.folder)
    for index, place in whole._metadata.storage_data.items():
        whole._metadata.storage_data[index] = replace(place, relative_path="../__0_0.distcp")
    with pytest.raises(
        DamagedCheckpointError, match=r"names no file of the checkpoint for a piece of model.head.weight"
    ):
        whole.tensor("head.weight")


def test_what_is_no_checkpoint(tmp_path: Path, whole: Checkpoint) -> None:
    assert "is not a folder" in opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "neither a checkpoint nor a run" in opened(tmp_path / "empty")


def test_another_version_is_named(whole: Checkpoint) -> None:
    manifest = files.read_manifest(whole.folder)
    files.write_manifest(whole.folder, replace(manifest, format=3))
    assert "format 3" in opened(whole.folder) and "version that wrote it" in opened(whole.folder)


def test_tensors_of_another_model_are_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    tensors = tensors_of(strong_model(CASES["mamba"], mesh))
    del tensors["blocks.1.mixer.conv.bias"]
    checkpoint = checkpoint_of(tmp_path / "w", CASES["mamba"], tensors)
    with pytest.raises(ValueError, match=r"blocks.1.mixer.conv.bias is no such tensor there, \[\d+\] in the model"):
        load_model(checkpoint)
