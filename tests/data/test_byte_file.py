from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import data.storage
from data.storage import LocalFile


@pytest.fixture
def few_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """No more than 16 files stay open."""
    files = data.storage._OpenFiles()
    files._most = 16
    monkeypatch.setattr(data.storage, "_open_files", files)
    yield files._most


def write_files(folder: Path, count: int, size: int = 4096) -> list[LocalFile]:
    for i in range(count):
        (folder / f"{i:04d}").write_bytes(np.full(size // 4, i, np.uint32).tobytes())
    return [LocalFile(folder / f"{i:04d}") for i in range(count)]


def open_in(folder: Path) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def test_reads_ranges(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    file = LocalFile(tmp_path / "f")
    assert (file.size, file.name) == (200, str(tmp_path / "f"))
    assert file.read(0, 3) == b"\x00\x01\x02" and file.read(198, 2) == bytes([198, 199]) and file.read(7, 0) == b""
    assert file.peek(5, 1) == b"\x05"


def test_thousands_of_files_do_not_stay_open(tmp_path: Path, few_open: int) -> None:
    files = write_files(tmp_path, 100)
    assert open_in(tmp_path) == 0  # naming a file does not open it
    for _ in range(2):
        for i, file in enumerate(files):
            assert file.read(40, 4) == np.uint32(i).tobytes()
    assert open_in(tmp_path) == few_open


def test_threads_share_few_descriptors(tmp_path: Path, few_open: int) -> None:
    """A descriptor that goes while another thread reads from it would give the bytes of another file."""
    files = write_files(tmp_path, 40)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, 40, 4000).tolist():
            if files[i].read(100, 4) != np.uint32(i).tobytes():
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and open_in(tmp_path) == few_open


def read_all(files: list[LocalFile]) -> bool:
    return all(file.read(8, 4) == np.uint32(i).tobytes() for i, file in enumerate(files))


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    kept, pickled = LocalFile(tmp_path / "f"), pickle.dumps(LocalFile(tmp_path / "f"))
    assert kept.read(0, 4) == b"abcd"
    os.utime(tmp_path / "f", (1, 1))
    assert pickle.loads(pickled).read(0, 4) == b"abcd"  # touched, but the same
    (tmp_path / "new").write_bytes(b"efgh")
    os.replace(tmp_path / "new", tmp_path / "f")
    assert kept.read(0, 4) == b"abcd"  # it is open
    with pytest.raises(ValueError, match=r"f is not the file any more that this run opened; put it back"):
        pickle.loads(pickled).read(0, 4)


def test_a_file_that_was_cut_short_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    file = LocalFile(tmp_path / "f")
    file.read(0, 1)
    os.truncate(tmp_path / "f", 3)
    with pytest.raises(ValueError, match="f ends at byte 3; it was cut short while in use"):
        file.read(2, 2)


def test_what_a_disk_fails_at_keeps_its_number_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    file = LocalFile(tmp_path / "f")

    def fail(*arguments: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError) as failure:
        file.read(0, 1)
    assert failure.value.errno == 5 and failure.value.filename == str(tmp_path / "f")


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))
