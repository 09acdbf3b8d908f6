"""Which checkpoint a start resumes from, or takes its weights of.

Rank 0 alone looks at the folder and decides; the others are told, so that a slow file system which shows two ranks
different folders cannot split them. All then load what was chosen, and a checkpoint is known to be whole only once it
is loaded: if any rank finds damage all learn it, and rank 0 names the next.

    checkpoint.resume   there are checkpoints of this run          there are none
    auto                the newest intact one                      step 0, unless something says that there was one
    required            the newest intact one                      refused
    PATH, elsewhere     the newest intact one, if this run began   PATH, unless something says that there was one
                        from PATH; otherwise refused
    PATH, among them    PATH; refused by the caller if there are   -
                        later ones
    never               refused by the caller                      step 0

What was found damaged on the way is moved aside once an intact one is loaded, and kept: `step_00000400.damaged`. One
rank of many may have a bad client or bad memory and find an intact file damaged: rank 0 reads the file that it named
anew, and if that is whole the start ends, nothing is moved.

With `checkpoint.initialize_from=PATH` a run begins at step 0 from the weights alone of a checkpoint, of the newest one
of a run, or of an imported one: moments, generators, precision switch, schedule and data are those of a new run. What a
run began from is in the trainer state of all its checkpoints: `origin` of a branch, or `initialized_from`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import identity_differences, run_identity
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, Origin, OtherFormatError
from megatron_fp4.checkpoint.shards import METADATA, check_tensors, load_tensors, read_metadata
from megatron_fp4.checkpoint.sync import CheckpointError, DamageError, OneProcess, RankSync, RefusedError
from megatron_fp4.config.schema import Config
from megatron_fp4.runtime.run_state import STATE_FILE, checkpoint_in_state

logger = logging.getLogger(__name__)

METRICS, SUMMARY = "metrics.jsonl", "summary.json"  # as logging/ writes them
KEYWORDS = ("auto", "required", "never")
RESUME, INITIALIZE = "checkpoint.resume", "checkpoint.initialize_from"
# What weights that are there do not depend on: how others would be drawn, and in what pieces the scan is computed.
_FREE = {"model.init_std", "model.mamba_chunk_size"}


@dataclass(frozen=True)
class Damage:
    """A checkpoint that is not whole. moved_to: its name since it was moved aside. unreadable: see DamageError."""

    name: str
    problem: str
    moved_to: str = ""
    unreadable: bool = False


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded, apart from what went into model, optimizer and generators (these only where as many
    ranks saved it). trainer: as it was given to `Checkpointer.save`. damaged: newer ones that were not whole.

    origin: where the run began, if that was another run's checkpoint.
    """

    folder: Path
    manifest: Manifest
    trainer: dict[str, Any]
    damaged: tuple[Damage, ...] = ()
    origin: Origin | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done, so also the next step's number."""
        return self.manifest.step


