"""The checkpoint that a run began from, and whether a folder holds it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run that a run began from. path: absolute. manifest_sha256: of its manifest.json.

    contents_sha256: `contents_digest`; empty in what was written before there was one.
    """

    path: str
    step: int
    manifest_sha256: str
    contents_sha256: str = ""

    def equals(self, other: Origin) -> bool:
        """Whether both are one checkpoint, or two that are equal in every bit."""
        if self.manifest_sha256 == other.manifest_sha256:
            return True
        return self.contents_sha256 == other.contents_sha256 != ""


def origin_at(folder: Path, manifest: Manifest) -> Origin:
    """The checkpoint in `folder`, an absolute path, as the origin of a run. manifest: of it. Raises OSError."""
    digest = hashlib.sha256((folder / files.MANIFEST).read_bytes()).hexdigest()
    return Origin(str(folder), manifest.step, digest, contents_digest(manifest))


def contents_digest(manifest: Manifest) -> str:
    """SHA-256 of the names and digests of a checkpoint's files but the trainer state, as hexadecimal digits.

    It is equal where weights, moments and generators are that as many ranks saved, while a manifest has another one in
    each run.dir: the trainer state holds the run's configuration and times.
    """
    digests = sorted((name, record.sha256) for name, record in manifest.files.items() if name != files.TRAINER)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def is_origin(origin: Origin, folder: Path) -> bool | None:
    """Whether the checkpoint in `folder` equals `origin`, which a damaged one does not; None if there is none. Raises
    OSError."""
    if not (folder / files.MANIFEST).is_file():
        return None
    try:
        return origin.equals(origin_at(folder, files.read_manifest(folder)))
    except DamagedCheckpointError:
        return False


def origin_in(trainer: Mapping[str, Any], key: str = "origin") -> Origin | None:
    """The origin that a checkpoint's run had when it was saved. key: `origin`, or `initialized_from`."""
    return Origin(**trainer[key]) if trainer.get(key) else None


def origin_state(origin: Origin | None) -> dict[str, Any] | None:
    """What a checkpoint's trainer state holds under `origin`: JSON types."""
    return None if origin is None else asdict(origin)
