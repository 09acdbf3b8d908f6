import json
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

from megatron_fp4.logging import metrics as metrics_module
from megatron_fp4.logging import record_file
from megatron_fp4.logging.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_fp4.logging.tensorboard_view import TensorBoardView
from tests.logging.written import metrics, write


def test_every_line_is_an_object_of_its_kind(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.run(0, total_steps=10, decay_start=8)
        writer.step(replace(metrics(1), epochs={"code": 0.5}))
        writer.validation(1, 4096, {"code": 2.0, "prose": 4.0})
        writer.event(1, "switch", target="bf16")
        # Flushed a line at a time: everything is readable before the file is closed.
        records = read_metrics(tmp_path / METRICS_FILE)
    assert [record["kind"] for record in records] == ["run", "step", "validation", "event"]
    assert records[0] == {"kind": "run", "step": 0, "total_steps": 10, "decay_start": 8}
    assert set(records[1]) == {"kind", *vars(metrics(1))} - {"mfu", "peak_memory_gib"} and records[1]["epochs"] == {
        "code": 0.5
    }
    assert records[2] == {
        "kind": "validation",
        "step": 1,
        "tokens": 4096,
        "loss": 3.0,
        "losses": {"code": 2.0, "prose": 4.0},
    }
    assert records[3] == {"kind": "event", "step": 1, "event": "switch", "target": "bf16"}


def test_bits_per_byte_where_they_are_known(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.validation(1, 4096, {"code": 2.0, "prose": 4.0}, {"code": 0.75})
        writer.validation(2, 8192, {"code": 2.0, "prose": 4.0}, {})
    first, second = read_metrics(tmp_path / METRICS_FILE)
    assert first["bits_per_byte"] == {"code": 0.75} and first["losses"] == second["losses"]
    assert "bits_per_byte" not in second


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.step(metrics(1, loss=math.nan, skipped=True))
        writer.validation(1, 4096, {"code": math.inf})
        writer.event(1, "skip", norms=[math.nan, 1.0], nested={"loss": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    step, validation, event = (json.loads(line, parse_constant=refuse) for line in lines)
    assert step["loss"] is None
    assert step["skipped"] is True
    assert validation["losses"] == {"code": None}
    assert (event["norms"], event["nested"]) == ([None, 1.0], {"loss": None})


def test_resume_has_each_step_once(tmp_path):
    write(tmp_path, 0, 6)
    write(tmp_path, 4, 8)
    records = read_metrics(tmp_path / METRICS_FILE)
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 9))
    assert [record["step"] for record in records if record["kind"] == "run"] == [0, 4]


def test_resume_removes_the_line_that_a_kill_left_unfinished(tmp_path):
    write(tmp_path, 0, 6)
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-25])
    assert read_metrics(path)[-1]["step"] == 5
    write(tmp_path, 5, 7)
    assert [record["step"] for record in read_metrics(path) if record["kind"] == "step"] == list(range(1, 8))


def test_lines_that_are_no_records_are_set_aside_and_the_resume_goes_on(tmp_path, caplog):
    write(tmp_path, 0, 6)
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [
        *lines[:2],
        b'{"kind": "st\n',  # after step 1, line 3
        b"[1, 2]\n",
        b'{"kind": "step", "loss": 1.0}\n',
        lines[2],
        b'{"kind": "step", "step": 2, "phase": "\xff\xfe"}\n',  # line 7
        *lines[3:],
    ]
    path.write_bytes(before := b"".join(damaged))
    with caplog.at_level("WARNING"):
        write(tmp_path, 4, 8)
    records = read_metrics(path)
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 9))
    (event,) = [record for record in records if record["kind"] == "event"]
    assert event == {
        "kind": "event",
        "step": 4,
        "event": "metrics_repaired",
        "count": 4,
        "lines": "lines 3-5, 7",
        "kept_as": "metrics.jsonl.damaged",
    }
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    (said,) = [record.getMessage() for record in caplog.records]
    assert "lines 3-5, 7 are no record" in said and str(tmp_path / "metrics.jsonl.damaged") in said
    # Once more: another file beside the first one, which stays.
    path.write_bytes(b"not JSON\n" + path.read_bytes())
    write(tmp_path, 8, 9)
    assert [record["step"] for record in read_metrics(path) if record["kind"] == "step"] == list(range(1, 10))
    assert (tmp_path / "metrics.jsonl.damaged.1").read_bytes().startswith(b"not JSON\n")
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before