class Finder:
    """Finds the checkpoint to resume from among those under `root`; its methods are collectives.

    load: loads a checkpoint and returns its trainer state. A collective, which raises DamageError on all ranks if any
    found the checkpoint not to be what its manifest says; what else it raises, on all ranks too, ends the search.
    only_look: change nothing on disk, and log nothing.
    """

    def __init__(
        self, root: Path, sync: RankSync, load: Callable[[Path, Manifest], dict[str, Any]], only_look: bool = False
    ) -> None:
        self.root, self.sync, self.load, self.only_look = root, sync, load, only_look

    def choose(self, resume: str) -> Resumed | None:
        """Load what `resume` (see the table above) means; None if the run begins at step 0.

        Raises RefusedError on all ranks if nothing is intact or left of an earlier run, if there are checkpoints
        of another origin, or if a given one is not there or damaged; CheckpointError if it cannot be known, because
        ranks disagree about damage or nothing can be read.
        """
        if resume == "never":
            return None
        given = None if resume in KEYWORDS else resume
        if given is not None and is_own(self.root, given):
            return self._settle(self._given(given))
        if (newest := self._newest_intact()) is not None:
            if given is not None:
                check_begun_from(newest.origin, RESUME, given, self.root, self.sync)
            return self._settle(newest)
        steps, found = self.sync.on_rank0("look for an earlier run", lambda: earlier_run(self.root))
        if found:
            anew = "" if given else "start from step 0 with checkpoint.resume=never, which moves the records aside, or "
            raise RefusedError(
                f"run.dir={self.root.parent} is of an earlier run ({'; '.join(found)}), but there is no checkpoint to "
                f"resume from in {self.root}: restore it, or {anew}choose another run.dir"
            )
        if resume == "required":
            raise RefusedError(
                f"checkpoint.resume=required, but there is no checkpoint in {self.root}: mount its disk or restore it, "
                "or begin at step 0 with checkpoint.resume=auto"
            )
        if given is not None:
            return self._given(given)
        if steps:
            self._log(
                logging.WARNING,
                f"{self.root.parent}: an earlier start made {steps} steps and no checkpoint; beginning at step 0 "
                "again, its records are moved aside",
            )
        return None

    def _newest_intact(self) -> Resumed | None:
        """Load the newest checkpoint that is whole; None if there is none at all. Raises as `choose`."""

        candidates: list[tuple[Path, Manifest]] = []  # rank 0's: a thousand ranks' manifests are large

        def scan() -> list[Damage]:
            readable, broken = files.scan(self.root)
            candidates.extend(readable)
            found = []
            for folder, error in broken:
                if isinstance(error, OtherFormatError):
                    raise RefusedError(f"{folder}: {error}; resume with the version that wrote it") from error
                if isinstance(error, OSError):
                    raise error
                found.append(Damage(folder.name, str(error), unreadable=error.unreadable))
            pointer = files.read_pointer(self.root)
            if candidates and pointer is not None and not (self.root / pointer).is_dir():
                logger.warning("%s names %s, which is not there", self.root / files.POINTER, pointer)
            return found

        damaged = self.sync.on_rank0("scan", scan)
        for broken in damaged:
            self._report(broken)
        while (found := self.sync.on_rank0("scan", lambda: candidates.pop(0) if candidates else None)) is not None:
            folder, manifest = found
            try:
                trainer = self.load(folder, manifest)
            except DamageError as error:
                confirm(folder, error, self.sync)
                damaged.append(Damage(folder.name, error.reasons, unreadable=error.unreadable))
                self._report(damaged[-1])
            else:
                return Resumed(folder, manifest, trainer, tuple(damaged), Origin.of(trainer))
        if not damaged:
            return None
        listing = " | ".join(f"{each.name}: {each.problem}" for each in damaged)
        if any(each.unreadable for each in damaged):  # which may be the way to the disk: a crash, and no refusal
            raise CheckpointError(f"no checkpoint under {self.root} can be read ({listing}); nothing was moved")
        raise RefusedError(
            f"there are checkpoints under {self.root}, but none is whole ({listing}). Not starting again at step 0 "
            "unasked: restore one, or begin anew in another run.dir"
        )

    def _given(self, given: str) -> Resumed:
        """Load a checkpoint of this run or another. Raises as `choose`."""
        folder, manifest, origin = self.sync.on_rank0("read a manifest", lambda: named(RESUME, given))
        try:
            trainer = self.load(folder, manifest)
        except DamageError as error:
            refuse_damaged(f"{RESUME}={folder}", folder, error, self.sync)
        return Resumed(folder, manifest, trainer, origin=Origin.of(trainer) if is_own(self.root, folder) else origin)

    def _settle(self, chosen: Resumed) -> Resumed:
        """Rename damaged checkpoints, and let the pointer name what was loaded: a run that was killed before it could
        may be finished, and save no more."""
        if self.only_look:
            return chosen

        def move() -> tuple[Damage, ...]:
            moved = tuple(
                replace(each, moved_to=files.move_aside(self.root / each.name).name) for each in chosen.damaged
            )
            if files.read_pointer(self.root) != chosen.folder.name:
                try:
                    files.write_pointer(chosen.folder)
                except OSError as error:
                    logger.warning("`%s` does not name %s: %s", files.POINTER, chosen.folder.name, error)
            return moved

        moved = self.sync.on_rank0("move damaged checkpoints aside", move)
        for each in moved:
            text = f"{each.name} was moved to {self.root / each.moved_to}; resuming from {chosen.folder.name}"
            self._log(logging.ERROR, text)
        return replace(chosen, damaged=moved)

    def _report(self, damage: Damage) -> None:
        self._log(logging.ERROR, f"CHECKPOINT DAMAGED: {damage.name}: {damage.problem}")

    def _log(self, level: int, message: str) -> None:
        if self.sync.rank == 0 and not self.only_look:
            logger.log(level, message)


