"""Prepare a corpus in processes that are killed; run by test_prepare.py.

    python -m tests.data.killed FOLDER FIRST STEP

A place is a point where the process may be killed. Prepares FOLDER/FIRST, FOLDER/(FIRST + STEP), ...: kills each at the
place of its number three times in a row, then runs it to its end. Prints the number of places and of kills.

    python -m tests.data.killed FOLDER

Prepares FOLDER/out until something is saved, prints `saved` and waits. One worker process tokenizes.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.prepare import prepare as prepare_module
from data.prepare import readers
from data.prepare.prepare import NewTokenizer, State, WorkFolder
from data.prepare.readers import find_files, open_files
from data.prepare.tokenize import Options

_EXISTS = 3
CUT_SMALL = {"TASK_SIZE": 1500, "READ_BYTES": 700}
"""Settings of data.prepare.readers that split each file into several tasks."""


def prepare(folder: Path, output: Path, **options: Any) -> None:
    """Prepare FOLDER/*.jsonl, always to the same bytes: in several tasks, with long documents and a new tokenizer."""
    parts = open_files("json", find_files([str(folder / "*.jsonl")]))
    shape = Options(validation=0.2, max_document_bytes=1000, max_malformed=0.1)
    prepare_module.prepare(parts, output / "web", NewTokenizer(300, output / "tokenizer.json"), shape, **options)


def watch(chosen: int) -> list[None]:
    """Kill this process at the place number `chosen` (0: never). Places are before and after each call that changes the
    disk, and when a task's documents are written but not yet recorded. Returns a list that grows by one at each
    place."""
    places: list[None] = []

    def place() -> None:
        places.append(None)
        if len(places) == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            place()
            result = function(*arguments, **options)
            place()
            return result

        return wrapped

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, around(getattr(os, name)))
    add = WorkFolder.add

    def torn_add(self: WorkFolder, part: int, tasks: int, encoded: Any) -> None:
        add(self, part, tasks, encoded)
        for file in self._files.values():
            file.flush()
        place()

    WorkFolder.add = torn_add  # type: ignore[method-assign]
    return places


def in_child(folder: Path, output: Path, chosen: int) -> int:
    """Prepare in a forked process, killed at place `chosen`; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        places = watch(chosen)
        try:
            prepare(folder, output)
        except FileExistsError:
            os._exit(_EXISTS)
        (folder / "places").write_text(str(len(places)))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_at_places(folder: Path, first: int, step: int) -> None:
    assert in_child(folder, folder / "undisturbed", 0) == 0
    places = int((folder / "places").read_text())
    killed = 0
    for place in range(first, places, step):
        output = folder / str(place)
        for _ in range(3):
            killed += in_child(folder, output, place) == signal.SIGKILL
        # A kill while web.parts is being removed leaves a finished output; then the next call refuses.
        done = (output / "web.idx").exists() and not (output / "web.parts/state.json").exists()
        ended = in_child(folder, output, 0)
        assert os.waitstatus_to_exitcode(ended) == (_EXISTS if done else 0), (place, ended, done)
    print(places, killed)


def wait_when_saved(position: int, total: int, state: State) -> None:
    if Path(sys.argv[1], "out/web.parts/state.json").is_file():
        print("saved", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    prepare_module.SAVE_SECONDS = 0.0
    for name, value in CUT_SMALL.items():
        setattr(readers, name, value)
    if len(sys.argv) > 2:
        kill_at_places(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        prepare(Path(sys.argv[1]), Path(sys.argv[1], "out"), workers=1, progress=wait_when_saved)
