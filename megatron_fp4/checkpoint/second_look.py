"""Whether a checkpoint that some rank found damaged is damaged.

One rank of many may have a bad client, a stale entry of a network file system or bad memory, and see in an intact file
an I/O error, another hash or nothing at all. Nothing is moved aside, and nothing is given up, on its word alone: the
first rank reads the files that it named, itself and anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.saves import TRAINER
from megatron_fp4.checkpoint.together import CheckpointError, Together


def agree_on_damage(found: Sequence[tuple[Path, str]], together: Together, anywhere: bool = False) -> None:
    """Return if the first rank, too, finds every one of these checkpoints damaged. A collective.

    found: folders, and what is wrong with each, as DamageError's reasons. anywhere: I/O errors are no damage, although
    the first rank has them too: where nothing at all can be read, it is the way to it that is broken.

    Raises CheckpointError on all ranks otherwise, with the rank and host that saw it: on other nodes the same
    checkpoints may well be read.
    """
    hosts = together.collect("ask for hosts", socket.gethostname)

    def look() -> str | None:
        for folder, problem in found:
            said = _with_hosts(problem, hosts)
            if anywhere and _is_io(problem):
                return f"{folder} cannot be read: {said}. That may be the machine's or the file system's fault"
            now = _look(folder, problem)
            if now is None:
                return f"{folder} is damaged, says {said}; but rank 0 on {hosts[0]} reads it anew and finds it whole"
            if anywhere and _is_io(now):
                return f"{folder} cannot be read: rank 0 on {hosts[0]}: {now}. That may be the machine's fault"
        return None

    if (reason := together.first("look again at damaged checkpoints", look)) is not None:
        raise CheckpointError(f"{reason}. Nothing was moved; start again, on other machines if this comes back")


def _look(folder: Path, problem: str) -> str | None:
    """What this process finds wrong with the files of a checkpoint that a problem names; None if nothing is."""
    try:
        manifest = files.read_manifest(folder)
        return _wrong_file(folder, manifest, problem) or _wrong_content(folder, manifest)
    except (DamagedCheckpointError, ValueError) as error:
        return str(error)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EISDIR):
            raise
        return str(error)


def _wrong_file(folder: Path, manifest: Manifest, problem: str) -> str | None:
    named = [name for name in manifest.files if name in problem]
    for name in named or manifest.files:  # of a huge checkpoint all would take one process long
        _forget(folder / name)
        if wrong := files.check_file(folder, name, manifest.files[name]):
            return wrong
    return None


def _wrong_content(folder: Path, manifest: Manifest) -> str | None:
    """Files may be as they were written, and still be no checkpoint."""
    if missing := {METADATA, TRAINER} - manifest.files.keys():
        return f"{files.MANIFEST} does not name {missing.pop()}"
    json.loads(files.read_checked(folder, TRAINER, manifest.files[TRAINER]))
    metadata = read_metadata(files.read_checked(folder, METADATA, manifest.files[METADATA]))
    for place in metadata.storage_data.values():
        if place.relative_path not in manifest.files:
            return f"{METADATA} names the file {place.relative_path!r}, which the checkpoint does not have"
    return None


def _forget(path: Path) -> None:
    """Have the file read from the disk: what this host's memory holds of it may be what is wrong."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
