"""What scripts/export_hf.py and scripts/import_hf.py refuse: exit code 2, one line that says what to do, and every file
as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from data.tokenizer import train_tokenizer
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.checkpoint import files
from megatron_fp4.parallel.mesh import ParallelMesh
from scripts import export_hf, import_hf
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of


class Case(NamedTuple):
    """change: what is done to a copy of a good folder. arguments: {it}, {out} and {tmp} stand for that folder, the
    output and the test's own folder. words: of the line. room: bytes that a file may have."""

    change: Callable[[Path], object]
    arguments: str
    words: tuple[str, ...]
    room: int = 0


def nothing(folder: Path) -> None: ...


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 4
        (folder / name).write_bytes(content)

    return change


def cut(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (path,) = folder.glob(name)
        os.truncate(path, path.stat().st_size - 7)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).unlink()


def manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: files.write_manifest(folder, dataclasses.replace(files.read_manifest(folder), **changes))


def trainer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Another trainer.json, with a manifest that agrees with it."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / "trainer.json").read_text())
        change(content)
        record = files.write_file(folder / "trainer.json", json.dumps(content))
        old = files.read_manifest(folder)
        files.write_manifest(folder, dataclasses.replace(old, files={**old.files, "trainer.json": record}))

    return apply


def model_setting(name: str, value: Any) -> Callable[[Path], None]:
    return trainer(lambda content: content["config"]["model"].update({name: value}))


def config_setting(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, name: value}))

    return change


def place(text: str = "", link: bool = False) -> Callable[[Path], None]:
    """Something that has the output's name."""

    def change(folder: Path) -> None:
        out = folder.with_name("out")
        if link:
            out.symlink_to("nowhere")
        else:
            out.write_text(text)

    return change


def into_run(folder: Path, keep: bool = True) -> None:
    """The folder becomes a run's, with the checkpoint in it or without any."""
    moved = folder.rename(folder.with_name("moved"))
    (folder / "checkpoints").mkdir(parents=True)
    moved.rename(folder / "checkpoints" / "step_00000004") if keep else shutil.rmtree(moved)


def damaged_run(folder: Path) -> None:
    into_run(folder)
    cut("manifest.json")(folder / "checkpoints" / "step_00000004")


