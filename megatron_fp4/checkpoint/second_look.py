"""Whether a checkpoint that some rank found damaged is damaged.

One rank of many may have a bad client, a stale entry of a network file system or bad memory, and see in an intact file
an I/O error, another hash or nothing at all. Nothing is moved aside, and nothing is given up, on its word alone: the
first rank reads the files that it named, itself and anew.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, FileRecord, Manifest
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.together import CheckpointError, Together


def agree_on_damage(found: Sequence[tuple[Path, str]], together: Together, anywhere: bool = False) -> None:
    """Return if the first rank, too, finds every one of these checkpoints damaged. A collective.

    found: folders, and what is wrong with each, as DamageError's reasons. anywhere: I/O errors are no damage, although
    the first rank has them too: where nothing at all can be read, it is the way to it that is broken.

    Raises CheckpointError on all ranks otherwise, with the rank and host that saw it: on other nodes the same
    checkpoints may well be read.
    """
    hosts = together.collect("ask for hosts", socket.gethostname)
    for folder, problem in found:
        if (reason := _disagreement(folder, problem, hosts, together, anywhere)) is not None:
            raise CheckpointError(f"{reason}. Nothing was moved; start again, on other machines if this comes back")


def _disagreement(folder: Path, problem: str, hosts: list[str], together: Together, anywhere: bool) -> str | None:
    """Why a checkpoint cannot be called damaged; None if it is, the same on all ranks."""

    def look() -> str | None:
        said = _with_hosts(problem, hosts)
        if anywhere and _is_io(problem):
            return f"{folder} cannot be read: {said}. That may be the machine's or the file system's fault"
        now = _look(folder, suspects)
        if now is None:
            return f"{folder} is damaged, says {said}; but rank 0 on {hosts[0]} reads it anew and finds it whole"
        if anywhere and _is_io(now):
            return f"{folder} cannot be read: rank 0 on {hosts[0]}: {now}. That may be the machine's fault"
        return None

    named = together.first("look again at it", lambda: _suspects(folder, problem))
    if named is not None:
        suspects = named
    else:  # an I/O error names none, and one process alone would take long over all of a huge checkpoint
        of_ranks = together.collect("look again at it", lambda: _of_share(folder, together))
        suspects = [name for of_rank in of_ranks for name in of_rank]
    return together.first("look again at it", look)


def _suspects(folder: Path, problem: str) -> list[str] | None:
    """The files that a problem names, none if there is no manifest to look for them in; None if it names none."""
    try:
        return [name for name in files.read_manifest(folder).files if name in problem] or None
    except (DamagedCheckpointError, OSError):
        return []


def _of_share(folder: Path, together: Together) -> list[str]:
    """The files that this rank finds damaged, of those that fall to it."""
    try:
        records = files.read_manifest(folder).files
    except (DamagedCheckpointError, OSError):
        return []
    mine = sorted(records)[together.rank :: together.world_size]
    return [name for name in mine if _wrong_file(folder, name, records[name]) is not None]


def _look(folder: Path, suspects: Sequence[str]) -> str | None:
    """What this process finds wrong with a checkpoint; None if nothing is. Raises OSError for what is no damage."""
    try:
        manifest = files.read_manifest(folder)
        wrong = (_wrong_file(folder, name, manifest.files[name]) for name in suspects)
        return next(filter(None, wrong), None) or _wrong_content(folder, manifest)
    except (DamagedCheckpointError, ValueError) as error:
        return str(error)
    except OSError as error:
        return _damage(error)


def _wrong_file(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        # From the disk: what this host's memory holds of the file may be what is wrong.
        with files.open_plain(folder / name) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return files.check_file(folder, name, record)
    except DamagedCheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{name}: {_damage(error)}"


def _damage(error: OSError) -> str:
    if error.errno not in (errno.EIO, errno.EISDIR):
        raise error
    return str(error)


def _wrong_content(folder: Path, manifest: Manifest) -> str | None:
    """Files may be as they were written, and still be no checkpoint."""
    if missing := {METADATA, files.TRAINER} - manifest.files.keys():
        return f"{files.MANIFEST} does not name {missing.pop()}"
    json.loads(files.read_checked(folder, files.TRAINER, manifest.files[files.TRAINER]))
    metadata = read_metadata(files.read_checked(folder, METADATA, manifest.files[METADATA]))
    for place in metadata.storage_data.values():
        if place.relative_path not in manifest.files:
            return f"{METADATA} names the file {place.relative_path!r}, which the checkpoint does not have"
    return None


def _is_io(problem: str) -> bool:
    return f"[Errno {errno.EIO}]" in problem


def _with_hosts(problem: str, hosts: Sequence[str]) -> str:
    """`rank 3: ...` as `rank 3 on node7: ...`; what has no rank, the first one found."""
    if not re.match(r"rank \d+: ", problem):
        problem = f"rank 0: {problem}"

    def with_host(match: re.Match[str]) -> str:
        rank = int(match[1])
        return f"rank {rank} on {hosts[rank]}: " if rank < len(hosts) else match[0]

    return re.sub(r"(?:(?<=^)|(?<= \| ))rank (\d+): ", with_host, problem)
