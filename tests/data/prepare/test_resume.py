"""Whatever ends a preparation, the same command goes on behind what was done, to the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data.prepare import prepare as ingest_module
from data.prepare import readers
from data.prepare.prepare import Options, WorkFolder, ingest
from data.prepare.readers import find_files, open_files
from data.prepare.tokenize import WorkerDied
from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from scripts import prepare_data
from tests.data.prepare.corpus import TEXTS, contents, json_lines

ROOT = Path(__file__).resolve().parents[3]
NAMES = [f"web{split}.{ending}" for split in ("", "_validation") for ending in ("bin", "idx", "json")]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer(TEXTS, 300)


@pytest.mark.slow
def test_a_kill_at_any_place_costs_no_byte(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [*TEXTS[:20], "long words " * 300, "", *TEXTS[20:40]])
    json_lines(tmp_path / "b.jsonl.zst", TEXTS[40:70])
    command = [sys.executable, str(ROOT / "tests/data/prepare/killed.py"), str(tmp_path), "1", "17"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    places, killed = map(int, result.stdout.split())
    expected = contents(tmp_path / "undisturbed")
    assert sorted(expected) == sorted([*NAMES, "tokenizer.json"])
    outputs = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "undisturbed"]
    assert places > 100 and len(outputs) == len(range(1, places, 17)) and killed >= len(outputs)
    for output in outputs:
        assert contents(output) == expected, output.name


CHILD = """
import os, signal, sys, time
from data.prepare import prepare as ingest, readers, prepare as work
from scripts import prepare_data
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the one that started the tests ignores
    ingest.SAVE_SECONDS = 0.0
    save = work.WorkFolder.save
    def save_and_wait(self):
        work.WorkFolder.save = save
        save(self)
        print("saved", flush=True)
        time.sleep(1000)
    work.WorkFolder.save = save_and_wait
    prepare_data.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the command", "all of it", "interrupt"])
