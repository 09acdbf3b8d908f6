"""Which checkpoint a start goes on from.

The first rank alone looks at the folder and decides; the others are told, so that a slow file system which shows two
ranks different folders cannot split them. All then load what was chosen, and a checkpoint is known to be whole only
once it is loaded: if any rank finds damage all learn it, and the first rank names the next.

    checkpoint.resume   there are checkpoints of this run          there are none
    auto                the newest intact one                      step 0, unless something says that there was one
    PATH, elsewhere     the newest intact one, if this run began   PATH, unless something says that there was one
                        from PATH; otherwise refused
    PATH, among them    PATH, unless later ones are intact         -
    never               refused by the caller                      step 0

What was found damaged on the way is moved aside once an intact one is loaded, and kept: `step_00000400.damaged`. If the
first rank does not find the damage that another one found, the start ends instead (second_look.py).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.evidence import Evidence, earlier_run
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest
from megatron_fp4.checkpoint.origin import Origin, is_origin, origin_at, origin_in
from megatron_fp4.checkpoint.second_look import agree_on_damage
from megatron_fp4.checkpoint.together import CheckpointError, DamageError, Together

logger = logging.getLogger(__name__)


Load = Callable[[Path, Manifest], dict[str, Any]]
"""Loads a checkpoint and returns its trainer state. A collective, which raises DamageError on all ranks if any found
the checkpoint not to be what its manifest says; what else it raises, on all ranks too, ends the search."""

Check = Callable[[Path, Manifest], None]
"""Only looks whether a checkpoint is whole. A collective, which raises as Load does."""


class ResumeRefusedError(CheckpointError, ValueError):
    """What to go on from is for the user to decide; the message has the remedies. Raised on all ranks."""


@dataclass(frozen=True)
class Damage:
    """A checkpoint that is not whole. moved_to: its name since it was moved aside."""

    name: str
    problem: str
    moved_to: str = ""


@dataclass(frozen=True)
class Chosen:
    """What a start goes on from: a loaded checkpoint, its trainer state, and what was damaged and is moved aside.

    origin: where the run began, if that was another run's checkpoint. local: it is one on the nodes' own disks
    (local_start.py), and `folder` this rank's part of it.
    """

    folder: Path
    manifest: Manifest
    trainer: dict[str, Any]
    damaged: tuple[Damage, ...] = ()
    origin: Origin | None = None
    local: bool = False


def choose(root: Path, resume: str, together: Together, load: Load, check: Check) -> Chosen | None:
    """Load what `resume` (see the table above) means for the run whose checkpoints lie under `root`.

    Returns None if the run begins at step 0. Raises ResumeRefusedError on all ranks if nothing is intact or left of an
    earlier run, if there are checkpoints of another origin, or if a given one is not there or damaged; CheckpointError
    if it cannot be known, because ranks disagree about damage or nothing can be read.
    """
    if resume == "never":
        return None
    given = None if resume == "auto" else Path(os.path.realpath(resume))
    if given is not None and is_own(root, given):
        return _go_back(root, given, together, load, check)
    chosen = _newest_intact(root, together, load)
    if chosen is not None:
        if given is not None:
            check_origin(chosen, given, root, together)
        return replace(chosen, damaged=_settle(root, chosen.damaged, together, latest=chosen.folder))
    evidence = together.first("look for an earlier run", lambda: earlier_run(root, branch=given is not None))
    if evidence.found:
        raise ResumeRefusedError(nothing_left(root, evidence, given))
    if given is None:
        if evidence.steps:
            _log(logging.WARNING, f"{root.parent}: an earlier start made {evidence.steps} steps and no checkpoint; "
                 "beginning at step 0 again, its records are moved aside")  # fmt: skip
        return None
    return _given(given, together, load)


def _point_to(folder: Path) -> None:
    """Let the pointer name what was loaded: a run that was killed before it could may be finished, and save no more."""
    if files.read_pointer(folder.parent) != folder.name:
        try:
            files.write_pointer(folder)
        except OSError as error:
            logger.warning("`%s` does not name %s: %s", files.POINTER, folder.name, error)


def is_own(root: Path, given: Path) -> bool:
    """Whether `given` is one of this run's checkpoints, there or not."""
    return Path(os.path.realpath(given)).parent == Path(os.path.realpath(root))


def _newest_intact(root: Path, together: Together, load: Load) -> Chosen | None:
    """Load the newest checkpoint that is whole; None if there is none at all. Raises as `choose`."""
    candidates: list[tuple[Path, Manifest]] = []  # the first rank's

    def scan() -> tuple[list[Damage], str | None]:
        broken = []
        for folder in files.list_checkpoints(root):
            try:
                found = _manifest_of(folder)
            except files.OtherFormatError as error:
                return [], f"{folder}: {error}; resume with the version that wrote it"
            if isinstance(found, Damage):
                broken.append(found)
            else:
                candidates.append((folder, found))
        candidates.sort(key=lambda candidate: candidate[1].save_index)
        pointer = files.read_pointer(root)
        if candidates and pointer is not None and not (root / pointer).is_dir():
            logger.warning("%s names %s, which is not there", root / files.POINTER, pointer)
        return broken, None

    damaged, refusal = together.first("scan", scan)
    if refusal is not None:
        raise ResumeRefusedError(refusal)
    for broken in damaged:
        _report(broken)
    while (candidate := together.first("scan", lambda: candidates.pop() if candidates else None)) is not None:
        folder, manifest = candidate
        try:
            trainer = load(folder, manifest)
        except DamageError as error:
            damaged.append(Damage(folder.name, error.reasons))
            _report(damaged[-1])
        else:
            return Chosen(folder, manifest, trainer, tuple(damaged), origin_in(trainer))
    if not damaged:
        return None
    agree_on_damage([(root / each.name, each.problem) for each in damaged], together, anywhere=True)
    listing = " | ".join(f"{each.name}: {each.problem}" for each in damaged)
    raise ResumeRefusedError(
        f"there are checkpoints under {root}, but none is whole ({listing}). Not starting again at step 0 unasked: "
        "restore one, or begin anew in another run.dir"
    )


