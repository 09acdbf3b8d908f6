"""Find the checkpoint that a start resumes from, or takes its weights from.

Only rank 0 reads the folder and decides; the others get its decision, because a slow file system may show different
folders to two ranks. Then all ranks load the checkpoint. Damage is found only by loading: if any rank finds some, all
learn it, and rank 0 names the next checkpoint.

    checkpoint.resume   this run has checkpoints                   this run has none
    auto                the newest intact one                      step 0, unless there are traces of lost ones
    required            the newest intact one                      refused
    PATH, elsewhere     the newest intact one, if this run began   PATH, unless there are traces of lost ones
                        from PATH; otherwise refused
    PATH, among them    PATH; the caller refuses if there are      -
                        later ones
    never               the caller refuses                         step 0

When an intact checkpoint is loaded, newer damaged ones are moved aside and kept: `step_00000400.damaged`. So is one of
a later step that was saved before it: `step_00000400.returned`. It was away while the run went back and saved again.

A single rank with a faulty disk client or faulty memory may report an intact file as damaged. So rank 0 reads this file
again; if it is intact there, the start ends with an error and nothing is moved.

With `checkpoint.initialize_from=PATH` a run begins at step 0 with only the weights of a checkpoint: the given one, the
newest one of a given run, or an imported one. Moments, generators, precision switch, schedule and data are those of a
new run. The trainer state of all checkpoints has what the run began from: `origin`, or `initialized_from`.
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

import torch
from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import identity_differences, run_identity
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, Origin, OtherFormatError
from megatron_fp4.checkpoint.shards import METADATA, check_tensors, load_tensors, read_metadata, state_of
from megatron_fp4.checkpoint.sync import CheckpointError, DamageError, OneProcess, RankSync, RefusedError
from megatron_fp4.config.schema import Config
from megatron_fp4.runtime.run_state import STATE_FILE, number_in_state

logger = logging.getLogger(__name__)

METRICS, SUMMARY = "metrics.jsonl", "summary.json"  # as logging/ writes them
KEYWORDS = ("auto", "required", "never")
RESUME, INITIALIZE = "checkpoint.resume", "checkpoint.initialize_from"
# Keys of the model that existing weights do not depend on: how weights are drawn, and the chunks of the scan.
_FREE = {"model.init_std", "model.mamba_chunk_size"}
# Keys of the model on which the shapes of its parameters do not depend.
_SAME_SHAPES = _FREE | {f"model.{key}" for key in ("rope", "rope_base", "norm_eps")}
_SAME_SHAPES |= {
    f"model.moe_{key}" for key in ("top_k", "score", "scaling", "weight", "num_groups", "top_groups", "group_score")
}


@dataclass(frozen=True)
class Damage:
    """A damaged checkpoint. moved_to: its new name, if it was moved aside. unreadable: see DamageError."""

    name: str
    problem: str
    moved_to: str = ""
    unreadable: bool = False


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose model, optimizer and generators were loaded (generators only if as many ranks saved it).

    trainer: as it was passed to `Checkpointer.save`. damaged: newer checkpoints that were damaged. origin: the
    checkpoint of another run that this run began from, if any. returned: checkpoints of later steps that were saved
    before this one; once they are moved aside, their new names.
    """

    folder: Path
    manifest: Manifest
    trainer: dict[str, Any]
    damaged: tuple[Damage, ...] = ()
    origin: Origin | None = None
    returned: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps done, which is also the index of the next step."""
        return self.manifest.step


class Finder:
    """Finds the checkpoint under `root` to resume from. Its methods are collectives.

    load: loads a checkpoint and returns its trainer state. A collective; raises DamageError on all ranks if any rank
    finds damage. Any other error, which it raises on all ranks too, ends the search. read_only: change nothing on disk,
    and log nothing.
    """

    def __init__(
        self, root: Path, sync: RankSync, load: Callable[[Path, Manifest], dict[str, Any]], read_only: bool = False
    ) -> None:
        self.root, self.sync, self.load, self.read_only = root, sync, load, read_only

    def choose(self, resume: str) -> Resumed | None:
        """Load the checkpoint that `resume` means (see the table above); None if the run begins at step 0.

        Raises RefusedError on all ranks if no checkpoint is intact, if those of an earlier run are lost, if the
        checkpoints have another origin, or if the given one is missing or damaged. Raises CheckpointError if ranks
        disagree about damage, or if no checkpoint can be read.
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
            fresh = "" if given else "begin at step 0 with checkpoint.resume=never, which moves the records aside, or "
            raise RefusedError(
                f"run.dir={self.root.parent} is of an earlier run ({'; '.join(found)}), but there is no checkpoint to "
                f"resume from in {self.root}: restore it, or {fresh}choose another run.dir"
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
                f"{self.root.parent}: an earlier start trained {steps} steps and saved no checkpoint; its records are "
                "moved aside, and this start begins at step 0",
            )
        return None

    def _newest_intact(self) -> Resumed | None:
        """Load the newest intact checkpoint; None if there are no checkpoints. Raises as `choose`."""

        candidates: list[tuple[Path, Manifest]] = []  # on rank 0 only: the manifests of a thousand ranks are large

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
                logger.warning("%s names %s, which does not exist", self.root / files.POINTER, pointer)
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
                step = manifest.step
                later = self.sync.on_rank0("scan", lambda: [path.name for path, it in candidates if it.step > step])  # noqa: B023
                return Resumed(folder, manifest, trainer, tuple(damaged), Origin.of(trainer), tuple(later))
        if not damaged:
            return None
        listing = " | ".join(f"{each.name}: {each.problem}" for each in damaged)
        if any(each.unreadable for each in damaged):  # maybe the connection to the disk failed: no refusal
            raise CheckpointError(f"no checkpoint under {self.root} can be read ({listing}); nothing was moved")
        raise RefusedError(
            f"there are checkpoints under {self.root}, but none is intact ({listing}). Restore one, or start from step "
            "0 in another run.dir"
        )

    def _given(self, given: str) -> Resumed:
        """Load a checkpoint of this run or another. Raises as `choose`."""
        folder, manifest, origin = self.sync.on_rank0("read a manifest", lambda: checkpoint_of(RESUME, given))
        try:
            trainer = self.load(folder, manifest)
        except DamageError as error:
            refuse_damaged(f"{RESUME}={folder}", folder, error, self.sync)
        return Resumed(folder, manifest, trainer, origin=Origin.of(trainer) if is_own(self.root, folder) else origin)

    def _settle(self, chosen: Resumed) -> Resumed:
        """Move damaged checkpoints aside, and make the pointer name the loaded one: a run that was killed before it
        wrote the pointer may be finished, and then saves no more."""
        if self.read_only:
            return chosen

        def move() -> tuple[tuple[Damage, ...], tuple[str, ...]]:
            moved = tuple(
                replace(each, moved_to=files.move_aside(self.root / each.name).name) for each in chosen.damaged
            )
            returned = tuple(files.move_aside(self.root / name, "returned").name for name in chosen.returned)
            if files.read_pointer(self.root) != chosen.folder.name:
                try:
                    files.write_pointer(chosen.folder)
                except OSError as error:
                    logger.warning("`%s` does not name %s: %s", files.POINTER, chosen.folder.name, error)
            return moved, returned

        moved, returned = self.sync.on_rank0("move checkpoints aside", move)
        for each in moved:
            text = f"{each.name} was moved to {self.root / each.moved_to}; resuming from {chosen.folder.name}"
            self._log(logging.ERROR, text)
        return replace(chosen, damaged=moved, returned=returned)

    def _report(self, damage: Damage) -> None:
        self._log(logging.ERROR, f"CHECKPOINT DAMAGED: {damage.name}: {damage.problem}")

    def _log(self, level: int, message: str) -> None:
        if self.sync.rank == 0 and not self.read_only:
            logger.log(level, message)


