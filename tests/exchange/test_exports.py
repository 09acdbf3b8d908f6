"""Exports during a run: when they start, what they leave, and how failures are reported, with a stand-in for the
exporter; and pretrain.py with exports."""

import json
import os
import re
import shutil
import signal
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

import pretrain
from exchange import exports
from exchange.checkpoint import open_checkpoint
from exchange.exports import OPTIONS, Exports, last_exportable
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import SaveReport
from megatron_fp4.checkpoint.files import FileRecord, Manifest
from megatron_fp4.config.schema import CheckpointConfig, Config, ConfigError, RunConfig, TrainConfig
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.callbacks.reporting import Summary, next_steps
from scripts import convert
from tests.composing import composed, plans_of
from tests.distributed.one_rank import names
from tests.programs import Program, wait_until, wait_until_gone
from tests.spiked_run import FAST, printed_by, small_corpus
from tests.test_pretrain import SMALL, losses, records
from tests.training.harness import launch

COMMAND = exports.SCRIPT
# Writes an output as an exporter does. A file in the checkpoint makes it fail, wait, or hang until it is killed. Begins
# as each command of scripts/ does.
STAND_IN = """
import json, os, pathlib, time
checkpoint, output = map(pathlib.Path, sys.argv[2:4])
staging = output.with_name(f"{output.name}.tmp")
staging.mkdir(parents=True)
facts = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_ADDR")}
facts |= {"nice": os.nice(0), "pid": os.getpid(), "how": sys.argv[4:], "cwd": os.getcwd()}
(staging / "weights").write_text(json.dumps(facts))
if (checkpoint / "hang").exists():
    (checkpoint / "hang").write_text(str(os.getpid()))
    time.sleep(3600)
if (checkpoint / "wait").exists():
    while not (checkpoint / "go").exists():
        time.sleep(0.01)
if (checkpoint / "fail").exists():
    print("first line")
    sys.exit("convert.py export-hf: the disk is full")
staging.rename(output)
"""


def stand_in(folder: Path) -> Path:
    """Write the stand-in's script to `folder`."""
    begin = (COMMAND.parent / "_command.py").read_text().partition("annotations\n")[2].partition("sys.path.insert")[0]
    script = folder / "stand_in.py"
    script.write_text(begin + STAND_IN)
    return script


@pytest.fixture(autouse=True)
def no_exporter(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SCRIPT", stand_in(tmp_path_factory.mktemp("scripts")))


class Job:
    """A start of a run of eight steps that exports its checkpoints of even steps."""

    def __init__(self, run_dir: Path, rank: int = 0, start: int = 0) -> None:
        checkpoint = CheckpointConfig(export_interval=2, keep=1)
        config = Config(run=RunConfig(dir=str(run_dir)), train=TrainConfig(steps=8), checkpoint=checkpoint)
        mesh = SimpleNamespace(rank=rank, device=torch.device("cpu"))
        self.run_dir, self.exports, self.progress, self._log = run_dir, Exports(), Progress(), MagicMock()
        self.exports.trainer = MagicMock(config=config, mesh=mesh, log=self._log, progress=self.progress)
        self.exports.start(start)

    @property
    def done(self) -> list[int]:
        """The steps whose exports were logged as done."""
        return [call.args[0] for call in self._log.event.call_args_list if call.args[1] == "export"]

    @property
    def failed(self) -> dict[int, tuple[str, str]]:
        """By step: the logged error, and the command."""
        failed = [call for call in self._log.event.call_args_list if call.args[1] == "export_failed"]
        return {call.args[0]: (call.kwargs["error"], call.kwargs["command"]) for call in failed}

    def save(self, step: int, mode: str = "", error: str | None = None) -> Path:
        """Save a checkpoint and do what a run does after a save. mode: the name of a file for the stand-in."""
        root = self.run_dir / "checkpoints"
        folder = root / files.folder_name(step)
        self.exports.on_checkpoint(step)
        if error is None:
            folder.mkdir(parents=True)
            (folder / mode).touch() if mode else None
            manifest = Manifest(files.next_save_index(root), step, 0, 0, 1, {}, {"none": FileRecord(0, "")}, "2")
            files.write_manifest(folder, manifest)
            files.write_pointer(folder)
            files.prune(root, 1, just_made=folder, needed=self.exports.protected())
        self.exports.saved([SaveReport(step, folder, 1.0, 0.0, error)])
        return folder

    def until(self, condition: Callable[[], object]) -> None:
        """Call the exports' `saved` again and again, as the steps of a run do, until the condition holds."""
        wait_until(lambda: self.exports.saved([]) or condition())

    def names(self, folder: str) -> list[str]:
        return names(self.run_dir / folder)


def written(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / "exports" / name / "weights").read_text())


