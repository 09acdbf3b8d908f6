from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from data.storage import build_once


def slow_build(folder: Path) -> None:
    with open(folder.parent / "builds", "a", encoding="utf-8") as log:
        log.write(f"{os.getpid()}\n")
    (folder / "half").touch()
    time.sleep(0.3)
    (folder / "whole").touch()


def race(folder: Path, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    assert (build_once(folder, slow_build) / "whole").exists()


def test_racing_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=race, args=(tmp_path / "corpus", barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "builds").read_text().splitlines()) == 1


def test_a_failed_or_killed_build_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "corpus", fail)
    assert not (tmp_path / "corpus").exists()
    (tmp_path / "corpus.tmp").mkdir()  # as a killed build leaves it
    (tmp_path / "corpus.tmp" / "stale").touch()
    build_once(tmp_path / "corpus", slow_build)
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == ["half", "whole"]