def confirm(folder: Path, error: DamageError, sync: RankSync) -> None:
    """Return if rank 0 finds the files that `error` names damaged too. Otherwise raise CheckpointError on all ranks,
    because other machines may be able to read the checkpoint."""

    def is_damaged() -> bool:
        records = files.read_manifest(folder).files
        return any(files.check_file(folder, name, records[name], from_disk=True) for name in error.files)

    if error.files and files.MANIFEST not in error.files and not sync.on_rank0("read it again", is_damaged):
        raise CheckpointError(
            f"{folder} is damaged for {error.reasons}; but rank 0 has read it again and finds it intact. Nothing was "
            "moved; start again, on other machines if this repeats"
        )


def refuse_damaged(key: str, folder: Path, error: DamageError, sync: RankSync) -> NoReturn:
    """After `confirm`, refuse the checkpoint that the user gave as `key`, on all ranks."""
    confirm(folder, error, sync)
    if error.unreadable:
        raise CheckpointError(f"{key} cannot be read: {error.reasons}") from error
    raise RefusedError(f"{key} is damaged: {error.reasons}; give another one") from error


def check_resumable(folder: Path, manifest: Manifest) -> None:
    """Raise RefusedError for a checkpoint that only has usable weights, so that no run can resume from it."""
    if manifest.weights_only:
        problem = "is an imported checkpoint, which has only weights: nothing to resume"
    elif manifest.format == 1:
        problem = "is of format 1, whose order of samples this version does not have: nothing to resume"
    else:
        return
    raise RefusedError(f"{folder} {problem}; begin a run from it with {INITIALIZE}={folder}, in another run.dir")


