"""The folder OUTPUT.parts: what is done so far, so that the same command goes on behind it after any end.

    lock                       held by the command that works here
    settings.json              what shapes the output; another command must not go on here
    stamps.json                the inputs as they were
    tokenizer.json             a tokenizer that was trained for this output
    train.bin, train.lengths   tokens and lengths of documents so far; validation.* the same
    state.json                 how much of all of it counts, and which tasks it came from

The two files of a split only grow. Now and then they are synced to disk, then state.json is replaced; after a kill
what lies behind state.json is cut off and made again. At the end the files are published: state.json says so first,
then they are renamed one after the other, and a command that finds it published goes on renaming.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from data.prepare.encode import SPLITS, Encoded, SplitCount

_STATE, _SETTINGS, _STAMPS, _LOCK = "state.json", "settings.json", "stamps.json", "lock"
Stamps = list[list[tuple[str, int, int]]]


@dataclass
class State:
    """What of a work folder counts: `tasks` tasks of part number `part`, and all of those before it."""

    part: int = 0
    tasks: int = 0
    counts: dict[str, SplitCount] = field(default_factory=lambda: {split: SplitCount() for split in SPLITS})
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name of a file
    malformed: Counter[str] = field(default_factory=Counter)
    reported: int = 0
    huge: int = 0
    published: bool = False

    @property
    def records(self) -> int:
        """Documents and malformed records so far."""
        return sum(count.documents for count in self.counts.values()) + self.malformed.total()

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        # asdict would take a Counter for a list of its items.
        return {**asdict(replace(self, malformed=Counter())), "malformed": dict(self.malformed)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        """The inverse of `to_json`."""
        counts = {split: SplitCount(**count) for split, count in content["counts"].items()}
        return cls(**{**content, "counts": counts, "malformed": Counter(content["malformed"])})


class WorkFolder:
    """The work folder of an output, locked; made if it is not there, else gone on with.

    settings: JSON types by name of an option. Raises ValueError if another command works in it or its settings are
    others; the message names the options.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.path = work_path(output)
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, BinaryIO] = {}
        self._lock = open(self.path / _LOCK, "w")  # noqa: SIM115 - held until close
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise ValueError(f"another command is preparing {output} right now; wait for it, or stop it") from error
            self._check_settings(settings)
            self.state = self._read_state()
        except BaseException:
            self._lock.close()
            raise
        self.saved = (self.path / _STATE).is_file()
        self.is_whole = True  # not in the middle of a task's documents

    def _check_settings(self, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        path = self.path / _SETTINGS
        if not (self.path / _STATE).is_file():
            # New, or a kill came before anything was worth keeping.
            self._clear()
            _write_json(path, settings)
            return
        before = json.loads(path.read_bytes())
        others = [
            f"{name} {_shown(before.get(name))} instead of {_shown(settings.get(name))}"
            for name in {**before, **settings}
            if before.get(name) != settings.get(name)
        ]
        if others:
            raise ValueError(
                f"{self.path} holds an unfinished preparation with {', '.join(others)}; give the same to go on with "
                "it, or remove the folder to begin again"
            )

    def _clear(self) -> None:
        for file in self.path.iterdir():
            if file.name != _LOCK:
                file.unlink()

    def _read_state(self) -> State:
        path = self.path / _STATE
        if not path.is_file():
            return State()
        try:
            return State.from_json(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove {self.path} to begin again") from error

    def check_stamps(self, stamps: Stamps) -> None:
        """Raise ValueError if an input that was read, wholly or in part, is another one now; keep the stamps."""
        path = self.path / _STAMPS
        touched = self.state.part + (self.state.tasks > 0)
        if self.saved and path.is_file():
            before = json.loads(path.read_bytes())
            for old, new in zip(before[:touched], stamps[:touched], strict=False):
                for was, now in zip(old, new, strict=False):
                    if list(was) != list(now):
                        what = "has changed" if was[0] == now[0] else f"stands where {was[0]} was"
                        raise ValueError(
                            f"{now[0]} {what} since it was prepared; remove {self.path} to begin again with what is "
                            "there"
                        )
            if [len(old) for old in before[:touched]] != [len(new) for new in stamps[:touched]]:
                raise ValueError(f"the inputs are others than those of {self.path}; remove it to begin again")
        _write_json(path, stamps)

    def open_splits(self, splits: Sequence[str]) -> None:
        """Open the files of the splits, cut to what counts. Raises ValueError if they are shorter than that."""
        for split in splits:
            for ending in ("bin", "lengths"):
                name = f"{split}.{ending}"
                file = open(self.path / name, "ab")  # noqa: SIM115 - closed by close
                self._files[name] = file
                size, counted = file.tell(), self.state.sizes.get(name, 0)
                if size < counted:
                    raise ValueError(
                        f"{self.path / name} has {size} bytes where {counted} were written; remove {self.path} to "
                        "begin again"
                    )
                file.truncate(counted)
                file.seek(0, os.SEEK_END)

    def add(self, part: int, tasks: int, encoded: Encoded) -> None:
        """Append the documents of a task, so that `tasks` tasks of this part are done."""
        self.is_whole = False
        for split, tokens in encoded.tokens.items():
            self._files[f"{split}.bin"].write(tokens.tobytes())
            self._files[f"{split}.lengths"].write(encoded.lengths[split].tobytes())
            self.state.counts[split].add(encoded.counts[split])
        self.state.malformed.update(encoded.malformed)
        self.state.huge += encoded.huge
        self.state.part, self.state.tasks = part, tasks
        self.is_whole = True

    def save(self) -> None:
        """Make all of it count, whatever comes."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            self.state.sizes[name] = file.tell()
        _write_json(self.path / _STATE, self.state.to_json())
        self.saved = True

    def publish(self, renamings: dict[str, Path]) -> None:
        """Rename the files of this folder, in this order, and remove it.

        Raises FileExistsError rather than overwrite.
        """
        for name, target in renamings.items():
            if (self.path / name).exists() and target.exists():
                raise FileExistsError(f"{target} exists already; choose another name, or remove it to prepare it again")
        if not self.state.published:
            self.state.published = True
            self.save()
        for name, target in renamings.items():
            if (self.path / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self.path / name, target)
                _sync_folder(target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        # The state after what only makes it longer to remove: until then the same command comes back to this place.
        for file in self.path.iterdir():
            if file.name not in (_LOCK, _STATE, _SETTINGS):
                file.unlink()
        (self.path / _STATE).unlink(missing_ok=True)
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Let go of the files and the lock; what was saved stays."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()


def work_path(output: Path) -> Path:
    """Where an unfinished output lies."""
    return Path(f"{output}.parts")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
