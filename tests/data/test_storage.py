"""Reads of local files, and folders that are built once."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data import storage
from data.storage import LocalFile, build_once


def num_open_in(folder: Path) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def test_threads_share_a_limited_number_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed while another thread reads from it would give the bytes of another file."""
    monkeypatch.setattr(storage, "_opened", lru_cache(16)(storage._Descriptor))
    for i in range(40):
        (tmp_path / f"{i}").write_bytes(np.full(100, i, np.uint32).tobytes())
    files = [LocalFile(f"{tmp_path}/{i}") for i in range(40)]
    assert num_open_in(tmp_path) == 0, "naming a file does not open it"
    picked = np.random.default_rng(0).integers(0, 40, 8000).tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: files[i].read(100, 4), picked))
    assert found == [np.uint32(i).tobytes() for i in picked] and num_open_in(tmp_path) == 16


def test_a_file_that_fails_or_is_replaced_or_cut_short_in_use_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abcd")
    kept, pickled = LocalFile(str(path)), pickle.dumps(LocalFile(str(path)))
    assert (kept.name, kept.size, kept.read(1, 2), kept.read(4, 0)) == (str(path), 4, b"bc", b"")
    storage._opened.cache_clear()
    os.utime(path, (1, 1))
    assert pickle.loads(pickled).read(0, 4) == b"abcd", "touched, but not replaced"
    (tmp_path / "new").write_bytes(b"efgh")
    os.replace(tmp_path / "new", path)
    assert kept.read(0, 4) == b"abcd", "the old file is still open"
    storage._opened.cache_clear()
    with pytest.raises(ValueError, match=r"f was replaced while this run used it; restore the old file"):
        pickle.loads(pickled).read(0, 4)
    other = LocalFile(str(path))
    assert other.read(0, 4) == b"efgh"
    os.truncate(path, 3)
    with pytest.raises(ValueError, match="f ends at byte 3; it was cut short while in use"):
        other.read(2, 2)
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match=r"Errno 5.*/f'$"):
        other.read(0, 1)


def test_a_failed_or_killed_build_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    def build(folder: Path, error: Exception | None) -> None:
        (folder / "half").touch()
        if error:
            raise error
        (folder / "whole").touch()

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "corpus", partial(build, error=OSError("disk full")))
    assert not (tmp_path / "corpus").exists()
    (tmp_path / "corpus.tmp" / "stale").mkdir(parents=True)  # as a killed build leaves it
    build_once(tmp_path / "corpus", partial(build, error=None))
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == ["half", "whole"]
