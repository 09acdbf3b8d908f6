"""Checkpoints on the nodes' own disks, as one process sees them: folders and records. No collectives here.

    local_dir/
      megatron_fp4_<run>/              run: random, made once for a run.dir
        <start>/                       start: random, of one start of the run
          rank_00003/                  what rank 3 holds; written by it, and by its partner on another node
            step_00000130/
              part.json                what it is, and size and SHA-256 of every other file; written last
              __3_0.distcp, .metadata  all that rank 3 holds of model and optimizer
              rng.pt, trainer.json     its random generators; the loop's own state
            step_00000140.tmp/         being written, or left over
    run.dir/checkpoints/local.json     the run, and the starts whose local checkpoints count

Each start has a folder of its own, and counts only once it has saved something: so what a run did before it went back,
or on other ranks, is never mixed with what it does now. `save` names one save on all ranks: only parts of the same save
make a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, FileRecord, Manifest

RECORD = "part.json"
POINTER = "local.json"
FORMAT = 1
_ID = re.compile(r"[0-9a-f]{16}")
_RANK = re.compile(r"rank_(\d{5,})")
_STEP = re.compile(r"step_(\d{8,})")


class Key(NamedTuple):
    """Where a part lies below the run's folder."""

    start: str
    rank: int
    step: int


@dataclass(frozen=True)
class Part:
    """One rank's part of a local checkpoint.

    save: the same on all ranks, and of no other save. layout: see `layout_digest`. files: by name, all but the record.
    The rest as in a shared checkpoint's manifest.
    """

    run: str
    start: str
    save: str
    rank: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    world_size: int
    layout: str
    identity: dict[str, Any]
    files: dict[str, FileRecord]
    torch_version: str
    format: int = FORMAT

    @property
    def key(self) -> Key:
        """Where it belongs."""
        return Key(self.start, self.rank, self.step)

    @property
    def manifest(self) -> Manifest:
        """As a shared checkpoint has it."""
        return Manifest(
            save_index=0,
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            world_size=self.world_size,
            identity=self.identity,
            files=self.files,
            torch_version=self.torch_version,
        )


@dataclass(frozen=True)
class Lineage:
    """What run.dir knows of local checkpoints. starts: those whose count, the latest first."""

    run: str
    starts: tuple[str, ...] = ()


def new_id() -> str:
    """A name that nobody else has."""
    return secrets.token_hex(8)


def read_lineage(root: Path) -> Lineage | None:
    """None if there is none, or nothing that can be read. root: the folder of the shared checkpoints."""
    try:
        content = json.loads((root / POINTER).read_text())
        lineage = Lineage(content["run"], tuple(content["starts"]))
        whole = all(_ID.fullmatch(name) for name in (lineage.run, *lineage.starts))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return lineage if whole else None


def write_lineage(root: Path, lineage: Lineage) -> None:
    """Replace it; at every moment the file is either the old one or the new one."""
    root.mkdir(parents=True, exist_ok=True)
    new = root / f"{POINTER}.tmp"
    files.write_file(new, json.dumps(dataclasses.asdict(lineage)) + "\n")
    os.replace(new, root / POINTER)
    files.sync_folder(root)


def forget_starts(root: Path) -> None:
    """What was saved locally does not count any more: a run without local checkpoints has gone on from another one."""
    lineage = read_lineage(root)
    if lineage is not None and lineage.starts:
        write_lineage(root, Lineage(lineage.run))


def run_folder(local_dir: Path, run: str) -> Path:
    """Everything of a run on this node."""
    return local_dir / f"megatron_fp4_{run}"


def part_folder(run_dir: Path, key: Key) -> Path:
    """Where a part lies. run_dir: by `run_folder`."""
    return run_dir / key.start / f"rank_{key.rank:05d}" / files.folder_name(key.step)


def temporary(folder: Path) -> Path:
    """Where a part is written before it gets its name."""
    return folder.with_name(folder.name + ".tmp")


def encode(part: Part) -> bytes:
    """The content of a record."""
    content = dataclasses.asdict(part)
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def decode(raw: bytes) -> Part:
    """The inverse of `encode`. Raises DamagedCheckpointError if it is anything else."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise DamagedCheckpointError(f"{RECORD} is not readable: {error}") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise DamagedCheckpointError(files.changed(RECORD))
    if content.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{RECORD} has format {content.get('format')}, this version reads {FORMAT}")
    try:
        content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
        part = Part(**content)
        numbers = (part.rank, part.step, part.world_size, part.consumed_samples, part.consumed_tokens)
        sizes = [record.size for record in part.files.values()]
        right = all(isinstance(n, int) and n >= 0 for n in (*numbers, *sizes)) and all(
            _ID.fullmatch(name) for name in (part.run, part.start, part.save)
        )
    except (TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{RECORD} does not describe a part: {error}") from error
    if not right:
        raise DamagedCheckpointError(f"{RECORD} does not describe a part")
    for name in part.files:
        if Path(name).name != name or name in ("..", RECORD):  # nothing outside the folder is read or written
            raise DamagedCheckpointError(f"{RECORD} names {name!r}, which is not the name of a file beside it")
    return part


def read_part(folder: Path, run: str, key: Key) -> Part:
    """The record in `folder`. Raises DamagedCheckpointError, also if it is not the record of `key`, and OSError."""
    try:
        part = decode((folder / RECORD).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{RECORD} is missing") from None
    if part.run != run or part.key != key:
        raise DamagedCheckpointError(f"{RECORD} is of {part.key} of run {part.run}")
    return part


def parts_here(run_dir: Path, starts: Collection[str]) -> Iterator[tuple[Path, Key]]:
    """The folders on this node that bear the name of a part of these starts, whole or not."""
    for start in starts:
        for ranks in _folders(run_dir / start):
            for folder in _folders(ranks):
                rank, step = _RANK.fullmatch(ranks.name), _STEP.fullmatch(folder.name)
                if rank and step:
                    key = Key(start, int(rank[1]), int(step[1]))
                    if folder == part_folder(run_dir, key):
                        yield folder, key


def publish(folder: Path) -> None:
    """Give a part that was written its name; what had it goes."""
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(temporary(folder), folder)
    for above in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
        files.sync_folder(above)


def remove_unfinished(run_dir: Path) -> None:
    """Clear what interrupted saves left behind."""
    for path in run_dir.glob("*/rank_*/step_*.tmp"):
        shutil.rmtree(path)


def prune(run_dir: Path, keep: Collection[tuple[str, int]]) -> None:
    """Remove all of the run on this node but the (start, step) to keep."""
    kept_starts = {start for start, _ in keep}
    for start in _folders(run_dir):
        if start.name not in kept_starts and _ID.fullmatch(start.name):
            shutil.rmtree(start)
    for folder, key in list(parts_here(run_dir, kept_starts)):
        if (key.start, key.step) not in keep:
            # Renamed first: a removal that is interrupted must not leave something that looks like a part.
            os.rename(folder, temporary(folder))
            shutil.rmtree(temporary(folder))


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