def test_a_run_starts_although_its_records_cannot_be_cut(tmp_path, monkeypatch, caplog):
    write(tmp_path, 0, 6)
    path = tmp_path / METRICS_FILE
    real, refused = metrics_module.cut_after, []

    def cut_after(*arguments):
        if len(refused) < 2:
            refused.append(1)
            raise OSError(30, "Read-only file system")
        return real(*arguments)

    monkeypatch.setattr(metrics_module, "cut_after", cut_after)
    monkeypatch.setattr(metrics_module, "RecordFile", partial(record_file.RecordFile, retry_seconds=0.0))
    write(tmp_path, 4, 7)
    assert [record["step"] for record in read_metrics(path) if record["kind"] == "step"] == list(range(1, 8))
    assert "LOGGING FAILED, training goes on" in caplog.text and "nothing is lost" in caplog.text


def test_readers_leave_damaged_lines_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st\n\n{"step": 2}\n{"kind": "step", "step": 3}\n{"kin')
    with caplog.at_level("WARNING"):
        assert [record["step"] for record in read_metrics(path)] == [1, 3]
    assert "lines 2, 4 left out: no record (not JSON, without a kind)" in caplog.text


def test_a_fresh_start_moves_an_earlier_runs_records_aside(tmp_path):
    for end in (2, 3, 4):
        write(tmp_path, 0, end, tensorboard=True)
    assert [len(read_metrics(tmp_path / name)) for name in ("metrics.jsonl.1", "metrics.jsonl.2", METRICS_FILE)] == [
        3,
        4,
        5,
    ]
    assert (tmp_path / "tensorboard.1").is_dir()


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", wandb_mode="offline", active=False) as writer:
        writer.run(0)
        writer.step(metrics(1))
        writer.validation(1, 1, {"code": 1.0})
        writer.event(1, "switch")
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_numbers_and_hides_what_resume_cut(tmp_path, monkeypatch):
    # Its files are read in the order of their names, which have a second and a count: starts of a run differ in the
    # second, these two in the count, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    write(tmp_path, 0, 6, tensorboard=True)
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.step(metrics(5, loss=1.0))
        writer.validation(5, 5 * 4096, {"code": 2.5})
        writer.event(5, "switch", target="bf16")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (4, 6.0),
        (5, 1.0),
    ]
    assert [event.value for event in events.Scalars("loss/validation_code")] == [2.5]
    assert [event.value for event in events.Scalars("loss/validation")] == [2.5]


def test_curves_are_in_a_few_groups(tmp_path):
    """What TensorBoard reads back of a run that shows all that there is; both make a group of a name's first part."""
    with MetricsWriter(tmp_path) as writer:
        writer.step(replace(metrics(1), epochs={"code": 0.5, "prose": 0.25}, mfu=0.4, peak_memory_gib=61.5))
        writer.validation(1, 4096, {"code": 2.0, "prose": 4.0}, {"code": 0.75})
        writer.record(1, "diagnostics", {"linears": {}}, {"quantization_error/wgrad_worst": 0.125})
    (record, *_) = read_metrics(tmp_path / METRICS_FILE)
    assert (record["mfu"], record["peak_memory_gib"]) == (0.4, 61.5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    assert {name.partition("/")[0] for name in shown} == {
        "loss", "bits_per_byte", "optimizer", "speed", "memory", "data", "quantization_error",
    }  # fmt: skip
    expected = {
        "loss/train": 3.0,
        "loss/validation": 3.0,
        "loss/validation_prose": 4.0,
        "bits_per_byte/code": 0.75,
        "optimizer/skipped": 0.0,
        "speed/mfu": 0.4,
        "memory/peak_gib": 61.5,
        "data/epochs_prose": 0.25,
        "quantization_error/wgrad_worst": 0.125,
    }
    assert {name: shown[name] for name in expected} == pytest.approx(expected)


def test_a_tensorboard_that_fails_is_said_once_and_begun_again(tmp_path, monkeypatch, caplog):
    """What the disk refused in TensorBoard's own thread comes up at a later call."""
    broken, failures = [True], []
    real = SummaryWriter.add_scalar

    def add_scalar(self, *arguments, **keywords):
        if broken[0]:
            failures.append(1)
            raise OSError(28, "No space left on device")
        real(self, *arguments, **keywords)

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    monkeypatch.setattr(metrics_module, "TensorBoardView", partial(TensorBoardView, retry_seconds=0.0))
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.step(metrics(step))
        broken[0] = False
        for step in (4, 5):
            writer.step(metrics(step, loss=0.5))
    assert len(failures) == 3
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3, 4, 5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "LOGGING FAILED, training goes on: TensorBoard" in said[0] and "works again" in said[1]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [(4, 0.5), (5, 0.5)]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("wandb", {"wandb_mode": "offline", "tensorboard": False}, r"logging.wandb=offline .* pip install .*\[wandb\]"),
        ("torch.utils.tensorboard", {}, "logging.tensorboard=true .* pip install tensorboard"),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch, module, options, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        MetricsWriter(tmp_path, **options)
