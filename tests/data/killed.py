"""Prepare a corpus in processes that are killed at one place after another; run by test_prepare.py.

    python killed.py FOLDER first step

Prints the number of places where a kill is possible, then prepares FOLDER/1, FOLDER/1+step, ...: each is killed at
the place of its number three times in a row, then run to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.prepare import prepare as prepare_module
from data.prepare import readers
from data.prepare.prepare import NewTokenizer, WorkFolder
from data.prepare.readers import find_files, open_files
from data.prepare.tokenize import Options

_EXISTS = 3


def prepare(folder: Path, output: Path) -> None:
    """The same corpus each time: JSON Lines in several tasks, huge documents, a tokenizer to train."""
    parts = open_files("json", find_files([str(folder / "*.jsonl")]))
    options = Options(validation=0.2, max_document_bytes=1000, max_malformed=0.1)
    prepare_module.prepare(parts, output / "web", NewTokenizer(300, output / "tokenizer.json"), options)


class Places:
    """Counts the places where the disk changes, and ends the process at the one that was chosen."""

    def __init__(self, chosen: int) -> None:
        self.seen, self.chosen = 0, chosen

    def __call__(self) -> None:
        self.seen += 1
        if self.seen == self.chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a place before and one after it."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self()
            result = function(*arguments, **options)
            self()
            return result

        return wrapped


def watch(chosen: int) -> Places:
    """Make places of what changes the disk; half of a task's documents on it is one too."""
    places = Places(chosen)
    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, places.around(getattr(os, name)))
    add = WorkFolder.add

    def torn_add(self: WorkFolder, part: int, tasks: int, encoded: Any) -> None:
        add(self, part, tasks, encoded)
        for file in self._files.values():
            file.flush()
        places()

    WorkFolder.add = torn_add  # type: ignore[method-assign]
    return places


def in_child(folder: Path, output: Path, chosen: int) -> int:
    """Prepare in a process of its own; how it ended, as os.wait has it."""
    pid = os.fork()
    if pid == 0:
        places = watch(chosen)
        try:
            prepare(folder, output)
        except FileExistsError:
            os._exit(_EXISTS)
        (folder / "places").write_text(str(places.seen))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    """See above."""
    folder, first, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    prepare_module.SAVE_SECONDS = 0.0
    readers.TASK_SIZE = 1500
    readers.READ_BYTES = 700
    assert in_child(folder, folder / "undisturbed", 0) == 0
    places = int((folder / "places").read_text())
    killed = 0
    for place in range(first, places, step):
        for _ in range(3):
            killed += in_child(folder, folder / str(place), place) == signal.SIGKILL
        # A kill while the last of web.parts is removed leaves a finished output, and an empty folder to the next call.
        output = folder / str(place)
        done = (output / "web.idx").exists() and not (output / "web.parts/state.json").exists()
        ended = in_child(folder, output, 0)
        assert os.waitstatus_to_exitcode(ended) == (_EXISTS if done else 0), (place, ended, done)
    print(places, killed)


if __name__ == "__main__":
    main()
