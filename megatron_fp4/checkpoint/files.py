"""Checkpoints on disk, for one process: folders, manifests, the pointer. No collectives here.

    checkpoints/
      latest                     the name of the newest checkpoint, for people and tools; always replaced as a whole
      step_00000200/             a complete checkpoint: the folder gets this name after its manifest was written
        manifest.json            describes the checkpoint, with size and SHA-256 of every other file
        trainer.json             the trainer's state
        __0_0.distcp, .metadata  model and optimizer, by torch.distributed.checkpoint
        rng.pt                   random generators of all ranks
      step_00000400.tmp/         being written, or left over from an interrupted save or removal
      step_00000200.old/         an earlier checkpoint of this step, while it is replaced
      step_00000400.damaged/     found damaged by a start; never removed, because someone may repair it
      step_00000400.returned/    was away while the run saved newer checkpoints of lower steps; never removed

"Newest" means saved last (`save_index`), not the highest step: a run whose newest checkpoint was damaged or away
continues from an earlier one. The index also counts checkpoints that were moved aside, and those of state.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

logger = logging.getLogger(__name__)

FORMAT = 2
"""The format of manifests. Of checkpoints of format 1 only the weights are read."""
MANIFEST, TRAINER, RANDOM_STATE, POINTER = "manifest.json", "trainer.json", "rng.pt", "latest"
T = TypeVar("T")
# Larger files are read in pieces only. The metadata of a thousand ranks has 100 MB.
_MOST_BYTES = 1 << 30
# Where a link in Hugging Face's cache leads.
_CACHE_LINK = re.compile(r"(\.\./){2,4}blobs/[0-9a-f]{40,64}")
_FOLDER = re.compile(r"step_\d{8,}")


class DamagedCheckpointError(ValueError):
    """A checkpoint is damaged; the message says how.

    file: the one whose content has changed since it was written; "" if the content was never a checkpoint. unreadable:
    the disk reports an error for the file, because the file is damaged or the connection to the disk is.
    """

    def __init__(self, message: str, file: str = "", unreadable: bool = False) -> None:
        super().__init__(message)
        self.file = file
        self.unreadable = unreadable


class OtherFormatError(DamagedCheckpointError):
    """A checkpoint has the format of another version; it may be intact."""


@dataclass(frozen=True)
class FileRecord:
    """The size of a file in bytes, and its SHA-256 as hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint.

    save_index: 1 for the first checkpoint of its run, then 2, 3, ... step: optimizer steps done. consumed_*: training
    samples and tokens until then. world_size: of the job that saved it. identity: see config_diff.py. files: all but
    the manifest, by their names in the folder. weights_only: it has no optimizer state; no run resumes from it.
    """

    save_index: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    world_size: int
    identity: dict[str, Any]
    files: dict[str, FileRecord]
    torch_version: str
    format: int = FORMAT
    weights_only: bool = False


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run that a run began from. path: absolute. manifest_sha256: of its manifest.json.

    contents_sha256: of the names and digests of its files, without the trainer state, which has the configuration and
    times. So it is equal if weights, moments and generators are. Version 0.2 left it empty.
    """

    path: str
    step: int
    manifest_sha256: str
    contents_sha256: str = ""

    @staticmethod
    def at(folder: Path, manifest: Manifest) -> Origin:
        """The checkpoint in `folder`, an absolute path. manifest: of the checkpoint. Raises OSError."""
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        digests = sorted((name, record.sha256) for name, record in manifest.files.items() if name != TRAINER)
        contents = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        return Origin(str(folder), manifest.step, digest, contents)

    @staticmethod
    def of(trainer: Mapping[str, Any], key: str = "origin") -> Origin | None:
        """The origin in a checkpoint's trainer state. key: `origin`, or `initialized_from`."""
        with well_formed(f"the {key} of a checkpoint"):
            return _typed(Origin, trainer[key]) if trainer.get(key) else None

    def is_in(self, folder: Path) -> bool:
        """Whether the checkpoint in `folder` is this one, or has the same bits."""
        try:
            other = Origin.at(folder, read_manifest(folder))
        except DamagedCheckpointError:
            return False
        return self.manifest_sha256 == other.manifest_sha256 or self.contents_sha256 == other.contents_sha256


def origin_state(origin: Origin | None) -> dict[str, Any] | None:
    """`origin` as it is in a checkpoint's trainer state: JSON types."""
    return None if origin is None else dataclasses.asdict(origin)


def folder_name(step: int) -> str:
    """`step_00000200` for 200."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The inverse of `folder_name`."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(root: Path) -> list[Path]:
    """Folders under `root` with the name of a checkpoint, intact or not; none if there is no root."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))