SHARD = "__0_0.distcp"
EXPORT = {
    "another version": Case(manifest(format=3), "{it} {out}", ("has format 3, this version reads 1 to 2", "use the")),
    "no shard": Case(remove(SHARD), "{it} {out}", (f"{SHARD} is missing", "give another checkpoint")),
    "short shard": Case(cut(SHARD), "{it} {out}", (f"{SHARD} has", "bytes instead of")),
    "changed shard": Case(flip(SHARD), "{it} {out}", (f"{SHARD} has changed since it was written",)),
    "no index": Case(remove(".metadata"), "{it} {out}", (".metadata is missing",)),
    "changed index": Case(flip(".metadata"), "{it} {out}", (".metadata has changed",)),
    "changed manifest": Case(flip("manifest.json"), "{it} {out}", ("is damaged: manifest.json",)),
    "no manifest": Case(remove("manifest.json"), "{it} {out}", ("neither a checkpoint nor a run with checkpoints",)),
    "no trainer": Case(manifest(files={}), "{it} {out}", ("manifest.json does not name trainer.json",)),
    "no configuration": Case(trainer(dict.clear), "{it} {out}", ("trainer.json does not describe a run",)),
    "no folder": Case(shutil.rmtree, "{it} {out}", ("is not a folder; give a checkpoint",)),
    "empty run": Case(lambda folder: into_run(folder, keep=False), "{it} {out}", ("neither a checkpoint nor a run",)),
    "damaged run": Case(
        damaged_run, "{it} {out}", ("no checkpoint that is whole (step_00000004: manifest.json is not", "give another")
    ),
    "unknown letter": Case(model_setting("pattern", "M-E*M-"), "{it} {out}", ("'E' at position 2",)),
    "rope and Mamba": Case(model_setting("rope", True), "{it} {out}", ("no architecture of transformers", "rope=true")),
    "other shape": Case(model_setting("ffn_dim", 80), "{it} {out}", ("up_proj.weight is [48, 32] there, [80, 32]",)),
    "other blocks": Case(model_setting("pattern", "M-*-"), "{it} {out}", ("is [", "no such tensor")),
    "other tokenizer": Case(
        nothing,
        "{it} {out} --tokenizer {tmp}/other/tokenizer.json",
        ("not the tokenizer of the run", "--tokenizer PATH"),
    ),
    "no tokenizer": Case(nothing, "{it} {out} --tokenizer {tmp}/none.json", ("none.json", "--tokenizer PATH")),
    "output is a folder": Case(nothing, "{it} {tmp}/other", ("other exists already; name another folder",)),
    "output is a file": Case(place("mine"), "{it} {out}", ("out exists already; name another folder",)),
    "output is a link": Case(place(link=True), "{it} {out}", ("out exists already; name another folder",)),
    "output in a file": Case(place("mine"), "{it} {out}/model", ("out",)),
    "output is the checkpoint": Case(nothing, "{it} {it}", ("exists already",)),
    "output in the checkpoint": Case(
        nothing, "{it} {it}/hf", ("lies inside the checkpoint", "name a folder elsewhere")
    ),
    "no space": Case(nothing, "{it} {out}", ("out.tmp", "make room"), room=20_000),
}
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-*.safetensors"
IMPORT = {
    "unknown letter": Case(
        config_setting("hybrid_override_pattern", "M-E*M"), "{it} {out}", ("'E' at position 2 is no",)
    ),
    "unknown type": Case(config_setting("model_type", "llama"), "{it} {out}", ("model_type=llama cannot be imported",)),
    "no config": Case(remove("config.json"), "{it} {out}", ("config.json is missing", "Hugging Face model")),
    "cut config": Case(cut("config.json"), "{it} {out}", ("config.json is not readable", "fetch the folder again")),
    "no folder": Case(shutil.rmtree, "{it} {out}", ("config.json is missing",)),
    "no shard": Case(remove(FIRST), "{it} {out}", ("model-00001-of-", "is missing")),
    "short shard": Case(cut(FIRST), "{it} {out}", ("model-00001-of-", "is not readable")),
    "no weights": Case(
        lambda folder: [path.unlink() for path in folder.glob("model*")],
        "{it} {out}",
        ("neither model.safetensors nor",),
    ),
    "cut index": Case(cut(INDEX), "{it} {out}", (f"{INDEX} is not readable", "fetch the folder again")),
    "other shape": Case(
        config_setting("intermediate_size", 80), "{it} {out}", ("up_proj.weight is [48, 32], [80, 32]",)
    ),
    "damaged tokenizer": Case(lambda f: (f / "tokenizer.json").write_text("{"), "{it} {out}", ("tokenizer.json",)),
    "large tokenizer": Case(
        lambda f: shutil.copy(f.with_name("other") / "tokenizer.json", f),
        "{it} {out}",
        ("320 ids and the model only 300",),
    ),
    "output is a folder": Case(nothing, "{it} {tmp}/other", ("other exists already; name another folder",)),
    "output is a file": Case(place("mine"), "{it} {out}", ("out exists already",)),
    "output is a link": Case(place(link=True), "{it} {out}", ("out exists already",)),
    "output in a file": Case(place("mine"), "{it} {out}/model", ("out",)),
    "no space": Case(nothing, "{it} {out}", ("File too large",), room=20_000),
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [f"{number} words {number * 7} and more of them, {number**3}" for number in range(400)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, mesh: ParallelMesh, texts: list[str]) -> Path:
    """A checkpoint of a run with a tokenizer (`checkpoint`), its export in two shards (`folder`), another tokenizer."""
    root = tmp_path_factory.mktemp("good")
    (root / "other").mkdir()
    own = train_tokenizer(texts, 300)
    own.save(root / "tokenizer.json")
    train_tokenizer(texts, 320).save(root / "other" / "tokenizer.json")
    made = checkpoint_of(root / "plain", CASES["hybrid"], tensors_of(strong_model(CASES["hybrid"], mesh)))
    tensors = [NewTensor(name, tuple(shape), lambda n=name: made.tensor(n)) for name, shape in made.tensors.items()]  # type: ignore[misc]
    extra = {"tokenizer.json": (root / "tokenizer.json").read_bytes()}
    write_weights_only(
        root / "checkpoint",
        made.config,
        tensors,
        imported={"from": "a test"},
        tokenizer=own.fingerprint(),
        extra_files=extra,
    )
    shutil.rmtree(root / "plain")
    size = str(60_000 / 2**30)
    assert (
        export_hf.main([str(root / "checkpoint"), str(root / "folder"), "--dtype", "float32", "--shard-gib", size]) == 0
    )
    return root


def state(folder: Path) -> dict[str, str]:
    """Every file and link below a folder, with its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else "folder"
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else kind
    return found


@contextmanager
def room(num_bytes: int) -> Iterator[None]:
    """No file may become larger: what a full disk is to a writer. 0: as usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes or soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(main: Callable[[list[str]], int], case: Case, it: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.change(it)
    before = state(it.parent)
    arguments = [part.format(it=it, out=it.with_name("out"), tmp=it.parent) for part in case.arguments.split()]
    with room(case.room):
        assert main(arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"{main.__module__.rpartition('.')[2]}.py: ") and not printed.out
    for word in case.words:
        assert word in line, line
    assert state(it.parent) == before


@pytest.fixture
def mine(good: Path, tmp_path: Path) -> Path:
    """A copy of everything that may be harmed."""
    return Path(shutil.copytree(good, tmp_path / "mine"))


@pytest.mark.parametrize("name", EXPORT)
def test_an_export_is_refused(name: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(export_hf.main, EXPORT[name], mine / "checkpoint", capsys)


@pytest.mark.parametrize("name", IMPORT)
def test_an_import_is_refused(name: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(import_hf.main, IMPORT[name], mine / "folder", capsys)
