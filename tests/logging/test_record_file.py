"""Lines on disks that fail: what a kill, a power cut, a full disk and an I/O error leave of metrics.jsonl."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from megatron_fp4.logging import record_file
from megatron_fp4.logging.record_file import RecordFile, cut_after, listed


def line(step: int, **more: object) -> str:
    return json.dumps({"kind": "step", "step": step, **more})


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


class Disk:
    """Stands before os.write and os.fsync of one file: full, or broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.fsync_fails = False
        self.syncs = 0
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(record_file.os, "write", self.write)
        monkeypatch.setattr(record_file.os, "fsync", self.fsync)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._write(descriptor, data[: self.room])  # a disk takes what it has room for
        self.room -= count
        return count

    def fsync(self, descriptor: int) -> None:
        if self.fsync_fails:
            raise OSError(errno.EIO, "Input/output error")
        self.syncs += 1
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl")
    file.write(line(1, name="\udc80ü"))  # an undecodable path is such text
    assert json.loads(path.read_text()) == {"kind": "step", "step": 1, "name": "\udc80ü"}
    file.close()
    file.close()


def test_a_full_disk_loses_nothing_when_it_has_room_again(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl", retry_seconds=0.0)
    file.write(line(1))
    disk.room = 10  # the next line is cut in the middle
    file.write(line(2))
    assert path.read_bytes() == (line(1) + "\n").encode() + line(2).encode()[:10]
    for step in (3, 4):
        file.write(line(step))
    disk.room = None
    file.write(line(5))
    assert steps(path) == [1, 2, 3, 4, 5]
    file.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "LOGGING FAILED, training goes on" in said[0] and "No space left" in said[0] and str(path) in said[0]
    assert "works again" in said[1] and "nothing is lost" in said[1]
    assert file.outage.failures == 3


def test_a_refused_sync_writes_again_what_may_be_gone(tmp_path: Path, disk: Disk) -> None:
    """A kernel may drop pages that it could not write; the next fsync then succeeds, without them."""
    file = RecordFile(path := tmp_path / "m.jsonl", retry_seconds=0.0)
    file.write(line(1))
    file.sync()
    file.write(line(2))
    file.write(line(3))
    disk.fsync_fails = True
    file.sync()
    assert file.outage.on
    good = (line(1) + "\n").encode()
    path.write_bytes(good + bytes(len(path.read_bytes()) - len(good)))  # the lost pages
    disk.fsync_fails = False
    file.sync()
    assert not file.outage.on and steps(path) == [1, 2, 3]
    file.close()


def test_a_disk_that_only_refuses_syncs_does_not_seem_to_work_in_between(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl", retry_seconds=0.0)
    disk.fsync_fails = True
    for step in range(1, 6):
        file.write(line(step))
        file.sync()
    assert len(caplog.records) == 1
    disk.fsync_fails = False
    file.close()
    assert steps(path) == [1, 2, 3, 4, 5]


def test_what_is_kept_in_memory_is_bounded_and_what_is_lost_is_counted(tmp_path: Path, disk: Disk) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl", pending=5, retry_seconds=0.0)
    file.write(line(1))
    disk.room = 0
    for step in range(2, 12):
        file.write(line(step))
    assert len(file._lines) <= 6
    disk.room = None
    file.write(line(12))
    records = [json.loads(text) for text in path.read_text().splitlines()]
    kept = [record["step"] for record in records if record["kind"] == "step"]
    (event,) = [record for record in records if record["kind"] == "event"]
    assert kept[0] == 1 and kept[-1] == 12 and kept == sorted(set(kept))
    assert event == {"kind": "event", "step": 12, "event": "records_lost", "count": 12 - len(kept)}
    file.close()


def test_without_a_fault_memory_is_bounded_by_syncs(tmp_path: Path, disk: Disk) -> None:
    file = RecordFile(tmp_path / "m.jsonl", pending=10)
    before = disk.syncs
    for step in range(100):
        file.write(line(step))
        assert len(file._lines) < 10
    assert disk.syncs - before == 10
    file.close()


def test_a_file_that_cannot_be_prepared_is_prepared_later(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1) + "\n" + line(2) + "\n")
    tries = []

    def prepare() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        cut_after(path, 1)

    file = RecordFile(path, prepare, retry_seconds=0.0)
    for step in (2, 3, 4):
        file.write(line(step))
    file.close()
    assert steps(path) == [1, 2, 3, 4] and len(tries) == 3


def test_attempts_are_rare_while_the_disk_refuses(tmp_path: Path, disk: Disk) -> None:
    file = RecordFile(tmp_path / "m.jsonl", retry_seconds=3600.0)
    disk.room = 0
    for step in range(50):
        file.write(line(step))
    assert file.outage.failures == 1
    disk.room = None
    file.sync()  # a checkpoint is about to be published: this is no time to wait
    assert steps(file.path) == list(range(50))
    file.close()


def test_syncs_from_another_thread_do_not_disturb_writes(tmp_path: Path, disk: Disk) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl", retry_seconds=0.0)
    done = threading.Event()

    def sync() -> None:
        while not done.is_set():
            file.sync()
            disk.fsync_fails = not disk.fsync_fails

    thread = threading.Thread(target=sync)
    thread.start()
    for step in range(2000):
        file.write(line(step))
    done.set()
    thread.join()
    disk.fsync_fails = False
    file.close()
    assert file.lost == 0 and steps(path) == list(range(2000))


def test_a_write_does_not_wait_for_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(path := tmp_path / "m.jsonl")
    file.write(line(1))
    syncing, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def slow(descriptor: int) -> None:
        syncing.set()
        assert go_on.wait(60)
        real(descriptor)

    monkeypatch.setattr(record_file.os, "fsync", slow)
    thread = threading.Thread(target=file.sync)
    thread.start()
    assert syncing.wait(60)
    file.write(line(2))
    assert steps(path) == [1, 2]  # while the other thread still waits for its disk
    go_on.set()
    thread.join()
    assert file._lines == [(line(2) + "\n").encode()]
    file.close()


def test_cut_after_removes_later_steps_and_an_unfinished_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(line(step) + "\n" for step in range(1, 7)) + line(7)[:9])
    inode = path.stat().st_ino
    assert cut_after(path, 4).removed == 2 and steps(path) == [1, 2, 3, 4]
    assert path.stat().st_ino == inode  # shortened in place: that needs no room on a full disk
    assert cut_after(path, 4) == record_file.Cut()
    path.write_text(
        line(1) + "\n\n" + line(9) + "\n" + line(2)
    )  # later ones in between, an editor's empty line and end
    assert cut_after(path, 4).removed == 1 and path.read_text() == line(1) + "\n" + line(2) + "\n"
    assert cut_after(tmp_path / "missing.jsonl", 2) == record_file.Cut()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("at", ["before the second name", "before the rename", "after the rename"])