def test_a_checkpoint_is_kept_until_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    for name in ranks:
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path / "run")
    first = job.save(2, "wait")
    for step in (3, 4):
        job.save(step)
    assert job.names("checkpoints") == ["latest", "step_00000002", "step_00000004"] and job.done == []
    (first / "go").touch()
    job.until(lambda: job.done == [2, 4])
    assert job.names("exports") == ["step_00000002", "step_00000004"] and not job.exports.protected()
    job.save(5)
    assert job.names("checkpoints") == ["latest", "step_00000005"]
    facts = written(tmp_path / "run", "step_00000002")
    assert facts.pop("pid") != os.getpid() and not job.failed
    how = {"how": ["--dtype", "bfloat16", "--trust-config"], "cwd": str(tmp_path), "nice": min(19, os.nice(0) + 19)}
    assert facts == {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(ranks), **how}


def test_skipped_and_failed_exports_have_a_reason_and_exports_by_hand_count(tmp_path: Path) -> None:
    """One export runs, one waits, and a checkpoint that was waiting is skipped for a newer one."""
    job, run_dir = Job(tmp_path / "run"), tmp_path / "run"
    first = job.save(2, "wait")
    job.save(4)
    job.save(6, "fail")
    assert list(job.failed) == [4] and "exports take longer than checkpoint.export_interval" in job.failed[4][0]
    (first / "go").touch()
    job.until(lambda: 6 in job.failed)
    error, command = job.failed[6]
    assert error == "convert.py export-hf: the disk is full" and " export-hf " in command
    assert job.done == [2] and not job.exports.protected()
    assert "its export of step 6" in job.exports.lacking(6)
    (run_dir / "exports" / "step_00000006").mkdir()
    assert "its export of step 6" not in job.exports.lacking(6)
    job.save(8, error="the disk is full")  # a failed save: there is nothing to export
    assert not job.exports.protected() and list(job.failed) == [4, 6]


def test_a_new_checkpoint_of_the_same_step_is_exported_again(tmp_path: Path) -> None:
    """A step is saved again after damage, for example. The old export is kept under another name."""
    job = Job(tmp_path / "run")
    folder = job.save(2)
    job.until(lambda: job.done == [2])
    before = written(tmp_path / "run", "step_00000002")
    assert Job(tmp_path / "run", start=2).exports.lacking(2) == []
    files.write_manifest(folder, replace(files.read_manifest(folder), save_index=9))
    job = Job(tmp_path / "run")
    assert job.exports.lacking(2) == ["its export of step 2"] and job.exports.lacking(1) == []
    job.exports.start(2)
    job.until(lambda: job.done == [2])
    assert job.names("exports") == ["step_00000002", "step_00000002.1"]
    assert written(tmp_path / "run", "step_00000002.1") == before != written(tmp_path / "run", "step_00000002")


KILLED = """
import pathlib, sys, time
from exchange import exports
from tests.exchange.test_exports import Job
exports.SCRIPT = pathlib.Path(sys.argv[2])
Job(pathlib.Path(sys.argv[1])).save(2, "hang")
time.sleep(600)
"""


@pytest.mark.slow
def test_an_export_ends_with_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    job = Program([tmp_path / "killed.py", tmp_path / "run", exports.SCRIPT])
    hang = tmp_path / "run" / "checkpoints" / "step_00000002" / "hang"
    wait_until(lambda: hang.exists() and hang.read_text())
    job.send_signal(signal.SIGKILL)
    wait_until_gone([int(hang.read_text())])


def _stopped(rank: int, run_dir: str) -> tuple[bool, str, list[int]]:
    """Rank 1 is asked to stop while rank 0 exports: (whether `finish` waited to the end, the phase, failed steps)."""
    exports.SCRIPT = Path(run_dir).parent / "stand_in.py"
    job = Job(Path(run_dir), rank)
    if rank == 0:
        job.save(8, "hang")
    waited = job.exports.finish(8, lambda: rank == 1 and (Path(run_dir) / "exports" / "step_00000008.tmp").is_dir())
    return waited, job.progress.place.phase, list(job.failed)


@pytest.mark.slow
def test_a_stop_on_any_rank_ends_the_wait_for_exports(tmp_path: Path) -> None:
    stand_in(tmp_path)
    assert launch(_stopped, 2, str(tmp_path / "run")) == [(False, "export", [8]), (False, "export", [])]
    assert not list((tmp_path / "run").glob("exports/*"))  # on a busy machine there is not even the folder


EACH, NVFP4 = "checkpoint.export_interval=2", "checkpoint.export_format=nvfp4"
AT_5 = "precision.switch.when=5"


def config(*overrides: str) -> Config:
    return composed("train.steps=8", "model.nvfp4_bf16_blocks.last=1", *overrides)