def confirm(folder: Path, error: DamageError, sync: RankSync) -> None:
    """Return if rank 0, too, finds damaged what `error` names. Raises CheckpointError on all ranks otherwise: on other
    machines the same checkpoint may well be read."""

    def is_damaged() -> bool:
        records = files.read_manifest(folder).files
        return any(files.check_file(folder, name, records[name], from_disk=True) for name in error.files)

    if error.files and files.MANIFEST not in error.files and not sync.on_rank0("read it again", is_damaged):
        raise CheckpointError(
            f"{folder} is damaged, says {error.reasons}; but rank 0 reads it anew and finds it whole. Nothing was "
            "moved; start again, on other machines if this comes back"
        )


def refuse_damaged(key: str, folder: Path, error: DamageError, sync: RankSync) -> NoReturn:
    """Refuse the one checkpoint that the user gave as `key`, after `confirm`; on all ranks."""
    confirm(folder, error, sync)
    if error.unreadable:
        raise CheckpointError(f"{key} cannot be read: {error.reasons}") from error
    raise RefusedError(f"{key} is damaged: {error.reasons}; give another one") from error


def check_resumable(folder: Path, manifest: Manifest) -> None:
    """Raise RefusedError for a checkpoint of which only the weights are of use, from which no run can resume."""
    if manifest.weights_only:
        problem = "is an imported checkpoint, which holds weights alone: nothing to resume"
    elif manifest.format == 1:
        problem = "is of format 1, whose order of samples is no more: nothing to resume"
    else:
        return
    raise RefusedError(f"{folder} {problem}; begin a run from it with {INITIALIZE}={folder}, in a run.dir of its own")


def check_identity(folder: Path, manifest: Manifest, identity: Mapping[str, Any], allow_mismatch: bool) -> list[str]:
    """Raise RefusedError unless a run of this `identity` may resume from the checkpoint; returns in what that differs,
    where `allow_mismatch` lets it."""
    check_resumable(folder, manifest)
    differences = identity_differences(manifest.identity, identity)
    if differences and not allow_mismatch:
        raise RefusedError(
            f"{folder} belongs to another run: {'; '.join(differences)}. Set these back, choose another run.dir, or "
            "resume anyway with checkpoint.allow_mismatch=true"
        )
    return differences


def named(key: str, given: str) -> tuple[Path, Manifest, Origin]:
    """The checkpoint that `given` means, by manifests alone. key: RESUME or INITIALIZE, which takes a run, too.

    Raises RefusedError, and OSError.
    """
    whole = Path(os.path.realpath(given))
    try:
        folder = files.checkpoint_in(whole)
        manifest = files.read_manifest(folder)
    except DamagedCheckpointError as error:
        how = "of another version" if isinstance(error, OtherFormatError) else "damaged"
        raise RefusedError(f"{key}={given} is {how}: {error}; give another checkpoint") from error
    except ValueError as error:
        raise RefusedError(f"{key}={error}") from error
    if key == RESUME:
        if folder != whole:
            raise RefusedError(f"{key}={given} is no checkpoint, but has some inside: give {folder}")
        check_resumable(folder, manifest)
    return folder, manifest, Origin.at(folder, manifest)


def is_own(root: Path, given: str | Path) -> bool:
    """Whether `given` is one of the checkpoints under `root`, there or not."""
    return Path(os.path.realpath(given)).parent == Path(os.path.realpath(root))


