"""Exports beside a run, with a stand-in for the exporter: what is started when, what is left, what comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exchange import in_run
from exchange.export_process import OPTIONS, export_command
from exchange.in_run import Exports, check_exports, last_exportable
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import FileRecord, Manifest
from megatron_fp4.checkpoint.saves import SaveReport
from megatron_fp4.config.schema import CheckpointConfig, Config, ConfigError, RunConfig, TrainConfig
from megatron_fp4.runtime.progress import Progress
from scripts import export_hf
from tests.composing import composed, plans_of
from tests.training.harness import alone, launch

# Writes the output as an exporter does. Told by a file in the checkpoint to fail, or to wait until it is ended.
STAND_IN = """
import json, os, pathlib, sys, time
checkpoint, output, how = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
staging = output.with_name("model.tmp")
staging.mkdir()
facts = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_ADDR")}
facts |= {"nice": os.nice(0), "pid": os.getpid(), "how": how, "cwd": os.getcwd()}
(staging / "weights").write_text(json.dumps(facts))
if (checkpoint / "hang").exists():
    (checkpoint / "hang").write_text(str(os.getpid()))
    time.sleep(3600)
if (checkpoint / "wait").exists():
    while not (checkpoint / "go").exists():
        time.sleep(0.01)
if (checkpoint / "fail").exists():
    print("first line")
    sys.exit("export_hf.py: the disk is full")
staging.rename(output)
"""


def stand_in(checkpoint: Path, output: Path, export_format: str) -> list[str]:
    return ["python", "-c", STAND_IN, str(checkpoint), str(output), export_format]


class Log:
    """What a run's log is told."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.failed: dict[int, tuple[str, str]] = {}
        self.lines: list[str] = []
        self.console = self

    def exported(self, step: int, folder: Path, export_format: str, seconds: float) -> None:
        assert folder.is_dir() and seconds > 0
        self.done.append(step)

    def export_failed(self, step: int, error: str, command: str) -> None:
        self.failed[step] = error, command

    def text(self, line: str) -> None:
        self.lines.append(line)


class Job:
    """A start of a run of eight steps that exports every second checkpoint."""

    def __init__(self, run_dir: Path, active: bool = True, start: int = 0, **settings: Any) -> None:
        settings = {"export_interval": 2, "keep": 1, **settings}
        config = Config(
            run=RunConfig(dir=str(run_dir)), train=TrainConfig(steps=8), checkpoint=CheckpointConfig(**settings)
        )
        self.run_dir, self.log = run_dir, Log()
        self.exports = Exports(config, self.log, active, None, stand_in)  # type: ignore[arg-type]
        self.exports.begin(start)

    def save(self, step: int, told: str = "", error: str | None = None) -> Path:
        """A checkpoint of a step, and what follows a save; told: the name of a file in it."""
        root = self.run_dir / "checkpoints"
        folder = root / files.folder_name(step)
        self.exports.want(step)
        if error is None:
            folder.mkdir(parents=True)
            (folder / told).touch() if told else None
            manifest = Manifest(files.next_save_index(root), step, 0, 0, 1, {}, {"none": FileRecord(0, "")}, "2")
            files.write_manifest(folder, manifest)
            files.write_pointer(folder)
            files.prune(root, 1, just_made=folder, needed=self.exports.protected())
        self.exports.saved([SaveReport(step, folder, 1.0, 0.0, error)])
        return folder

    def until(self, condition: Callable[[], object]) -> None:
        """Steps of training, as many as it takes."""
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, (self.log.done, self.log.failed)
            self.exports.saved([])
            time.sleep(0.01)

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.run_dir / folder).iterdir())


def written(run_dir: Path, step: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run_dir / "exports" / files.folder_name(step) / "weights").read_text())
    return read


def test_a_checkpoint_is_kept_until_its_export_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path / "run")
    first = job.save(2, "wait")
    for step in (3, 4):
        job.save(step)
    assert job.names("checkpoints") == ["latest", "step_00000002", "step_00000004"] and job.log.done == []
    assert job.names("exports") == ["step_00000002.tmp", "step_00000004.tmp"]
    (first / "go").touch()
    job.until(lambda: job.log.done == [2, 4])
    assert job.names("exports") == ["step_00000002", "step_00000004"] and not job.exports.protected()
    job.save(5)
    assert job.names("checkpoints") == ["latest", "step_00000005"]
    facts = written(tmp_path / "run", 2)
    pid = facts.pop("pid")
    assert facts == {
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": None,
        "WORLD_SIZE": None,
        "MASTER_ADDR": None,
        "nice": 19,
        "how": "bf16",
        "cwd": str(tmp_path),
    }
    assert pid != os.getpid() and not job.log.failed