def test_which_checkpoints_are_exported() -> None:
    """After a precision switch of the forward pass there are no NVFP4 weights."""
    for overrides, steps in (
        (["checkpoint.export_interval=3"], [3, 6]),
        ([EACH, NVFP4, AT_5], [2, 4]),
        ([EACH, NVFP4, AT_5, "precision.switch.scope=backward"], [2, 4, 6, 8]),
        ([EACH, NVFP4, "precision.switch.when=gradient_noise"], [2, 4, 6, 8]),
    ):
        whole = config(*overrides)
        exports = Exports(last_exportable(whole, plans_of(whole)))
        exports.trainer = MagicMock(config=whole)
        assert [step for step in range(9) if exports.due(step)] == steps


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.export_interval=9"], "checkpoint.export_interval=9 has no effect in a run of train.steps=8"),
        ([NVFP4], "export_format=nvfp4 does nothing without exports; give export_interval"),
        ([EACH, "model.rope=true"], "checkpoint.export_interval=2: transformers has no architecture"),
        (["checkpoint.export_interval=6", NVFP4, AT_5], "at step 6, comes after the precision switch"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_the_run(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        last_exportable(config(*overrides), plans_of(config(*overrides)))
    assert "\n" not in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], ["export-hf"]),
        (["model.moe_activation=swiglu"], ["export-megatron"]),
        (["model.moe_activation=swiglu", "model.moe_score=softmax"], []),
    ],
)
def test_a_finished_run_proposes_an_export_that_its_model_has(overrides: list[str], found: list[str]) -> None:
    config = composed("model=moe_tiny", *overrides)
    [summary] = [callback for callback in pretrain.callbacks_of(config) if isinstance(callback, Summary)]
    assert re.findall(r"export-\w+", "\n".join(next_steps(config, summary.export))) == found


def test_the_export_command_has_every_format_of_the_schema() -> None:
    assert set(typing.get_args(typing.get_type_hints(CheckpointConfig)["export_format"])) == OPTIONS.keys()
    for name, given in OPTIONS.items():
        options = convert.parse(["export-hf", "checkpoint", "output", *given])
        assert options.format == (name if name.startswith("nvfp4") else "hf")


FEW = [*SMALL, *FAST, "train.global_batch_size=2", "train.steps=4", "checkpoint.interval=0", "precision=bf16"]
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Start pretrain.py with overrides; it must end with `code`. Returns what it printed."""
    data = [*small_corpus(tmp_path), "precision.switch.when=never", f"run.dir={tmp_path / 'run'}"]
    return lambda *overrides, code=0: printed_by([*FEW, *data, *overrides], capsys, code)


@pytest.mark.slow
def test_every_export_has_its_checkpoint_and_its_record(start: Start, tmp_path: Path) -> None:
    run_dir, overrides = tmp_path / "run", [EACH, "checkpoint.keep=1"]
    start(*overrides)
    assert names(run_dir / "exports") == ["step_00000002", "step_00000004"]
    assert names(run_dir / "checkpoints") == ["latest", "step_00000004"]
    assert [event["step"] for event in records(run_dir, "checkpoint")] == [2, 4]  # step 2 was saved for its export
    found = [(event["step"], event["path"], event["format"]) for event in records(run_dir, "export")]
    assert found == [(step, str(run_dir / "exports" / f"step_0000000{step}"), "bf16") for step in (2, 4)]
    assert json.loads((run_dir / "summary.json").read_text())["exported as"] == "exports/step_00000004"

    assert "is finished" in (printed := start(*overrides)) and "lacks" not in printed
    shutil.rmtree(run_dir / "exports" / "step_00000004")
    assert "lacks its export of step 4; writing it now" in start(*overrides)
    assert names(run_dir / "exports") == ["step_00000002", "step_00000004"] and len(losses(run_dir)) == 4


@pytest.mark.slow
def test_a_stop_ends_the_wait_and_the_next_start_exports(start: Start, tmp_path: Path, monkeypatch) -> None:
    """The second start uses the real command. test_hf.py reads such folders in transformers."""
    run_dir, stopping = tmp_path / "run", tmp_path / "stopping.py"
    end = ["checkpoint.export_interval=4", "checkpoint.export_format=fp32"]
    stop = f"from pathlib import Path\nPath({str(run_dir / 'STOP')!r}).touch()\nPath(sys.argv[2], 'hang').touch()\n"
    stopping.write_text(exports.SCRIPT.read_text().replace("import json", f"{stop}import json", 1))
    monkeypatch.setattr(exports, "SCRIPT", stopping)
    assert "aborted because this start ends" in start(*end, code=75) and not (run_dir / "STOP").exists()
    assert not [*run_dir.glob("exports/*"), *run_dir.glob("summary.json")]  # perhaps there is not even the folder
    assert json.loads((run_dir / "state.json").read_text())["state"] == "stopped"
    assert [event["step"] for event in records(run_dir, "export_failed")] == [4]

    (run_dir / "checkpoints" / "step_00000004" / "hang").unlink()
    monkeypatch.setattr(exports, "SCRIPT", COMMAND)
    assert "lacks its export of step 4" in start(*end)
    folder = run_dir / "exports" / "step_00000004"
    exported, source = load_file(folder / "model.safetensors"), open_checkpoint(run_dir, pretrain.CONFIGS)
    assert torch.equal(exported["backbone.embeddings.weight"], source.tensor("embedding.weight"))
    assert sum(value.numel() for value in exported.values()) == sum(shape.numel() for shape in source.tensors.values())
    assert json.loads((folder / "made_from.json").read_text())["step"] == 4 and (run_dir / "summary.json").exists()