def scan(root: Path) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, DamagedCheckpointError | OSError]]]:
    """The checkpoints under `root` with their manifests, the newest first; and those whose manifest cannot be read.

    A manifest that the disk cannot read makes only its own checkpoint unusable: new ones can still be saved.
    """
    readable, broken = [], []
    for folder in list_checkpoints(root):
        try:
            readable.append((folder, read_manifest(folder)))
        except (DamagedCheckpointError, OSError) as error:
            broken.append((folder, error))
    # Earlier versions gave an index twice, when a checkpoint came back after the run had saved another.
    return sorted(readable, key=lambda entry: (-entry[1].save_index, -entry[1].step)), broken


def checkpoint_in(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest intact one of the run in it; ValueError if there is none."""
    if (folder / MANIFEST).exists():
        return folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a checkpoint, as RUN/checkpoints/step_00000200, or a run")
    for root in (folder / "checkpoints", folder):
        readable, broken = scan(root)
        if readable:
            return readable[0][0]
        if broken:
            listing = "; ".join(f"{path.name}: {problem}" for path, problem in broken)
            raise ValueError(f"{folder} has no intact checkpoint ({listing}); give another run or checkpoint")
    raise ValueError(f"{folder} is neither a checkpoint nor a run with checkpoints; give one that is")


# Reading


def open_plain(path: Path) -> io.FileIO:
    """Open a file of a checkpoint, run or model to read it: what others wrote is opened only here.

    Raises ValueError if it is no plain file, because a link may lead anywhere and a pipe never ends; OSError. Links of
    Hugging Face's cache, which lead to a file of the same model, are followed.
    """
    refusal = f"{path} is a link, a pipe or a device, not a plain file; `cp -rL` copies the files that you trust"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP and _CACHE_LINK.fullmatch(target := os.readlink(path)):
            return open_plain(path.parent / target)
        if error.errno in (errno.ELOOP, errno.ENXIO):  # ENXIO: a socket
            raise ValueError(refusal) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(refusal)
    return io.FileIO(descriptor, "rb")


def read_plain(path: Path, most: int = _MOST_BYTES) -> bytes:
    """The content of a file, by `open_plain`. Raises ValueError, too, if it has more than `most` bytes."""
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path} has {size:,} bytes, and at most {most:,} are read")
        return file.readall()


def check_plain(folder: Path) -> None:
    """Raise ValueError unless `folder` has only plain files and folders. For libraries that open files themselves."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            open_plain(path).close()


@contextlib.contextmanager
def well_formed(what: object) -> Iterator[None]:
    """Inside, a value of the wrong type or a missing key becomes a ValueError about `what`, which others wrote."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{what} does not have what this program writes ({error!r:.200}); give another") from error


@contextlib.contextmanager
def opened(folder: Path, name: str, record: FileRecord | None = None) -> Iterator[io.FileIO]:
    """A context with `open_plain` of a file, which must have the size in its record. A file that is missing or no plain
    file, and EIO, by which a disk reports damage, become a DamagedCheckpointError."""
    try:
        try:
            file = open_plain(folder / name)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{name} is missing", name) from error
        except ValueError as error:
            raise DamagedCheckpointError(f"{name} is not a plain file", name) from error
        with file:
            size = os.fstat(file.fileno()).st_size
            if record is not None and size != record.size:
                raise DamagedCheckpointError(f"{name} has {size} bytes instead of {record.size}", name)
            yield file
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        message = f"{name} is not readable: {os.strerror(errno.EIO)}"
        raise DamagedCheckpointError(message, name, unreadable=True) from error


def changed(name: str) -> DamagedCheckpointError:
    """The error for a file that has changed since it was written."""
    return DamagedCheckpointError(f"{name} has changed since it was written (its SHA-256 differs)", name)


def check_file(folder: Path, name: str, record: FileRecord, from_disk: bool = False) -> DamagedCheckpointError | None:
    """What is wrong with a file of a checkpoint; None if it matches its record.

    from_disk: read it from the disk again, because the copy in this host's page cache may be wrong.
    """
    try:
        with opened(folder, name, record) as file:
            if from_disk:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except DamagedCheckpointError as error:
        return error
    return None if digest == record.sha256 else changed(name)


def read_checked(folder: Path, name: str, records: Mapping[str, FileRecord]) -> bytes:
    """Read a small file of a checkpoint. Raises DamagedCheckpointError if it does not match its record."""
    if name not in records:
        raise DamagedCheckpointError(f"{MANIFEST} does not name {name}")
    if records[name].size > _MOST_BYTES:
        raise DamagedCheckpointError(f"{name} has {records[name].size:,} bytes, and at most {_MOST_BYTES:,} are read")
    with opened(folder, name, records[name]) as file:
        content = file.readall()
    if hashlib.sha256(content).hexdigest() != records[name].sha256:
        raise changed(name)
    return content


def read_trainer(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The trainer state of the checkpoint in `folder`. Raises DamagedCheckpointError; OSError."""
    text = read_checked(folder, TRAINER, manifest.files)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{TRAINER} is not readable: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{TRAINER} is not a JSON object")
    return content


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises DamagedCheckpointError if it is missing, damaged, or unknown; OSError."""
    with opened(folder, MANIFEST) as file:
        text = file.read(_MOST_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise DamagedCheckpointError(f"{MANIFEST} is not readable: {error}") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise DamagedCheckpointError(str(changed(MANIFEST)))
    try:
        if type(number := content["format"]) is int and not 1 <= number <= FORMAT:
            raise OtherFormatError(f"{MANIFEST} has format {number}, this version reads 1 to {FORMAT}")
        records = {name: _typed(FileRecord, record) for name, record in content["files"].items()}
        manifest = _typed(Manifest, {**content, "files": records})
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} does not describe a checkpoint: {error}") from error
    for name in manifest.files:
        if Path(name).name != name or name in ("..", MANIFEST):  # nothing outside the folder is read
            raise DamagedCheckpointError(f"{MANIFEST} names {name!r}, which is not a file name")
    return manifest


def _typed(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass with values from JSON. Raises TypeError for a wrong type, and for a number below 0."""
    made = cls(**values)
    for name, hint in get_type_hints(cls).items():
        value, kind = getattr(made, name), get_origin(hint) or hint
        if type(value) is not kind or (kind is int and value < 0):
            raise TypeError(f"{name} is {value!r:.40}")
    return made


def read_pointer(root: Path) -> str | None:
    """The name in `latest`; None if it is missing, empty or not a file."""
    path = root / POINTER
    return path.read_text(errors="replace").strip() or None if path.is_file() else None


# Writing


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with its own digest, and sync it to the disk."""
    content = dataclasses.asdict(manifest)
    write_file(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1))
    sync_folder(folder)


def next_save_index(root: Path, known: int = 0) -> int:
    """1 + the highest save index under `root`, of checkpoints that were moved aside too. known: of an earlier save."""
    for folder in root.glob("step_*[!p]"):  # not *.tmp
        with contextlib.suppress(DamagedCheckpointError, OSError):
            known = max(known, read_manifest(folder).save_index)
    return 1 + known


def publish(staging: Path, final: Path) -> None:
    """Rename a finished folder to `final`, then point to it. An earlier folder of this name is removed last."""
    replaced = final.with_name(final.name + ".old")
    if os.path.lexists(final):  # perhaps a link that leads nowhere
        os.rename(final, replaced)
    try:
        os.rename(staging, final)
    except OSError:
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise
    try:
        sync_folder(final.parent)
        write_pointer(final)
    except OSError as error:  # the checkpoint has its name, and the newest is found without a pointer
        logger.warning("%s is saved, but `%s` does not name it: %s", final, POINTER, error)
    with contextlib.suppress(OSError):  # the next start removes it
        remove(replaced)


def write_pointer(folder: Path) -> None:
    """Make `latest` name `folder`. At any moment the file is either the old one or the new one."""
    new = folder.parent / f"{POINTER}.tmp"
    write_file(new, folder.name + "\n")
    os.replace(new, folder.parent / POINTER)
    sync_folder(folder.parent)


def prune(root: Path, keep: int, just_made: Path, needed: Collection[str] = ()) -> list[Path]:
    """Remove all but the `keep` newest checkpoints (0: keep all), but not `just_made`, the one that `latest` names, or
    those with `needed` names. Returns the removed ones."""
    if keep == 0:
        return []
    protected = {just_made.name, read_pointer(root), *needed}
    removed = [folder for folder, _ in scan(root)[0][keep:] if folder.name not in protected]
    for folder in removed:
        # Renamed first, so that an interrupted removal does not leave a folder that looks like a checkpoint.
        doomed = folder.with_name(folder.name + ".tmp")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    return removed


def move_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint to `NAME.damaged`, or `NAME.damaged.1`.... why: `damaged`, or `returned`."""
    target = free_name(folder.with_name(f"{folder.name}.{why}"))
    os.rename(folder, target)
    sync_folder(folder.parent)
    return target


def free_name(path: Path) -> Path:
    """The first of `path`, `path.1`, `path.2`, ... that does not exist."""
    number, free = 0, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def clean_stale(root: Path) -> list[str]:
    """Clean up after interrupted saves and removals; returns a line for each thing that was done."""
    if not root.is_dir():
        return []
    done = []
    remove(root / f"{POINTER}.tmp")
    for path in sorted(root.iterdir()):
        if path.suffix not in (".tmp", ".old") or not _FOLDER.fullmatch(path.stem):
            continue
        if path.suffix == ".old" and not path.with_suffix("").exists():
            # Interrupted between the two renames of `publish`: the earlier checkpoint of this name is still good.
            os.rename(path, path.with_suffix(""))
            done.append(f"restored {path.with_suffix('').name}")
        else:
            remove(path)
            done.append(f"removed unfinished {path.name}")
    return done


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link (not its target), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> FileRecord:
    """Write a file, text as UTF-8, and sync it to the disk; returns its record."""
    content = content.encode() if isinstance(content, str) else content
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of names to the disk. Only then are renames in it permanent."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
