"""Reading damaged checkpoints and links; output folders that are complete or do not exist."""

from dataclasses import replace
from pathlib import Path

import pytest

from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.weights_only import new_folder
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from pretrain import CONFIGS
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of


@pytest.fixture
def whole(tmp_path: Path, mesh: ParallelMesh) -> Checkpoint:
    return checkpoint_of(tmp_path / "w", CASES["mamba"], tensors_of(strong_model(CASES["mamba"], mesh)))


def test_a_damaged_shard_is_refused(whole: Checkpoint) -> None:
    shard = whole.folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().replace(b"data/0", b"data/9"))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        for name in whole.tensors:
            whole.tensor(name)


def test_nothing_outside_the_folder_is_read(tmp_path: Path, whole: Checkpoint) -> None:
    (whole.folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    (whole.folder / "__0_0.distcp").symlink_to(tmp_path / "__0_0.distcp")
    with pytest.raises(ValueError, match="is not a plain file"):
        open_checkpoint(whole.folder, CONFIGS)
    for index, place in whole._metadata.storage_data.items():
        whole._metadata.storage_data[index] = replace(place, relative_path="../__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"names no file in the folder for a piece of model.head"):
        whole.tensor("head.weight")


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "far" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "far" / "out").exists()
        # As another command would.
        with pytest.raises(ValueError, match=r"another command is writing .*out\.tmp; wait"):
            new_folder(tmp_path / "far" / "out").__enter__()
    assert [path.name for path in (tmp_path / "far").rglob("*")] == ["out", "a"]
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other") as folder:
        (folder / "a").write_text("1")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="late exists already"), new_folder(tmp_path / "late") as folder:
        (tmp_path / "late").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "late"]


def test_remains_of_a_killed_command_are_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    """Remains of a command contain a lock file that no process holds."""
    (tmp_path / "out.tmp").mkdir()
    for name in (".being_written", "half"):
        (tmp_path / "out.tmp" / name).touch()
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "thesis").write_text("years of work")
    (tmp_path / "link.tmp").symlink_to(tmp_path / "mine.tmp")
    for name in ("mine", "link"):
        with pytest.raises(ValueError, match=rf"{name}\.tmp exists, and no such command wrote it"):
            new_folder(tmp_path / name).__enter__()
        assert (tmp_path / f"{name}.tmp" / "thesis").read_text() == "years of work"
