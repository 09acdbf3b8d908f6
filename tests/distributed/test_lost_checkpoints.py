"""A run whose checkpoints are gone does not begin again in silence. One rank, in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.parallel.mesh import ParallelMesh
from tests.distributed.one_rank import Job, flip_a_bit, names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]


def records(run_dir: Path, *lines: dict[str, Any] | str) -> None:
    run_dir.mkdir(exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run_dir / "metrics.jsonl").write_text("\n".join(text))


BEGUN, STEP = {"kind": "run", "step": 0}, {"kind": "step", "step": 7, "loss": 3.0}
SAVED = {"kind": "event", "event": "checkpoint", "step": 7}


@pytest.mark.parametrize("resume", ["auto", "branch"])
@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([BEGUN, STEP, SAVED, SAVED], r"metrics\.jsonl has 7 steps, and 2 checkpoints saved"),
        ([BEGUN, "garbage", "[1]", STEP, SAVED, '{"kind": "st'], r"7 steps, and 1 checkpoint saved"),
        ([{"kind": "run", "step": 4}, STEP], r"metrics\.jsonl has a start from step 4"),
        ("summary.json", r"summary\.json says that it was finished"),
        ("checkpoints/latest", r"latest names step_00000007"),
        ("checkpoints/step_00000003.damaged.1", r"moved aside: step_00000003\.damaged\.1"),
    ],
)
def test_a_run_that_lost_its_checkpoints_is_refused(
    root: Path, tmp_path: Path, mesh: ParallelMesh, lines: Any, found: str, resume: str
) -> None:
    run_dir = tmp_path / "lost"
    if isinstance(lines, list):
        records(run_dir, *lines)
    elif "damaged" in lines:
        (run_dir / lines).mkdir(parents=True)
    else:
        (run_dir / lines).parent.mkdir(parents=True)
        (run_dir / lines).write_text("step_00000007\n")
    job = Job(run_dir / "checkpoints", mesh)
    if resume == "branch" and "start from" in found:
        assert job.resume(str(root / "step_00000003")) == 3  # where every start of it begins
        return
    with pytest.raises(ValueError, match=found) as caught:
        job.resume("auto" if resume == "auto" else str(root / "step_00000003"))
    assert "choose another run.dir" in str(caught.value) and "\n" not in str(caught.value)
    assert ("checkpoint.resume=never" in str(caught.value)) == (resume == "auto")
    assert job.resume("never") is None


def test_killed_before_the_first_checkpoint(
    tmp_path: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    records(tmp_path, BEGUN, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None
    assert "made 7 steps and no checkpoint; beginning at step 0 again" in caplog.text
    # And in the place of one that was given up by checkpoint.resume=never.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000900\n")
    records(tmp_path, {**BEGUN, "resume": "never"}, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None


def test_never_silently_from_the_start(root: Path, mesh: ParallelMesh) -> None:
    for step in (1, 2, 3):
        flip_a_bit(root / f"step_0000000{step}" / "__0_0.distcp")
    before = names(root)
    with pytest.raises(ValueError, match=r"none is whole.*step_00000001.*another run\.dir"):
        Job(root, mesh).resume()
    assert names(root) == before
    assert Job(root, mesh).resume("never") is None


def test_pointer_to_nothing_is_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    (tmp_path / "latest").write_text("step_00000700\n")
    with pytest.raises(ValueError, match="latest names step_00000700"):
        Job(tmp_path, mesh).resume()


def test_a_newest_one_that_was_taken_away_is_said(
    root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(root / "step_00000003")
    assert Job(root, mesh).resume() == 2
    assert "latest names step_00000003, which is not there" in caplog.text
