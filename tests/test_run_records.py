"""What a whole run leaves on the disk: in time, for whom it should, and without what came from the environment."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain
from megatron_fp4.checkpoint import files
from megatron_fp4.logging import files as record_file
from megatron_fp4.logging import pictures as report_plot
from megatron_fp4.logging.metrics import read_metrics
from tests.test_pretrain import SMALL, run

pytestmark = pytest.mark.slow

TINY = [
    *SMALL,
    "train.steps=4",
    "precision=bf16",
    "model.pattern=*-",
    "validation.interval=0",
    "validation.num_samples=2",
]


def test_no_value_of_the_environment_is_in_the_folder(tmp_path: Path, corpus: Path, monkeypatch: Any) -> None:
    """Two ranks with a loader worker each, and wandb."""
    corpus = Path(shutil.copytree(corpus, tmp_path / "s3cret-corpus"))
    monkeypatch.setenv("MY_CORPUS", str(corpus))
    folder = tmp_path / "run"
    overrides = [
        *TINY,
        "data.cache_dir=${oc.env:MY_CORPUS}",
        "data.num_workers=1",
        "logging.wandb=offline",
        f"run.dir={folder}",
    ]
    run(2, overrides)
    made = [folder, *folder.rglob("*")]
    assert len(made) > 20
    with_it = [str(path) for path in made if path.is_file() and str(corpus).encode() in path.read_bytes()]
    assert not with_it
    saved = json.loads((folder / "checkpoints" / "step_00000004" / "trainer.json").read_text())["config"]
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["data"]["cache_dir"] == written["data"]["cache_dir"] == "${oc.env:MY_CORPUS}"


def test_records_are_on_the_disk_before_a_checkpoint_is(tmp_path: Path, corpus: Path, monkeypatch: Any) -> None:
    """And neither a disk that refuses records for a while nor a picture that fails costs the run its exit code."""
    path, on_disk, refused = tmp_path / "run" / "metrics.jsonl", [0], []
    real_sync, real_publish, real_write = os.fsync, files.publish, os.write
    published: list[int] = []

    def fsync(descriptor: int) -> None:
        real_sync(descriptor)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            on_disk[0] = os.fstat(descriptor).st_size

    def publish(staging: Path, final: Path) -> None:
        step = files.step_of(final)
        lines = path.read_bytes()[: on_disk[0]].splitlines()
        steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]
        assert steps[:step] == list(range(1, step + 1))
        published.append(step)
        real_publish(staging, final)

    def write(descriptor: int, data: bytes) -> int:
        if b'"kind": "step", "step": 3' in data and not refused:
            refused.append(3)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    def plot(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(record_file.os, "fsync", fsync)
    monkeypatch.setattr(record_file.os, "write", write)
    monkeypatch.setattr(files, "publish", publish)
    monkeypatch.setattr(report_plot, "plot_loss", plot)
    arguments = [*TINY, f"data.cache_dir={corpus}", f"run.dir={tmp_path / 'run'}", "data.num_workers=0"]
    assert pretrain.main(arguments) == 0
    assert published == [1, 2, 3, 4] and refused == [3]
    assert [record["step"] for record in read_metrics(path) if record["kind"] == "step"] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    assert not (tmp_path / "run" / "loss.png").exists()
