"""scripts/convert.py: what it refuses, with exit code 2, one line that says what to do, and every file unchanged; and
what it prints on success. Damaged checkpoints; output folders that are complete or do not exist."""

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import train_tokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.weights_only import new_folder
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from pretrain import CONFIGS
from scripts import convert
from tests.distributed.one_rank import flip_a_bit, rewrite_trainer
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of

Change = Callable[[Path], Any]
SHARD, INDEX, FIRST = "__0_0.distcp", "model.safetensors.index.json", "model-00001-of-*.safetensors"


def cut(name: str) -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob(name)
        os.truncate(path, path.stat().st_size - 7)

    return change


def damaged_run(folder: Path) -> None:
    """Turn a checkpoint's folder into a run's folder that contains the checkpoint, damaged."""
    moved = folder.rename(folder.with_name("moved"))
    (folder / "checkpoints").mkdir(parents=True)
    moved.rename(folder / "checkpoints" / "step_00000004")
    cut("manifest.json")(folder / "checkpoints" / "step_00000004")


def shard_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../out.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def linked(name: str) -> Change:
    """Put a link to a file that is not the folder's."""

    def change(folder: Path) -> None:
        (folder.parent / "private").write_text('{"secret": 1}')
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "private")

    return change


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def naming_a_path(folder: Path) -> None:
    """Let the checkpoint be of a run whose configuration names the folder of a tokenizer."""
    trainer = files.read_trainer(folder, files.read_manifest(folder))
    trainer["config"]["data"]["tokenizer"] = str(folder.with_name("other"))
    rewrite_trainer(folder, trainer, weights_only=False)


