"""What is written under another name: two commands, killed ones, and what is not ours."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exchange.new_folder import new_folder


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "far" / "out") as folder:
        (folder / "a").write_text("1")
        (folder / "sub").mkdir()
        assert not (tmp_path / "far" / "out").exists()
    (tmp_path / "far" / "out" / "sub").rmdir()
    assert content(tmp_path / "far" / "out") == {"a": "1"}
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["out"]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_two_commands_do_not_mix(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("first")
        with (
            pytest.raises(ValueError, match=r"another command is writing .*out\.tmp; wait"),
            new_folder(tmp_path / "out"),
        ):
            raise AssertionError
    assert content(tmp_path / "out") == {"a": "first"}
    with pytest.raises(ValueError, match="out exists already; name another"), new_folder(tmp_path / "out"):
        raise AssertionError


def test_a_name_that_was_taken_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out exists already"), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("late")
        (tmp_path / "out").mkdir()
    assert content(tmp_path / "out") == {} and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_command_left_is_replaced(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from exchange.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print("writing", flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        with pytest.raises(ValueError, match="another command is writing"), new_folder(tmp_path / "out"):
            raise AssertionError
        process.send_signal(signal.SIGKILL)
    assert content(tmp_path / "out.tmp")["half"] == "written"
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert content(tmp_path / "out") == {"a": "1"} and not (tmp_path / "out.tmp").exists()


def test_the_mark_of_a_run_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert content(tmp_path / "out") == {"a": "1"}


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "out.tmp"
    mine.mkdir()
    (mine / "thesis").write_text("years of work")
    if kind == "folder":
        mine.rename(other)
    elif kind == "file":
        other.write_text("years of work")
    else:
        other.symlink_to(mine)
    with pytest.raises(ValueError, match=r"out\.tmp is in the way"), new_folder(tmp_path / "out"):
        raise AssertionError
    assert (other if kind == "file" else other / "thesis").read_text() == "years of work"