def check_identity(folder: Path, manifest: Manifest, identity: Mapping[str, Any], allow_mismatch: bool) -> list[str]:
    """Raise RefusedError unless a run of this `identity` may resume from the checkpoint. Returns the differences that
    `allow_mismatch` allows."""
    check_resumable(folder, manifest)
    differences = identity_differences(manifest.identity, identity)
    if differences and not allow_mismatch:
        raise _differs(
            f"{folder} belongs to another run", differences, "Set these back", "choose another run.dir", "resume"
        )
    return list(differences.values())


def _differs(what: str, differences: Mapping[str, str], back: str, other: str, start: str) -> RefusedError:
    """The refusal of a checkpoint with these `differences` by key. `checkpoint.allow_mismatch` is a remedy only if the
    weights have the same shapes, and the steps took the same samples."""
    possible = all(key in _SAME_SHAPES or not key.startswith(("model.", "train.")) for key in differences)
    anyway = f", or {start} anyway with checkpoint.allow_mismatch=true" if possible else ""
    return RefusedError(f"{what}: {'; '.join(differences.values())}. {back}, or {other}{anyway}")


def checkpoint_of(key: str, given: str) -> tuple[Path, Manifest, Origin]:
    """The checkpoint that `given` means; reads only manifests. key: RESUME or INITIALIZE, which also takes a run.

    Raises RefusedError and OSError.
    """
    path = Path(os.path.realpath(given))
    try:
        folder = files.checkpoint_in(path)
        manifest = files.read_manifest(folder)
    except DamagedCheckpointError as error:
        how = "of another version" if isinstance(error, OtherFormatError) else "damaged"
        raise RefusedError(f"{key}={given} is {how}: {error}; give another checkpoint") from error
    except ValueError as error:
        raise RefusedError(f"{key}={error}") from error
    if key == RESUME:
        if folder != path:
            raise RefusedError(f"{key}={given} is not a checkpoint, but contains some: give {folder}")
        check_resumable(folder, manifest)
    return folder, manifest, Origin.at(folder, manifest)


def is_own(root: Path, given: str | Path) -> bool:
    """Whether `given` is a checkpoint's path directly under `root`; it need not exist."""
    return Path(os.path.realpath(given)).parent == Path(os.path.realpath(root))