def test_processes_die_with_the_command_and_leave_nothing(
    whom: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("temporary", "out", "undisturbed"):
        (tmp_path / folder).mkdir()
    json_lines(tmp_path / "a.jsonl", TEXTS * 400)
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "child.py").write_text(CHILD)
    command = ["--format", "json", "--files", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "t.json")]
    shared = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    child = subprocess.Popen(
        [sys.executable, "child.py", *command, "--workers", "2", "--output", str(tmp_path / "out" / "web")],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "saved\n"
    family = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and session_of(int(pid)) == child.pid]
    assert len(family) >= 3
    if whom == "all of it":
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.send_signal(signal.SIGKILL if whom == "the command" else signal.SIGINT)
    _, error = child.communicate()
    if whom == "interrupt":
        kept = f"what is done is kept in {tmp_path}/out/web.parts, the same command goes on behind it"
        assert error == f"prepare_data.py: interrupted; {kept}\n"
    wait_until(lambda: all(session_of(pid) != child.pid for pid in family))
    assert os.listdir(tmp_path / "temporary") == [] and set(os.listdir("/dev/shm")) <= shared
    assert os.listdir(tmp_path / "out") == ["web.parts"]
    assert json.loads((tmp_path / "out" / "web.parts" / "state.json").read_bytes())["tasks"] > 0

    read: list[int] = []
    add = WorkFolder.add
    monkeypatch.setattr(
        WorkFolder, "add", lambda self, part, tasks, encoded: (read.append(tasks), add(self, part, tasks, encoded))
    )
    assert prepare_data.main([*command, "--workers", "1", "--output", str(tmp_path / "out" / "web")]) == 0
    assert read[0] > 1, "it began anew"
    assert prepare_data.main([*command, "--workers", "3", "--output", str(tmp_path / "undisturbed" / "web")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def session_of(pid: int) -> int | None:
    """The session of a living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_process_is_told_and_the_work_goes_on(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "TASK_BYTES", 50_000)
    monkeypatch.setattr("data.prepare.readers.READ_BYTES", 20_000)
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS * 400)])
    before = len(multiprocessing.active_children())

    def kill(*_: object) -> None:
        for process in multiprocessing.active_children()[before:]:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    (tmp_path / "out").mkdir()
    with pytest.raises(
        WorkerDied, match=r"\(process \d+\) was ended by signal 9, often because the host had no memory"
    ):
        ingest(parts, tmp_path / "out" / "web", tokenizer, workers=2, progress=kill)
    assert os.listdir(tmp_path / "out") == []  # it came to nothing within SAVE_SECONDS
    for number in (0, 1, 3):
        ingest(parts, tmp_path / str(number) / "web", tokenizer, workers=number)
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "3")


class Ended(Exception):
    pass


@pytest.fixture
def begun(tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """A call of `ingest` on a corpus of which some tasks are done already."""
    monkeypatch.setattr(ingest_module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(readers, "TASK_BYTES", 500)
    monkeypatch.setattr("data.prepare.readers.READ_BYTES", 400)
    json_lines(tmp_path / "a.jsonl", TEXTS[:10])
    json_lines(tmp_path / "b.jsonl", TEXTS[10:])

    def call(options: Options | None = None, progress: object = None, **more: object) -> object:
        parts = open_files("json", find_files([str(tmp_path / "*.jsonl")]))
        chosen = more.pop("tokenizer", tokenizer)
        return ingest(parts, tmp_path / "web", chosen, options, progress=progress, **more)  # type: ignore[arg-type]

    def end(position: int, total: int, state: object) -> None:
        if position > total // 2:
            raise Ended

    with pytest.raises(Ended):
        call(progress=end)
    assert (tmp_path / "web.parts" / "state.json").is_file() and not (tmp_path / "web.idx").exists()
    return call


def test_other_options_do_not_go_on(begun: Callable[..., object], tmp_path: Path) -> None:
    for arguments, expected in (
        (
            {"options": Options(validation=0.5)},
            r"unfinished preparation with validation 0.01 instead of 0.5; give the same",
        ),
        ({"options": Options(eod=False)}, r"eod \[true, \"<\|endoftext\|>\"\] instead of \[false"),
        (
            {"source": {"field": "body"}},
            r'source field null instead of "body"; give the same to go on with it, or remove',
        ),
        ({"tokenizer": train_tokenizer(TEXTS, 299)}, r"tokenizer \{.*\.\.\. instead of"),
    ):
        with pytest.raises(ValueError, match=expected):
            begun(**arguments)
    assert (tmp_path / "web.parts" / "state.json").is_file()
    begun(Options(max_malformed=0.5))
    assert not (tmp_path / "web.parts").exists()


def test_inputs_that_changed_do_not_go_on(begun: Callable[..., object], tmp_path: Path) -> None:
    content = (tmp_path / "a.jsonl").read_bytes()
    stat = (tmp_path / "a.jsonl").stat()
    (tmp_path / "a.jsonl").write_bytes(content + b"\n")
    with pytest.raises(
        ValueError, match=r"a.jsonl has changed since it was prepared; remove .*web.parts to begin again"
    ):
        begun()
    (tmp_path / "a.jsonl").rename(tmp_path / "a0.jsonl")
    with pytest.raises(ValueError, match=r"a0.jsonl stands where .*a.jsonl was since it was prepared; remove"):
        begun()
    (tmp_path / "a0.jsonl").rename(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(content)
    os.utime(tmp_path / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    json_lines(tmp_path / "c.jsonl", ["one more"])  # behind what was read
    begun()
    assert (tmp_path / "web.idx").is_file()


def test_a_damaged_work_folder_is_told(begun: Callable[..., object], tmp_path: Path) -> None:
    work = tmp_path / "web.parts"
    os.truncate(work / "train.bin", 3)
    with pytest.raises(
        ValueError, match=r"train.bin has 3 bytes where \d+ were written; remove .*web.parts to begin again"
    ):
        begun()
    (work / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state.json is damaged \(.*\); remove .*web.parts to begin again"):
        begun()


def test_two_at_once_are_refused(begun: Callable[..., object], tmp_path: Path) -> None:
    def again(*_: object) -> None:
        with pytest.raises(ValueError, match=r"another command is preparing .*web right now; wait for it, or stop it"):
            begun()
        raise Ended

    with pytest.raises(Ended):
        begun(progress=again)


def test_what_appeared_meanwhile_is_not_overwritten(begun: Callable[..., object], tmp_path: Path) -> None:
    def appear(*_: object) -> None:
        (tmp_path / "web.bin").write_bytes(b"precious")

    with pytest.raises(FileExistsError, match=r"web.bin exists already"):
        begun(progress=appear)
    assert (tmp_path / "web.bin").read_bytes() == b"precious" and not (tmp_path / "web.idx").exists()
    (tmp_path / "web.bin").unlink()
    begun()
    assert (tmp_path / "web.idx").is_file() and not (tmp_path / "web.parts").exists()


def test_an_input_that_grows_meanwhile_is_told(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)

    def grow(*_: object) -> None:
        with path.open("a") as file:
            file.write('{"text": "more"}\n')

    with pytest.raises(ValueError, match=r"a.jsonl, or one read along with it, changed while it was read; start again"):
        ingest(open_files("json", [path]), tmp_path / "web", tokenizer, progress=grow)
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_nameless_files_only(tmp_path: Path) -> None:
    """What a huge document is written to has no name, so no kill leaves it behind."""
    with tempfile.TemporaryFile(dir=tmp_path):
        assert os.listdir(tmp_path) == []