def test_a_repair_that_is_killed_leaves_a_file_that_the_next_one_repairs(tmp_path: Path, at: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(before := line(1) + "\n{{{\n" + line(2) + "\n")
    child = os.fork()
    if child == 0:

        def kill(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if at == "before the second name":
            record_file.os.link = kill  # type: ignore[assignment]
        elif at == "before the rename":
            Path.replace = kill  # type: ignore[assignment, method-assign]
        else:
            replace = Path.replace
            Path.replace = lambda *a: kill(replace(*a))  # type: ignore[assignment, method-assign, misc]
        cut_after(path, 5)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    cut = cut_after(path, 5)
    assert steps(path) == [1, 2]
    assert cut.bad_lines == ([] if at == "after the rename" else [2])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.jsonl", "m.jsonl.damaged"]
    assert (tmp_path / "m.jsonl.damaged").read_text() == before


def test_a_file_system_without_second_names_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(record_file.os, "link", refuse)
    path = tmp_path / "m.jsonl"
    path.write_text(before := "nothing\n" + line(1) + "\n")
    cut = cut_after(path, 5)
    assert cut.kept_as is not None and cut.kept_as.read_text() == before and steps(path) == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        b"\0" * 5000,  # what a power cut leaves of pages that were not written
        b"[" * 20_000,
        b"null",
        b'{"kind": "step", "step": true}',
        b'{"kind": "step", "step": -1}',
        b'{"kind": "step", "step": "3"}',
        b'{"kind": 3, "step": 3}',
        b"\xff\xfe\x00",
    ],
)
def test_whatever_is_in_a_line_is_set_aside(tmp_path: Path, wrong: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(f"{line(1)}\n".encode() + wrong + f"\n{line(2)}\n".encode())
    assert cut_after(path, 9).bad_lines == [2] and steps(path) == [1, 2]


@pytest.mark.slow
def test_many_records_are_cut_in_seconds_and_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    tail = ', "tokens": 4096, "loss": 3.0625, "lr": 0.001, "grad_norm": 1.5, "tokens_per_second": 40000.0}\n'
    with path.open("w") as file:
        file.writelines(f'{{"kind": "step", "step": {step}{tail}' for step in range(200_000))
    began = time.process_time()
    assert cut_after(path, 100_000).removed == 99_999
    assert time.process_time() - began < 20  # less than a second on an idle core
    monkeypatch.setattr(record_file, "MAX_LINE", 2**16)
    damaged = path.read_bytes()[:2_000_000] + b"\n" + bytes(10 * 2**20) + b"\n" + line(7).encode() + b"\n"
    path.write_bytes(damaged)
    del damaged
    tracemalloc.start()
    cut = cut_after(path, 100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(cut.bad_lines) == 2 and peak < 2 * 2**20


def test_numbers_of_lines_are_short() -> None:
    assert (listed([3]), listed([3, 4, 5, 9])) == ("line 3", "lines 3-5, 9")
    assert listed(list(range(1, 100, 2))).endswith("15 and 42 more places")