def refuse_to_overwrite(resume: str, start: int, root: Path, aside: Collection[str] = ()) -> None:
    """Raise RefusedError if a start from step `start` would come to replace checkpoints under `root`, whole or not.
    aside: names of those that it moves away before."""
    last = max((files.step_of(each) for each in files.list_checkpoints(root) if each.name not in aside), default=0)
    if last > start:
        raise RefusedError(
            f"{RESUME}={resume} starts from step {start}, but {root} already has checkpoints up to step {last}, which "
            "the run would overwrite; choose another run.dir"
        )


def earlier_run(root: Path) -> tuple[int, list[str]]:
    """Traces of a run whose checkpoints under `root` are gone: the last step in its records, and what says that there
    were checkpoints.

    A run that was killed before its first checkpoint leaves none, and may begin again where it began. Raises OSError.
    """
    run_dir, found, steps, saved = root.parent, [], 0, 0
    anew = False  # told to begin at step 0, whatever there was before
    for line in (run_dir / METRICS).read_bytes().splitlines() if (run_dir / METRICS).is_file() else []:
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # a damaged line must not hide the others
            record = json.loads(line)
            steps = max(steps, int(record["step"])) if record.get("kind") == "step" else steps
            saved += record.get("event") == "checkpoint"
            anew |= record.get("resume") == "never"
    if saved:
        found.append(f"{METRICS} has {steps} steps, and {saved} checkpoints saved")
    if last := checkpoint_in_state(run_dir):
        found.append(f"{STATE_FILE} says that a run of {last} steps was here")
    if not anew:  # otherwise the rest is of the run before, which was given up knowingly
        if (run_dir / SUMMARY).exists():
            found.append(f"{SUMMARY} says that it was finished")
        if (pointer := files.read_pointer(root)) is not None:
            found.append(f"checkpoints/{files.POINTER} names {pointer}")
        if damaged := sorted(folder.name for folder in root.glob("step_*.damaged*")):
            found.append(f"damaged checkpoints were moved aside: {', '.join(damaged)}")
    return steps, found


# What one process can say before any rank waits for others, from manifests, sizes and the trainer's state alone


def preview(config: Config, identity: Mapping[str, Any]) -> Resumed | None:
    """What a start of `config` would resume from; None if it begins at step 0. Changes nothing on disk.

    identity: the run's. Raises RefusedError for what a start would refuse, as far as it can be seen so; ValueError,
    OSError.
    """
    resume, root = config.checkpoint.resume, Path(config.run.dir) / "checkpoints"
    sync = OneProcess(root)

    def load(folder: Path, manifest: Manifest) -> dict[str, Any]:
        check_identity(folder, manifest, identity, config.checkpoint.allow_mismatch)

        def look() -> dict[str, Any]:
            for name, record in manifest.files.items():
                with files.opened(folder, name, record):
                    pass
            files.read_checked(folder, METADATA, manifest.files)  # whole; `check_weights` reads what is in it
            return json.loads(files.read_checked(folder, files.TRAINER, manifest.files))  # type: ignore[no-any-return]

        return sync.on_rank0("read it", look)

    found = Finder(root, sync, load, only_look=True).choose(resume)
    start, broken = (0, ()) if found is None else (found.step, [damage.name for damage in found.damaged])
    refuse_to_overwrite(resume, start, root, broken)
    return found


def check_weights(config: Config, found: Resumed | None, model: nn.Module) -> None:
    """Raise RefusedError if the weights that a start of `config` would load are not of the names, types and shapes of
    `model`'s. found: by `preview`; without one it is the checkpoint that `checkpoint.initialize_from` names, if any.
    """
    given = config.checkpoint.initialize_from
    if found is not None:
        folder, manifest = found.folder, found.manifest
    elif given is not None:
        folder, manifest, _ = named(INITIALIZE, given)
    else:
        return
    try:
        metadata = read_metadata(files.read_checked(folder, METADATA, manifest.files))
    except DamagedCheckpointError as error:
        raise RefusedError(f"{folder} is damaged: {error}; give another checkpoint") from error
    check_tensors(folder, metadata, {"model": model.state_dict()})


