"""Which checkpoint a start would go on from, seen by one process that reads manifests and the trainer's state alone.

For --check, and for what can be refused before any rank waits for others. A start itself also reads and hashes the
tensors (choice.py), moves damaged checkpoints aside and looks on its nodes' own disks; this looks, and changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.choice import is_own, nothing_left
from megatron_fp4.checkpoint.evidence import earlier_run
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, OtherFormatError
from megatron_fp4.checkpoint.identity import identity_differences, other_run
from megatron_fp4.checkpoint.initialize import refuse_weights_only
from megatron_fp4.checkpoint.origin import is_origin, origin_in
from megatron_fp4.config.schema import Config, ConfigError


@dataclass(frozen=True)
class Preview:
    """The checkpoint in `folder`: its manifest and its trainer's state. problems: of newer ones that are not whole."""

    folder: Path
    manifest: Manifest
    trainer: dict[str, Any]
    problems: tuple[str, ...]


def check_resume(config: Config) -> None:
    """Raise ConfigError if `checkpoint.resume` is a path that no start could go on from.

    A branch goes on with its own checkpoints also when its parent is gone; the start sees whether they are its own.
    """
    resume, root = config.checkpoint.resume, _root(config)
    if config.checkpoint.initialize_from is not None:  # which only goes with auto and never: check_initialization
        return
    if resume in ("auto", "never") or (any(root.glob("step_*")) and not is_own(root, _real(resume))):
        return
    given = Path(resume)
    if not given.is_dir():
        raise ConfigError(
            f"checkpoint.resume={resume} is no checkpoint folder; give auto, never or the path of one, such as "
            f"{config.run.dir}/checkpoints/step_00000200"
        )
    try:
        refuse_weights_only(given, files.read_manifest(given))
    except DamagedCheckpointError as error:
        inside = files.list_checkpoints(given / "checkpoints") or files.list_checkpoints(given)
        remedy = f"it has some inside: give {inside[-1]}" if inside else "give auto, never or the path of another one"
        raise ConfigError(f"checkpoint.resume={resume} is no whole checkpoint ({error}); {remedy}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"checkpoint.resume={resume}: {error}") from error


def preview(config: Config, identity: Mapping[str, Any]) -> Preview | None:
    """What a start of `config` would go on from; None if it begins at step 0.

    identity: the run's. Raises ConfigError for what a start would refuse, as far as it can be seen so; OSError.
    """
    check_resume(config)
    resume, root = config.checkpoint.resume, _root(config)
    given = None if resume in ("auto", "never") else _real(resume)
    found = None
    if given is not None and is_own(root, given):
        found = _read(given)
    elif resume != "never":
        found = _newest(root, config)
        if found is None and (evidence := earlier_run(root, branch=given is not None)).found:
            raise ConfigError(nothing_left(root, evidence, given))
        if found is None and given is not None:
            found = _read(given)
        elif found is not None and given is not None and not _is_branch_of(found, given):
            raise ConfigError(
                f"checkpoint.resume={given}, but {root} has checkpoints of a run that did not begin from it; choose "
                "another run.dir, or go on with them by checkpoint.resume=auto"
            )
    if isinstance(found, str):
        raise ConfigError(f"checkpoint.resume={resume} is damaged: {found}; give another one")
    start = 0 if found is None else found.manifest.step
    own = [files.step_of(folder) for folder in files.list_checkpoints(root)]
    broken = {problem.split(":")[0] for problem in (found.problems if found else ())}
    later = [step for step in own if step > start and files.folder_name(step) not in broken]
    if later:
        raise ConfigError(would_overwrite(resume, start, root, max(later)))
    if found is not None:
        _check_identity(found, identity, config.checkpoint.allow_mismatch)
    return found


def would_overwrite(resume: str, start: int, root: Path, last: int) -> str:
    """The refusal of a start from step `start` that would come to replace checkpoints up to step `last`."""
    return (
        f"checkpoint.resume={resume} starts from step {start}, but {root} already has checkpoints up to step {last}, "
        "which the run would overwrite; choose another run.dir"
    )


def _newest(root: Path, config: Config) -> Preview | None:
    """The newest one that is whole as far as sizes tell; None if there is none at all."""
    problems: list[str] = []
    for folder, manifest, problem in files.scan(root):
        read = problem if manifest is None else _read(folder)
        if isinstance(read, Preview):
            return Preview(read.folder, read.manifest, read.trainer, tuple(problems))
        problems.append(f"{folder.name}: {read}")
    if problems:
        raise ConfigError(
            f"there are checkpoints under {root}, but none is whole ({' | '.join(problems)}). Not starting again at "
            f"step 0 unasked: restore one, or begin anew in another run.dir than {config.run.dir}"
        )
    return None


def _read(folder: Path) -> Preview | str:
    """The checkpoint, or what is wrong with it."""
    try:
        manifest = files.read_manifest(folder)
        for name, record in manifest.files.items():
            size = (folder / name).stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes instead of {record.size}"
        refuse_weights_only(folder, manifest)
        trainer = json.loads(files.read_checked(folder, files.TRAINER, manifest.files[files.TRAINER]))
    except OtherFormatError as error:
        raise ConfigError(f"{folder}: {error}; resume with the version that wrote it") from error
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except DamagedCheckpointError as error:
        return str(error)
    except (ValueError, KeyError) as error:
        raise ConfigError(str(error)) from error
    return Preview(folder, manifest, trainer, ())


def _check_identity(found: Preview, identity: Mapping[str, Any], allow_mismatch: bool) -> None:
    if not allow_mismatch and (differences := identity_differences(found.manifest.identity, identity)):
        raise ConfigError(other_run(found.folder, differences))


def _is_branch_of(found: Preview, given: Path) -> bool:
    """Whether the run of `found` began from the checkpoint in `given`, which may be gone or elsewhere by now."""
    origin = origin_in(found.trainer)
    if origin is None:
        return False
    return str(given) == origin.path or bool(is_origin(origin, given))


def _root(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))
