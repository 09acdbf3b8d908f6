import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint import files
from tests.distributed.one_rank import names


def make(root: Path, step: int, save_index: int, suffix: str = "") -> Path:
    folder = root / (files.folder_name(step) + suffix)
    folder.mkdir(parents=True)
    records = {"shard": files.write_file(folder / "shard", b"x" * 100)}
    files.write_manifest(folder, files.Manifest(save_index, step, 0, 0, 1, {"a": 1}, records, "2"))
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not readable"),
        (lambda path: path.write_text("[]"), "has changed"),
        (lambda path: path.write_text("[" * 200_000), "is not readable"),
        (lambda path: path.write_text(path.read_text().replace("200", "300")), "has changed"),
        (lambda path: rewrite(path.parent, format=None), "does not describe a checkpoint: .*format"),
        (lambda path: rewrite(path.parent, save_index="7"), "does not describe a checkpoint: .*save_index"),
        (lambda path: rewrite(path.parent, world_size=-1), "does not describe a checkpoint: world_size is -1"),
        (lambda path: rewrite(path.parent, identity=[]), "does not describe a checkpoint: identity is"),
        (lambda path: rewrite(path.parent, weights_only="no"), "does not describe a checkpoint: weights_only is 'no'"),
        (lambda path: rewrite(path.parent, files={"a": {"size": "9", "sha256": ""}}), "size is '9'"),
        (lambda path: rewrite(path.parent, format=99), "format 99"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path, 200, 1)
    manifest = files.read_manifest(folder)
    assert (folder.name, manifest.step, manifest.identity) == ("step_00000200", 200, {"a": 1})
    damage(folder / files.MANIFEST)
    with pytest.raises(files.DamagedCheckpointError, match=message) as caught:
        files.read_manifest(folder)
    assert isinstance(caught.value, files.OtherFormatError) == (message == "format 99")


def rewrite(folder: Path, **values: object) -> None:
    """Change a manifest's content, and its digest with it."""
    content = json.loads((folder / files.MANIFEST).read_text())
    del content["sha256"]
    content.update(values)
    content["sha256"] = files._digest(content)
    (folder / files.MANIFEST).write_text(json.dumps(content))


def test_an_old_manifest_that_cannot_be_read_is_only_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, *newer = [make(tmp_path, 100 * index, index) for index in range(1, 5)]
    open_plain = files.open_plain

    def failing(path: Path) -> Any:
        if path.parent == old:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_plain(path)

    monkeypatch.setattr(files, "open_plain", failing)
    readable, ((broken, problem),) = files.scan(tmp_path)
    assert broken == old and os.strerror(errno.EACCES) in str(problem)
    assert [folder for folder, _ in readable] == newer[::-1]
    assert files.next_save_index(tmp_path) == 5
    assert files.prune(tmp_path, 2, just_made=newer[-1]) == newer[:1]
    assert old.is_dir()


def test_the_newest_checkpoint_is_the_one_saved_last(tmp_path: Path) -> None:
    assert files.scan(tmp_path / "nowhere") == ([], [])
    for step, index in ((400, 1), (200, 3), (300, 2)):  # the run rolled back and saved again
        make(tmp_path, step, index)
    make(tmp_path, 500, 10, ".tmp")
    readable, broken = files.scan(tmp_path)
    assert [folder.name[-3:] for folder, _ in readable] == ["200", "300", "400"] and not broken
    assert files.next_save_index(tmp_path) == 4


def test_equal_save_indexes_of_earlier_versions_do_not_tie(tmp_path: Path) -> None:
    for step, index in ((300, 2), (350, 3), (400, 3)):
        make(tmp_path, step, index)
    assert [manifest.step for _, manifest in files.scan(tmp_path)[0]] == [400, 350, 300]
    files.move_aside(tmp_path / "step_00000400")
    assert files.next_save_index(tmp_path) == 4 and files.next_save_index(tmp_path, known=7) == 8


def test_a_link_that_leads_nowhere_is_replaced_by_the_checkpoint_of_its_name(tmp_path: Path) -> None:
    for suffix in ("", ".damaged"):
        (tmp_path / f"step_00000200{suffix}").symlink_to(tmp_path / "nowhere")
    files.publish(make(tmp_path, 200, 1, ".tmp"), tmp_path / "step_00000200")
    assert files.read_manifest(tmp_path / "step_00000200").step == 200
    assert files.move_aside(tmp_path / "step_00000200").name == "step_00000200.damaged.1"
    assert names(tmp_path) == ["latest", "step_00000200.damaged", "step_00000200.damaged.1"]


def test_prune_keeps_the_newest_the_one_of_the_pointer_and_damaged_ones(tmp_path: Path) -> None:
    for index in range(1, 6):
        make(tmp_path, 100 * index, index)
    files.write_pointer(tmp_path / "step_00000100")
    (tmp_path / "step_00000200" / files.MANIFEST).unlink()
    assert files.prune(tmp_path, 0, tmp_path / "step_00000500") == []
    removed = files.prune(tmp_path, 1, just_made=tmp_path / "step_00000500")
    assert {path.name for path in removed} == {"step_00000300", "step_00000400"}
    assert names(tmp_path) == ["latest", "step_00000100", "step_00000200", "step_00000500"]


def test_clean_stale_removes_what_killed_saves_left(tmp_path: Path) -> None:
    assert files.clean_stale(tmp_path / "nowhere") == []
    make(tmp_path, 100, 1)
    make(tmp_path, 100, 1, ".old")  # killed after it was replaced
    make(tmp_path, 200, 2, ".old")  # killed between the two renames
    make(tmp_path, 200, 3, ".tmp")
    for other in ("notes.tmp", "notes.old", "step_00000300.damaged.old"):
        (tmp_path / other).mkdir()
    kept = {*names(tmp_path)} - {f"step_00000{name}" for name in ("100.old", "200.old", "200.tmp")}
    (tmp_path / "step_00000900.tmp").symlink_to(tmp_path / "step_00000100")  # the link goes, its target stays
    done = files.clean_stale(tmp_path)
    assert len(done) == 4 and "restored step_00000200" in done
    assert {*names(tmp_path)} == kept | {"step_00000200"}
    assert files.read_manifest(tmp_path / "step_00000100").step == 100
    assert files.read_manifest(tmp_path / "step_00000200").save_index == 2
