"""Records survive kills and full disks; files are replaced atomically."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config import errors
from megatron_fp4.logging import files
from megatron_fp4.logging.files import RecordFile, Transcript, cut_after, iterate_records, move_aside, replace_text


def line(step: int, **more: Any) -> str:
    return json.dumps({"kind": "step", "step": step, **more})


def steps(path: Path) -> list[int]:
    return [record["step"] for record in iterate_records(path)]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_of_records_that_is_replaced_or_removed_is_said_once(tmp_path: Path, caplog, replaced: bool) -> None:
    """An editor and rsync put a new file there, for example."""
    path = tmp_path / "records"
    file = RecordFile(path)
    for step in (1, 2, 3):
        file.write(line(step))
        if step < 3:
            (tmp_path / "new").write_text(f"{line(9)}\n")
            (tmp_path / "new").replace(path) if replaced else path.unlink()
    file.close()
    assert steps(path) == ([9, 3] if replaced else [3])
    assert caplog.text.count("was replaced or removed while the run writes it") == 1


def test_records_that_a_full_disk_refuses_are_written_later(tmp_path: Path, monkeypatch, caplog) -> None:
    """Also the rest of a line that was written in part. No line stays in a buffer, so a kill loses none."""
    real, room = os.write, [1000]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, bytes(data[: room[0]]))
        room[0] -= written
        return written

    monkeypatch.setattr(files.os, "write", write)
    file = RecordFile(tmp_path / "records")
    file.write(line(1))
    room[0] = 10
    for step in (2, 3):
        file.write(line(step))
    assert steps(tmp_path / "records") == [1] and file.outage.on
    room[0] = 1000
    file.write(line(4))
    assert steps(tmp_path / "records") == [1, 2, 3, 4]
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "No space left" in said[0] and "works again" in said[1]
    room[0] = 5
    file.write(line(5))
    room[0] = 1000
    file.close()  # as at the end of a run
    assert (tmp_path / "records").read_text() == "".join(f"{line(step)}\n" for step in range(1, 6))


def test_a_resume_cuts_later_steps_and_an_unfinished_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, late = tmp_path / "records", json.dumps({"kind": "event", "step": 3, "event": "export"})
    before = "\n".join([line(1), "not json", line(2), line(3), line(4), late, line(5), line(6)[:-3]])
    path.write_text(before)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # killed while it cuts
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        cut_after(path, 3)
    assert path.read_text() == before
    for _ in range(2):
        cut_after(path, 3)
        assert path.read_text() == "\n".join([line(1), "not json", line(2), line(3), late]) + "\n"
    assert [p.name for p in tmp_path.iterdir()] == ["records"]
    cut_after(tmp_path / "none", 3)


def test_invalid_lines_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records"
    bad = ["{", "[1]", "{}", '{"kind": "step", "step": true}', '{"kind": 1, "step": 1}', "\xff"]
    path.write_bytes("\n".join([line(1), *bad, "", line(2), line(3)[:9]]).encode("latin-1"))
    assert steps(path) == [1, 2]
    assert [record.args[1:] for record in caplog.records] == [(7, 2)]  # one warning for all
    path.write_text(f'{{"kind": "time", "step": 1}}\n{line(2)}\n')
    assert [record["step"] for record in iterate_records(path, "time")] == [1]


def test_files_are_replaced_atomically_and_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    replace_text(path, "old")
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        replace_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    monkeypatch.undo()
    assert move_aside(tmp_path / "none") is None
    for number in (1, 2):
        assert move_aside(path) == tmp_path / f"a.txt.{number}"
        path.write_text("again")


def test_the_transcript_hides_values_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret-value")
    monkeypatch.setattr(errors, "LOOKED_UP", {"TOKEN"})
    transcript = Transcript()
    transcript.text("Traceback: http://s3cret-value@host\x1b[2J\nend")
    transcript.open(tmp_path / "run.log")
    transcript.emit(logging.makeLogRecord({"msg": "again s3cret-value"}))
    written = (tmp_path / "run.log").read_text()
    assert written.count("${oc.env:TOKEN}") == 2 and "s3cret" not in written and "\x1b" not in written
