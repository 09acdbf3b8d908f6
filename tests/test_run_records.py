"""The records of a whole run: synced before checkpoints, without values of environment variables, with step times."""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import pretrain
from data.order import SampleSource
from megatron_fp4.checkpoint import files
from megatron_fp4.logging import page, pictures
from megatron_fp4.logging.files import REPORT_FILE
from tests.test_pretrain import SMALL, records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[SimpleNamespace]:
    """A run of four steps. Its disk refuses one record, its picture and page fail, and its samples are slow.

    published: for each checkpoint its step, and the steps whose records were on the disk before it was published.
    """
    folder = tmp_path_factory.mktemp("records")
    copy = Path(shutil.copytree(corpus, folder / "s3cret-corpus"))
    done = SimpleNamespace(folder=folder / "run", corpus=copy, published=[], refused=0)
    path, on_disk = done.folder / "metrics.jsonl", [0]
    real_sync, real_publish, real_write, real_sample = os.fsync, files.publish, os.write, SampleSource.sample

    def fsync(descriptor: int) -> None:
        real_sync(descriptor)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            on_disk[0] = os.fstat(descriptor).st_size

    def publish(staging: Path, final: Path) -> None:
        lines = map(json.loads, path.read_bytes()[: on_disk[0]].splitlines())
        steps = [record["step"] for record in lines if record["kind"] == "step"]
        done.published.append((files.step_of(final), steps))
        real_publish(staging, final)

    def write(descriptor: int, data: bytes) -> int:
        if b'"kind": "step", "step": 3' in data and not done.refused:
            done.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    def plot(*_: object) -> None:
        raise RuntimeError("no font")

    def sample(*arguments: Any) -> Any:
        time.sleep(0.02)
        return real_sample(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_CORPUS", str(copy))
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "write", write)
        patch.setattr(files, "publish", publish)
        patch.setattr(pictures, "plot_loss", plot)
        patch.setattr(page, "write_report", plot)
        patch.setattr(SampleSource, "sample", sample)
        overrides = ["train.steps=4", "precision=bf16", "model.pattern=*-", "data.num_workers=0"]
        overrides += ["validation.interval=0", "validation.num_samples=2", "data.cache_dir=${oc.env:MY_CORPUS}"]
        overrides += ["logging.report=true"]
        assert pretrain.main([*SMALL, *overrides, f"run.dir={done.folder}"]) == 0
        yield done


def test_no_file_has_the_value_of_an_environment_variable(done: SimpleNamespace) -> None:
    made = [path for path in done.folder.rglob("*") if path.is_file()]
    assert len(made) > 20
    assert not [str(path) for path in made if str(done.corpus).encode() in path.read_bytes()]
    saved = json.loads((done.folder / "checkpoints" / "step_00000004" / "trainer.json").read_text())["config"]
    written = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert saved["data"]["cache_dir"] == written["data"]["cache_dir"] == "${oc.env:MY_CORPUS}"


def test_records_are_on_the_disk_before_the_checkpoint(done: SimpleNamespace) -> None:
    """The run ends with exit code 0, though its disk refused a record and its picture and page failed."""
    assert [step for step, _ in done.published] == [1, 2, 3, 4] and done.refused == 1
    assert all(steps[:step] == list(range(1, step + 1)) for step, steps in done.published)
    assert [record["step"] for record in records(done.folder, "step")] == [1, 2, 3, 4]
    assert json.loads((done.folder / "summary.json").read_text())["finished"]
    assert not (done.folder / "loss.png").exists() and not (done.folder / REPORT_FILE).exists()


def test_step_times_include_the_wait_for_data(done: SimpleNamespace) -> None:
    for step in records(done.folder, "step"):
        assert step["step_time"] >= step["data_wait"] >= 8 * 0.02
        assert step["tokens_per_second"] == pytest.approx(8 * 64 / step["step_time"])