# (command, change of a copy of a valid folder, arguments, words of the line). In arguments, {it} is that folder, {out}
# the output, {tmp} the test's folder.
PLAIN, OTHER = "{it} {out}", "{it} {out} --tokenizer {tmp}/other/tokenizer.json"
REFUSED: list[tuple[str, Change, str, str]] = [
    ("export-hf", lambda folder: flip_a_bit(folder / SHARD), PLAIN, f"{SHARD} has changed since it was written"),
    ("export-hf", damaged_run, PLAIN, "no intact checkpoint (step_00000004: manifest.json is not"),
    ("export-hf", bool, OTHER, "not the tokenizer of the run"),
    ("export-hf", bool, "{it} {tmp}/other", "other exists already; name another folder"),
    ("export-hf", lambda folder: folder.with_name("out").symlink_to("nowhere"), PLAIN, "out exists already"),
    ("export-hf", bool, "{it} {it}/hf", "is inside the checkpoint"),
    ("export-hf", bool, f"{PLAIN} --format nvfp4 --dtype float32", "the rest is bfloat16; leave it out"),
    ("import-hf", lambda folder: next(folder.glob(FIRST)).unlink(), PLAIN, "is missing, which"),
    ("import-hf", cut(FIRST), PLAIN, "is not readable"),
    ("import-hf", shard_outside, PLAIN, "which is not a file in the same folder"),
    ("import-hf", linked("chat_template.jinja"), PLAIN, "chat_template.jinja is a link, a pipe or a device"),
    ("import-hf", linked("special_tokens_map.json"), PLAIN, "special_tokens_map.json is a link"),
    *(("import-hf", pipe(name), PLAIN, f"{name} is a link, a pipe") for name in ("config.json", "tokenizer.json")),
    ("import-hf", lambda f: pipe(next(f.glob(FIRST)).name)(f), PLAIN, ".safetensors is a link, a pipe"),
    ("export-hf", linked("tokenizer_config.json"), PLAIN, "manifest.json does not name tokenizer_config.json"),
    ("export-hf", linked("trainer.json"), PLAIN, "trainer.json is not a plain file"),
    ("export-hf", pipe("manifest.json"), PLAIN, "manifest.json is not a plain file"),
    ("export-hf", naming_a_path, PLAIN, "other, which is not used without your consent; give --trust-config"),
    ("export-megatron", naming_a_path, PLAIN, "other, which is not used without your consent; give --trust-config"),
    ("export-hf", lambda f: rewrite_trainer(f, {"config": {"precision": 3}}), PLAIN, "configuration is not one of"),
    ("import-hf", lambda f: shutil.copy(f.with_name("other") / "tokenizer.json", f), PLAIN, "320 ids and the model"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, mesh: ParallelMesh) -> Path:
    """A folder with a `checkpoint` that has a tokenizer, its export (`folder`), and an `other` tokenizer."""
    root = tmp_path_factory.mktemp("good")
    texts = [f"{number} words {number * 7} and more of them, {number**3}" for number in range(400)]
    (root / "other").mkdir()
    own = train_tokenizer(texts, 300)
    train_tokenizer(texts, 320).save(root / "other" / "tokenizer.json")
    tensors = tensors_of(strong_model(CASES["hybrid"], mesh))
    checkpoint_of(root / "checkpoint", CASES["hybrid"], tensors, tokenizer=own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exchange.hf_export.SHARD_BYTES", 60_000)
        arguments = [str(root / "checkpoint"), str(root / "folder"), "--dtype", "float32"]
        assert convert.main(["export-hf", *arguments]) == 0
    return root


def state(folder: Path) -> dict[str, str]:
    """Every path below a folder, with a hash of its content or the target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else "folder"
        plain = path.is_file() and not path.is_symlink()
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if plain else kind
    return found


def refused(command: str, arguments: str, words: str, it: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(it.parent)
    given = [part.format(it=it, out=it.with_name("out"), tmp=it.parent) for part in arguments.split()]
    assert convert.main([command, *given]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"convert.py {command}: ") and words in line and not printed.out, printed
    assert state(it.parent) == before


@pytest.fixture
def mine(good: Path, tmp_path: Path) -> Path:
    """A copy of `good` that a test may change."""
    return Path(shutil.copytree(good, tmp_path / "mine"))


@pytest.mark.parametrize(("command", "change", "arguments", "words"), REFUSED)
def test_wrong_input_is_refused_in_one_line(
    command: str, change: Change, arguments: str, words: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = mine / ("folder" if command == "import-hf" else "checkpoint")
    change(it)
    refused(command, arguments, words, it, capsys)


def test_the_links_of_hugging_faces_cache_are_followed(mine: Path) -> None:
    """snapshots/COMMIT/NAME leads to blobs/HASH of the same model."""
    snapshot = mine / "snapshots" / ("1" * 40)
    (mine / "blobs").mkdir()
    shutil.copytree(mine / "folder", snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(mine / "blobs" / f"{number:040x}")
        path.symlink_to(f"../../blobs/{number:040x}")
    assert convert.main(["import-hf", str(snapshot), str(mine / "out")]) == 0


def test_a_full_disk_leaves_nothing(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files has the effect of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        for command, name in (("export-hf", "checkpoint"), ("import-hf", "folder"), ("export-megatron", "checkpoint")):
            refused(command, PLAIN, "make room", mine / name, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_commands_of_megatron_export_and_import(tmp_path: Path, mesh: ParallelMesh, capsys) -> None:
    config = CASES["transformer"]
    ours = checkpoint_of(tmp_path / "ours", config, tensors_of(strong_model(config, mesh))).folder
    assert convert.main(["export-megatron", str(ours), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert 'pretrain_gpt.py "${MEGATRON_ARGS[@]}" --load' in printed and "no tokenizer: the run has none" in printed
    assert "the FP32 masters were rounded to bfloat16; --dtype float32 writes them exactly" in printed
    arguments = ["import-megatron", str(tmp_path / "out"), str(tmp_path / "back")]
    assert convert.main([*arguments, "--set", "model.init_std=0.5", "--set", "model.name=mine"]) == 0
    described = (tmp_path / "back.yaml").read_text()
    for line in (f"num_kv_heads: {config.num_kv_heads}", "init_std: 0.5", "name: mine"):
        assert line in described
    assert convert.main(arguments) == 2 and "back.yaml exists already" in capsys.readouterr().err
    flip_a_bit(ours / SHARD)
    assert convert.main(["export-megatron", str(ours), str(tmp_path / "again")]) == 2
    assert "SHA-256" in capsys.readouterr().err and not (tmp_path / "again").exists()


@pytest.fixture
def whole(tmp_path: Path, mesh: ParallelMesh) -> Checkpoint:
    return checkpoint_of(tmp_path / "w", CASES["mamba"], tensors_of(strong_model(CASES["mamba"], mesh)))


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
        with pytest.raises(ValueError, match=r"out\.tmp exists: another command is writing it, or was killed"):
            new_folder(tmp_path / "far" / "out").__enter__()
    assert [path.name for path in (tmp_path / "far").rglob("*")] == ["out", "a"]
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other") as folder:
        (folder / "a").write_text("1")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="late exists already"), new_folder(tmp_path / "late") as folder:
        (tmp_path / "late").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "late"]