def _go_back(root: Path, folder: Path, together: Together, load: Load, check: Check) -> Chosen:
    """Load this run's own checkpoint in `folder`, and move later ones aside if all of them are damaged.

    Intact ones stay, and the caller will not overwrite them.
    """
    chosen = _given(folder, together, load)
    later, damaged = together.first("scan", lambda: _later(root, chosen.manifest.step))
    chosen = replace(chosen, origin=origin_in(chosen.trainer))
    for other, manifest in later:
        if manifest is None:  # of another version
            return chosen
        try:
            check(other, manifest)
        except DamageError as error:
            damaged.append(Damage(other.name, error.reasons))
        else:
            return chosen
    for each in damaged:
        _report(each)
    return replace(chosen, damaged=_settle(root, damaged, together, latest=folder))


def _later(root: Path, step: int) -> tuple[list[tuple[Path, Manifest | None]], list[Damage]]:
    """The checkpoints of later steps with their manifests (None: another version's), and those without one."""
    readable: list[tuple[Path, Manifest | None]] = []
    broken = []
    for folder in files.list_checkpoints(root):
        if files.step_of(folder) > step:
            try:
                found = _manifest_of(folder)
            except files.OtherFormatError:
                readable.append((folder, None))
                continue
            if isinstance(found, Damage):
                broken.append(found)
            else:
                readable.append((folder, found))
    return readable, broken


def _manifest_of(folder: Path) -> Manifest | Damage:
    """The manifest, or in what way there is none. Raises OtherFormatError, and OSError for what is no damage."""
    try:
        return files.read_manifest(folder)
    except files.OtherFormatError:
        raise
    except DamagedCheckpointError as error:
        return Damage(folder.name, str(error))
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EISDIR):
            raise
        return Damage(folder.name, str(error))


def _given(folder: Path, together: Together, load: Load) -> Chosen:
    """Load the checkpoint in `folder`, of this run or another. Raises as `choose`."""

    def look() -> tuple[Manifest | Damage | None, str, Origin | None]:
        if not folder.is_dir():
            return None, "is not a folder; give auto, never or a path such as RUN/checkpoints/step_00000200", None
        try:
            found = _manifest_of(folder)
        except files.OtherFormatError as error:
            return None, f"is of another version: {error}", None
        if isinstance(found, Damage):
            return found, "", None
        return found, "", origin_at(folder, found)

    manifest, refusal, origin = together.first("read a manifest", look)
    if manifest is None:
        raise ResumeRefusedError(f"checkpoint.resume={folder} {refusal}")
    try:
        if isinstance(manifest, Damage):
            raise DamageError(manifest.problem, manifest.problem)
        trainer = load(folder, manifest)
    except DamageError as error:
        agree_on_damage([(folder, error.reasons)], together, anywhere=True)
        raise ResumeRefusedError(f"checkpoint.resume={folder} is damaged: {error.reasons}; give another one") from error
    return Chosen(folder, manifest, trainer, origin=origin)


def check_origin(chosen: Chosen, given: Path, root: Path, together: Together) -> None:
    """Refuse to go on with checkpoints of a run that did not begin from `given`."""
    origin = chosen.origin
    if origin is not None:
        same = together.first("compare origins", lambda: is_origin(origin, given))
        if str(given) == origin.path:  # which may be gone by now
            if same is False:
                _log(logging.WARNING, f"{given} is not the checkpoint any more that this run began from")
            return
        if same:  # moved, or made again in the same bits
            return
    began = "at step 0" if origin is None else f"from {origin.path}"
    raise ResumeRefusedError(
        f"checkpoint.resume={given}, but {root} has checkpoints of a run that began {began} "
        f"(the newest is {chosen.folder.name}); choose another run.dir to begin from {given.name} there, or go on with "
        "them by checkpoint.resume=auto"
    )


def _settle(root: Path, damaged: Sequence[Damage], together: Together, latest: Path) -> tuple[Damage, ...]:
    """Rename damaged checkpoints, and let the pointer name `latest`, which was loaded.

    Raises CheckpointError on all ranks, and moves none, if the first rank finds one of them whole.
    """
    if damaged:
        agree_on_damage([(root / each.name, each.problem) for each in damaged], together)

    def move() -> tuple[Damage, ...]:
        moved = tuple(replace(each, moved_to=files.move_aside(root / each.name).name) for each in damaged)
        _point_to(latest)
        return moved

    moved = together.first("move damaged checkpoints aside", move)
    for each in moved:
        _log(logging.ERROR, f"{each.name} was moved to {root / each.moved_to}; going on from {latest.name}")
    return moved


def _report(damage: Damage) -> None:
    _log(logging.ERROR, f"CHECKPOINT DAMAGED: {damage.name}: {damage.problem}")


def _log(level: int, message: str) -> None:
    if dist.get_rank() == 0:
        logger.log(level, message)


def nothing_left(root: Path, evidence: Evidence, given: Path | None) -> str:
    """The refusal of a start that finds traces of an earlier run and no checkpoint. given: `checkpoint.resume`."""
    remedies = [f"restore {root}"]
    if given is None:
        remedies.append("start from step 0 with checkpoint.resume=never, which moves the records aside")
    remedies.append("choose another run.dir")
    return (
        f"run.dir={root.parent} is of an earlier run ({'; '.join(evidence.found)}), but there is no checkpoint to go "
        f"on from in {root}: {', or '.join(remedies)}"
    )