def check_resume(config: Config) -> None:
    """Raise RefusedError if no start could begin from what `checkpoint.resume` or `checkpoint.initialize_from` names:
    no checkpoint, or weights of another model.

    A run that has checkpoints of its own resumes from these, also when what it began from is gone; the start sees
    whether they are its own.
    """
    settings, root = config.checkpoint, Path(config.run.dir) / "checkpoints"
    resume, given = settings.resume, settings.initialize_from
    if given is not None and resume not in KEYWORDS:
        raise RefusedError(
            f"{INITIALIZE}={given} takes weights alone and checkpoint.resume={resume} all of a checkpoint; give one of "
            "them"
        )
    if given is None and resume in KEYWORDS:
        return
    if files.list_checkpoints(root) and not is_own(root, resume):
        return
    try:
        folder, manifest, _ = named(RESUME, resume) if given is None else named(INITIALIZE, given)
    except OSError as error:
        raise RefusedError(str(error)) from error
    if given is not None and not settings.allow_mismatch:
        _check_model(folder, manifest, run_identity(config, {}), ("model.",))


# Beginning from weights alone


def _check_model(folder: Path, manifest: Manifest, identity: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise RefusedError, with every key that differs, if the checkpoint's weights are not for the run of this
    `identity`. keys: compare those that begin so."""
    saved, own = (
        {name: value for name, value in facts.items() if name not in _FREE and name.startswith(keys)}
        for facts in (manifest.identity, identity)
    )
    if differences := identity_differences(saved, own):
        raise RefusedError(
            f"{INITIALIZE}={folder} is of another model or tokenizer: {'; '.join(differences)}. Set these keys back, "
            "give another checkpoint, or begin all the same with checkpoint.allow_mismatch=true"
        )


def initialize_weights(
    given: str, model: nn.Module, identity: Mapping[str, Any], sync: RankSync, *, allow_mismatch: bool
) -> Origin:
    """Load the weights that `given` names into `model`; a collective. Returns where they are from.

    Any mesh reads them, every rank the files that hold something of its shards, each compared with its SHA-256.
    identity: the run's. Raises RefusedError on all ranks for what the user has to decide: no checkpoint, another model
    or tokenizer, damage; CheckpointError if reading fails otherwise.
    """

    folder, manifest, origin = sync.on_rank0("find it", lambda: named(INITIALIZE, given))
    if not allow_mismatch:  # on all ranks: the tokenizer's file may be another on another node
        sync.on_all("compare", lambda: _check_model(folder, manifest, identity, ("model.", "data.tokenizer")))
    try:
        load_tensors(folder, manifest, {"model": model.state_dict()}, sync)
    except DamageError as error:
        refuse_damaged(f"{INITIALIZE}={folder}", folder, error, sync)
    return origin


def check_begun_from(begun: Origin | None, key: str, given: str, root: Path, sync: RankSync) -> None:
    """Refuse to resume from checkpoints under `root` of a run that did not begin from what `key`, RESUME or INITIALIZE,
    names.

    begun: what it began from. That may be gone by now, moved, made again in the same bits, or have newer checkpoints
    beside it.
    """
    path = Path(os.path.realpath(given))

    def known() -> bool:
        if begun is None:
            return False
        was = Path(begun.path)
        places = (path, path / was.name, path / "checkpoints" / was.name)
        return path in (was, was.parent, was.parent.parent) or any(map(begun.is_in, places))

    if sync.on_rank0("compare origins", known):
        return
    if key == RESUME:
        began, instead = "at step 0" if begun is None else f"from {begun.path}", "auto"
    elif begun is None:
        began, instead = "with weights of its own", "null"
    else:
        began, instead = f"from the weights of {begun.path}", begun.path
    raise RefusedError(
        f"{key}={given}, but {root} has checkpoints of a run that began {began}; choose another run.dir to begin from "
        f"{path.name} there, or resume from them with {key}={instead}"
    )