def refuse_to_overwrite(resume: str, start: int, root: Path, aside: Collection[str] = ()) -> None:
    """Raise RefusedError if a start from step `start` would later overwrite checkpoints under `root`, intact or not.
    aside: names of those that it moves aside before."""
    last = max((files.step_of(each) for each in files.list_checkpoints(root) if each.name not in aside), default=0)
    if last > start:
        raise RefusedError(
            f"{RESUME}={resume} starts from step {start}, but {root} already has checkpoints up to step {last}, which "
            "the run would overwrite; choose another run.dir"
        )


def earlier_run(root: Path) -> tuple[int, list[str]]:
    """Traces of a run without checkpoints under `root`: the last step in its records, and lines about lost checkpoints.

    A run that was killed before its first checkpoint leaves no such lines, and may start again. Raises OSError.
    """
    run_dir, found, steps, saved = root.parent, [], 0, 0
    fresh = False  # the run was started with checkpoint.resume=never
    for line in (run_dir / METRICS).read_bytes().splitlines() if (run_dir / METRICS).is_file() else []:
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # a damaged line must not hide the others
            record = json.loads(line)
            steps = max(steps, int(record["step"])) if record.get("kind") == "step" else steps
            saved += record.get("event") == "checkpoint"
            fresh |= record.get("resume") == "never"
    if saved:
        found.append(f"{METRICS} has {steps} steps and {saved} saved checkpoints")
    if last := number_in_state(run_dir, "checkpoint"):
        found.append(f"{STATE_FILE} has a checkpoint of step {last}")
    if not fresh:  # otherwise the other traces are of an earlier run, which the user gave up
        if (run_dir / SUMMARY).exists():
            found.append(f"{SUMMARY} exists, so the run was finished")
        if (pointer := files.read_pointer(root)) is not None:
            found.append(f"checkpoints/{files.POINTER} names {pointer}")
        if damaged := sorted(folder.name for folder in root.glob("step_*.damaged*")):
            found.append(f"damaged checkpoints were moved aside: {', '.join(damaged)}")
    return steps, found


# Checks that one process can make before ranks wait for each other; they read manifests, sizes and the trainer's state


def preview(config: Config, identity: Mapping[str, Any]) -> Resumed | None:
    """The checkpoint that a start of `config` would resume from; None if it begins at step 0. Changes nothing on disk.

    identity: of the run. Raises RefusedError for what a start would refuse, if it can be found here; ValueError,
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
            files.read_checked(folder, METADATA, manifest.files)  # `check_state` reads its content
            return files.read_trainer(folder, manifest)

        return sync.on_rank0("read it", look)

    found = Finder(root, sync, load, read_only=True).choose(resume)
    if (given := config.checkpoint.initialize_from) is not None:
        if found is not None:
            check_begun_from(Origin.of(found.trainer, "initialized_from"), INITIALIZE, given, root, sync)
        else:
            weights_to_begin_from(given, identity, sync, allow_mismatch=config.checkpoint.allow_mismatch)
    aside = () if found is None else (*(damage.name for damage in found.damaged), *found.returned)
    start = 0 if found is None else found.step
    refuse_to_overwrite(resume, start, root, aside)
    return found


def check_state(config: Config, found: Resumed | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise RefusedError if what a start of `config` would load into `model` and `optimizer` differs from theirs in
    names, types or shapes. found: from `preview`; None: it loads the weights of `checkpoint.initialize_from`, if set.
    """
    given = config.checkpoint.initialize_from
    if found is not None:
        folder, manifest = found.folder, found.manifest
    elif given is not None:
        folder, manifest, _ = checkpoint_of(INITIALIZE, given)
    else:
        return
    try:
        metadata = read_metadata(files.read_checked(folder, METADATA, manifest.files))
    except DamagedCheckpointError as error:
        raise RefusedError(f"{folder} is damaged: {error}; give another checkpoint") from error
    state = state_of(model, optimizer)
    check_tensors(folder, metadata, state if found is not None else {"model": state["model"]})