def test_one_is_written_and_one_waits(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    first = job.save(2, "wait")
    job.save(4)
    job.save(6)
    assert list(job.log.failed) == [4] and "exports take longer than checkpoint.export_interval" in job.log.failed[4][0]
    assert str(tmp_path / "run" / "exports" / "step_00000004") in job.log.failed[4][1]
    (first / "go").touch()
    job.until(lambda: job.log.done == [2, 6])
    assert job.names("exports") == ["step_00000002", "step_00000006"]


def test_what_fails_is_said_with_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save(2, "fail")
    job.until(lambda: job.log.failed)
    error, command = job.log.failed[2]
    assert error == "export_hf.py: the disk is full" and command.startswith("python -c ")
    assert job.names("exports") == [] and not job.exports.protected()
    job.save(4, error="the disk is full")  # a save of which nothing came: there is nothing to export
    job.save(6)
    job.until(lambda: job.log.done == [6])
    assert list(job.log.failed) == [2]


def test_no_room_for_the_folder_is_said_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exports").write_text("a file in its place")
    job = Job(tmp_path / "run")
    job.save(2)
    assert "exports" in job.log.failed[2][0] and not job.exports.protected()


def test_a_folder_that_cannot_be_read_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone looks there: an error of it would leave the others waiting."""
    job = Job(tmp_path / "run")
    (tmp_path / "run" / "exports").mkdir(parents=True)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    job.exports.begin(2)
    assert job.exports.lacking(2) == []


def test_another_checkpoint_of_the_same_step_is_exported_again(tmp_path: Path) -> None:
    """As after damage; what was there before keeps its files under another name."""
    job = Job(tmp_path / "run")
    folder = job.save(2)
    job.until(lambda: job.log.done == [2])
    before = written(tmp_path / "run", 2)
    assert Job(tmp_path / "run", start=2).exports.lacking(2) == []
    files.write_manifest(folder, replace(files.read_manifest(folder), save_index=9))
    job = Job(tmp_path / "run")
    assert job.exports.lacking(2) == ["its export of step 2"] and job.exports.lacking(1) == []
    job.exports.begin(2)
    job.until(lambda: job.log.done == [2])
    assert job.names("exports") == ["step_00000002", "step_00000002.1"]
    assert json.loads((tmp_path / "run" / "exports" / "step_00000002.1" / "weights").read_text()) == before
    assert written(tmp_path / "run", 2)["pid"] != before["pid"]


def test_an_export_by_hand_counts(tmp_path: Path) -> None:
    """It is what the line of a failed one offers."""
    job = Job(tmp_path / "run")
    job.save(2, "fail")
    job.until(lambda: job.log.failed)
    assert job.exports.lacking(2) == ["its export of step 2"]
    (tmp_path / "run" / "exports" / "step_00000002").mkdir()
    assert job.exports.lacking(2) == []


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_broken_off_has_no_name_and_is_made_again(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    folder = job.save(2, "hang")
    job.save(4)
    wait_for(lambda: (folder / "hang").read_text())
    with job.exports:
        pass
    assert job.exports.lacking(8) == ["its export of step 2", "its export of step 4"]
    assert gone(int((folder / "hang").read_text()))
    assert list(job.log.failed) == [2, 4] and "the next one makes it" in job.log.failed[2][0]
    assert job.names("exports") == ["step_00000002.tmp", "step_00000004.tmp"]
    assert job.names("exports/step_00000002.tmp") == []
    (folder / "hang").unlink()
    (tmp_path / "run" / "exports" / "step_00000003.tmp").mkdir()  # its checkpoint is gone
    again = Job(tmp_path / "run", start=5)
    assert again.exports.protected() == {"step_00000002", "step_00000004"}
    again.until(lambda: again.log.done == [2, 4])
    assert again.names("exports") == ["step_00000002", "step_00000004"]


def test_a_run_without_exports_clears_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "run" / "exports" / "step_00000002.tmp" / "model.tmp").mkdir(parents=True)
    job = Job(tmp_path / "run", export_interval=0)
    assert job.names("exports") == [] and not job.exports.enabled


KILLED = """
import sys
from pathlib import Path
from tests.exchange.test_in_run import Job, wait_for
job = Job(Path(sys.argv[1]))
folder = job.save(2, "hang")
wait_for(lambda: (folder / "hang").read_text())
print("written", flush=True)
wait_for(lambda: False)
"""


@pytest.mark.slow
def test_it_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "written\n"
    told = tmp_path / "run" / "checkpoints" / "step_00000002" / "hang"
    pid = int(told.read_text())
    assert not gone(pid)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: gone(pid))
    assert not (tmp_path / "run" / "exports" / "step_00000002").exists()
    told.unlink()
    again = Job(tmp_path / "run", start=2)
    again.until(lambda: again.log.done == [2])


def _ending(rank: int, run_dir: str, told: str, stop_rank: int) -> tuple[bool, bool, list[str], list[int]]:
    """The end of a run of eight steps on the ranks of a launch: (waited, said to be alive, lines, failed exports)."""
    job, progress = Job(Path(run_dir), active=rank == 0), Progress()
    if rank == 0:
        job.save(8, told)
    place, looks = progress.place, 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        if rank == 0 and told == "wait" and looks == 3:
            (Path(run_dir) / "checkpoints" / "step_00000008" / "go").touch()
        return rank == stop_rank and looks > 3

    waited = job.exports.finish(8, stop, torch.device("cpu"), progress)
    return waited, progress.place.since > place.since, job.log.lines, list(job.log.failed)


@pytest.mark.slow
def test_a_finished_run_waits_and_a_stop_on_any_rank_ends_that(tmp_path: Path) -> None:
    ranks = 2
    outcomes = launch(_ending, ranks, str(tmp_path / "waits"), "wait", -1, seconds=300.0)
    assert [outcome[:2] for outcome in outcomes] == [(True, True)] * ranks
    assert outcomes[0][2] == ["waiting for exports of steps: 8; a request to stop ends that"]
    assert (tmp_path / "waits" / "exports" / "step_00000008").is_dir()
    outcomes = launch(_ending, ranks, str(tmp_path / "stops"), "hang", ranks - 1, seconds=300.0)
    assert [outcome[0] for outcome in outcomes] == [False] * ranks and outcomes[0][3] == [8]
    assert [path.name for path in (tmp_path / "stops" / "exports").iterdir()] == ["step_00000008.tmp"]


def test_a_stop_waits_for_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save(2, "hang")
    with alone():
        assert not job.exports.finish(3, lambda: False, torch.device("cpu"), Progress())
    assert list(job.log.failed) == [2] and job.names("exports") == ["step_00000002.tmp"]


def config(*overrides: str) -> Config:
    return composed("train.steps=8", "model.nvfp4_bf16_blocks.last=1", *overrides)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_exports(config(*overrides), plans_of(config(*overrides)))
    assert "\n" not in str(error.value)
    return str(error.value)


EACH = "checkpoint.export_interval=2"
END = "checkpoint.export_at_end=true"
NVFP4 = "checkpoint.export_format=nvfp4"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], []),
        (["checkpoint.export_interval=3"], [3, 6]),
        ([END], [8]),
        (["checkpoint.export_interval=4", END], [4, 8]),
        ([EACH, NVFP4, "precision.switch.when=5"], [2, 4]),  # behind the switch there is no NVFP4 weight
        ([EACH, NVFP4, "precision.switch.when=5", "precision.switch.scope=backward"], [2, 4, 6, 8]),
        ([EACH, NVFP4, "precision.switch.when=8"], [2, 4, 6, 8]),
        ([EACH, END, NVFP4, "precision.switch.when=gradient_noise"], [2, 4, 6, 8]),
    ],
)
def test_which_checkpoints_are_due(overrides: list[str], steps: list[int]) -> None:
    whole = config(*overrides)
    plans = plans_of(whole)
    check_exports(whole, plans)
    exports = Exports(whole, Log(), True, last_exportable(whole, plans))  # type: ignore[arg-type]
    assert [step for step in range(9) if exports.due(step)] == steps


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.export_interval=9"], ["checkpoint.export_interval=9 does nothing", "give 8 or less"]),
        ([NVFP4], ["checkpoint.export_format=nvfp4 does nothing", "checkpoint.export_interval or"]),
        ([EACH, "model.rope=true"], ["checkpoint.export_interval=2: no architecture", "nothing to export"]),
        ([EACH, NVFP4, "precision=bf16"], ["no linear", "with NVFP4 weights", "checkpoint.export_format=bf16"]),
        ([END, NVFP4, "precision.switch.when=5"], ["step 8 is behind the precision switch (before step 6)"]),
        (["checkpoint.export_interval=6", NVFP4, "precision.switch.when=5"], ["step 6 is behind the precision switch"]),
    ],
)
def test_what_cannot_be_exported_is_refused_before_the_run(overrides: list[str], words: list[str]) -> None:
    line = refused(*overrides)
    assert all(word in line for word in words), line


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_run, "PACKAGE", "no_such_package")
    check_exports(config(), plans_of(config()))
    for override, remedy in ((EACH, "checkpoint.export_interval=0"), (END, "checkpoint.export_at_end=false")):
        line = refused(override)
        assert "megatron_fp4[hf]" in line and line.endswith(f"or set {remedy}")


def test_the_exporter_knows_every_format() -> None:
    formats = typing.get_args(typing.get_type_hints(CheckpointConfig)["export_format"])
    assert set(formats) == OPTIONS.keys()
    for name in formats:
        options = export_hf.parse(export_command(Path("checkpoint"), Path("output"), name)[2:])
        assert options.dtype == {"bf16": "bfloat16", "fp32": "float32"}.get(name)
        assert options.format == (name if name.startswith("nvfp4") else "hf")