def check_resume(config: Config) -> None:
    """Raise RefusedError if `checkpoint.resume` or `checkpoint.initialize_from` names no checkpoint, or weights of
    another model.

    A run with checkpoints resumes from these, even if the checkpoint that it began from is gone. The start checks
    whether they belong to it.
    """
    settings, root = config.checkpoint, Path(config.run.dir) / "checkpoints"
    resume, given = settings.resume, settings.initialize_from
    if given is not None and resume not in KEYWORDS:
        raise RefusedError(
            f"{INITIALIZE}={given} loads only weights and checkpoint.resume={resume} a whole checkpoint; give one of "
            "them"
        )
    if given is None and resume in KEYWORDS:
        return
    if files.list_checkpoints(root) and not is_own(root, resume):
        return
    try:
        folder, manifest, _ = checkpoint_of(RESUME, resume) if given is None else checkpoint_of(INITIALIZE, given)
    except OSError as error:
        raise RefusedError(str(error)) from error
    if given is not None and not settings.allow_mismatch:
        _check_model(folder, manifest, run_identity(config, {}), ("model.",))


# Beginning from weights alone


def _check_model(folder: Path, manifest: Manifest, identity: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise RefusedError, with all keys that differ, if the checkpoint's weights do not fit a run of this `identity`.
    keys: the beginnings of the keys to compare."""
    saved, own = (
        {name: value for name, value in facts.items() if name not in _FREE and name.startswith(keys)}
        for facts in (manifest.identity, identity)
    )
    if differences := identity_differences(saved, own):
        what = f"{INITIALIZE}={folder} is of another model or tokenizer"
        raise _differs(what, differences, "Set these keys back", "give another checkpoint", "begin")


def weights_to_begin_from(
    given: str, identity: Mapping[str, Any], sync: RankSync, *, allow_mismatch: bool
) -> tuple[Path, Manifest, Origin]:
    """The checkpoint whose weights `given` names. A collective. identity: of the run. Raises RefusedError on all ranks
    for no checkpoint, another model or tokenizer."""
    folder, manifest, origin = sync.on_rank0("find it", lambda: checkpoint_of(INITIALIZE, given))
    if not allow_mismatch:  # on all ranks, because the tokenizer's file may differ between nodes
        sync.on_all("compare", lambda: _check_model(folder, manifest, identity, ("model.", "data.tokenizer")))
    return folder, manifest, origin


def initialize_weights(
    given: str, model: nn.Module, identity: Mapping[str, Any], sync: RankSync, *, allow_mismatch: bool
) -> Origin:
    """Load the weights that `given` names into `model`, on any mesh. A collective. Returns the checkpoint.

    Every rank reads the files that have parts of its shards, and compares each file with its SHA-256. identity: of the
    run. Raises RefusedError on all ranks for no checkpoint, another model or tokenizer, or damage; CheckpointError if
    reading fails.
    """
    folder, manifest, origin = weights_to_begin_from(given, identity, sync, allow_mismatch=allow_mismatch)
    try:
        load_tensors(folder, manifest, {"model": model.state_dict()}, sync)
    except DamageError as error:
        refuse_damaged(f"{INITIALIZE}={folder}", folder, error, sync)
    return origin


def check_begun_from(begun: Origin | None, key: str, given: str, root: Path, sync: RankSync) -> None:
    """Refuse to resume a run that did not begin from the checkpoint `given` as `key` (RESUME or INITIALIZE).

    begun: the checkpoint that the run began from. By now it may be removed, moved, or made again with the same bits,
    and there may be newer ones beside it. root: the run's checkpoints.
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
        began, instead = "from new weights", "null"
    else:
        began, instead = f"from the weights of {begun.path}", begun.path
    raise RefusedError(
        f"{key}={given}, but {root} has checkpoints of a run that began {began}; choose another run.dir to begin from "
        f"{path.name} there, or resume from them with {key}={instead}"
    )
