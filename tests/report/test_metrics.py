import json
import math
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

from assembly import CONFIGS
from megatron_fp4.config.compose import compose_config
from megatron_fp4.report import metrics as metrics_module
from megatron_fp4.report import record_file, wandb_view
from megatron_fp4.report.metrics import METRICS_FILE, MetricsWriter, StepMetrics, read_metrics
from megatron_fp4.report.run_log import RunLog
from megatron_fp4.report.tensorboard_view import TensorBoardView
from megatron_fp4.report.wandb_view import ID_FILE, WandbView, known_run_id


def metrics(step: int, loss: float = 3.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=step * 4096,
        loss=loss,
        lr=1e-3,
        grad_norm=1.5,
        tokens_per_second=40e3,
        model_tflops=0.02,
        step_time=0.1,
        skipped=skipped,
        phase="broad",
        plan="nvfp4",
        data_wait=0.01,
    )


def write(run_dir, start, end, **options):
    with MetricsWriter(run_dir, resume_step=start, **{"tensorboard": False, **options}) as writer:
        writer.run(start, total_steps=10)
        for step in range(start + 1, end + 1):
            writer.step(metrics(step, loss=10.0 - step))
    return writer


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


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_across_resumes(tmp_path):
    first = write(tmp_path, 0, 2, wandb_mode="offline")
    assert first.wandb_run_id
    second = write(tmp_path, 2, 4, wandb_mode="offline", wandb_run_id=first.wandb_run_id)
    assert second.wandb_run_id == first.wandb_run_id
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first.wandb_run_id}*"))) == 2


@pytest.mark.slow
def test_wandb_online_obeys_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(tmp_path, 0, 1, wandb_mode="online").wandb_run_id
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_wandb_is_not_imported_when_disabled(tmp_path):
    code = (
        "import sys; from megatron_fp4.report.metrics import MetricsWriter; "
        f"MetricsWriter({str(tmp_path)!r}, tensorboard=False).close(); "
        "sys.exit('wandb' in sys.modules or 'tensorboard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


SAMPLES = [{"prompt": "def", "text": " f(x):\n    é", "ended": False}, {"prompt": "", "text": None, "ended": False}]


def test_texts_are_recorded_and_shown(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsWriter(tmp_path, wandb_mode="online") as writer:
        writer.step(metrics(1))
        writer.texts(1, SAMPLES)
    assert read_metrics(tmp_path / METRICS_FILE)[-1] == {
        "kind": "event", "step": 1, "event": "text", "samples": SAMPLES,
    }  # fmt: skip
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (shown,) = board.Tensors("text/1/text_summary")
    # A code block of Markdown: the text as it is.
    assert shown.tensor_proto.string_val[0].decode() == "    def| f(x):\n        é" and shown.step == 1
    table = fake.values[-1]["text/samples"]
    assert table == (["prompt", "text", "ended"], [["def", " f(x):\n    é", False], ["", None, False]])
    with MetricsWriter(tmp_path / "other", active=False) as writer:
        writer.texts(1, SAMPLES)
    assert not (tmp_path / "other").exists()


class FakeWandb(types.ModuleType):
    """wandb as far as a run uses it. refuse: what `init` raises online. hangs: what of it does not come back until
    `back` is set. dies_at: the step in which its service dies, to be back after so many more tries."""

    def __init__(self, refuse: Exception | None = None, hangs: str = "", dies_at: int = 0, tries: int = 0) -> None:
        super().__init__("wandb")
        self.refuse, self.hangs, self.dies_at, self.tries = refuse, hangs, dies_at, tries
        self.starts, self.logged, self.values, self.told, self.keys = [], [], [], [], ["a key"]
        self.back = threading.Event()

    def Settings(self, **settings):
        return settings

    def login(self, prompt):
        assert not prompt, "would ask on the terminal"
        return bool(self.keys)

    def init(self, *, mode, dir, id, **rest):
        self.come_back("init")
        self.starts.append((mode, id, rest))
        if mode == "online" and self.refuse is not None:
            raise self.refuse
        return types.SimpleNamespace(
            id=id, dir=f"{dir}/wandb/{mode}-run-1-{id}/files", log=self.log, finish=partial(self.come_back, "finish")
        )

    def log(self, values, step):
        self.come_back("log")
        if self.tries and step >= self.dies_at:
            self.tries -= 1
            raise ConnectionResetError("Connection lost")
        self.logged.append(step)
        self.values.append(values)

    def Table(self, columns, data):
        return columns, data

    def teardown(self):
        raise ConnectionResetError("Connection lost")  # as the real one does once its service is gone

    def come_back(self, where):
        if self.hangs == where:
            self.back.wait(60)


@pytest.mark.parametrize("error", [TimeoutError("90 s"), RuntimeError("CommError:\nno route"), None])
def test_wandb_that_does_not_answer_is_offline_with_the_way_to_send_it(tmp_path, monkeypatch, caplog, error):
    fake = FakeWandb(refuse=error)
    if error is None:
        fake.keys.clear()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsWriter(tmp_path, tensorboard=False, wandb_mode="online", wandb_run_id="abc") as writer:
        writer.step(metrics(1))
    assert [mode for mode, *_ in fake.starts] == (["offline"] if error is None else ["online", "offline"])
    assert fake.logged == [1] and {run_id for _, run_id, _ in fake.starts} == {"abc"}
    assert fake.starts[0][2]["settings"]["init_timeout"] <= 90
    events = [record for record in read_metrics(tmp_path / METRICS_FILE) if record["kind"] == "event"]
    assert [event["event"] for event in events] == ["wandb_offline"]
    assert events[0]["reason"].endswith(f"send it later: wandb sync {tmp_path}/wandb/offline-run-1-abc")
    (said,) = [record.getMessage() for record in caplog.records]
    assert events[0]["reason"] in said and "\n" not in said
    assert ("no API key" in said) == (error is None)


@pytest.mark.slow
def test_the_real_wandb_without_its_server(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")  # for the look at the key, ten seconds by default
    monkeypatch.setattr(wandb_view, "INIT_SECONDS", 1)
    monkeypatch.setattr(wandb_view, "FINISH_SECONDS", 120.0)
    writer = write(tmp_path, 0, 2, wandb_mode="online", wandb_run_id="abc")
    assert writer.wandb_run_id == "abc"
    records = read_metrics(tmp_path / METRICS_FILE)
    (event,) = [record for record in records if record["kind"] == "event"]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abc")
    assert len(records) == 4 and event["event"] == "wandb_offline" and event["reason"].endswith(f"wandb sync {folder}")
    assert list(folder.glob("*.wandb"))


@pytest.mark.parametrize("tries", [1, 3])
def test_a_wandb_that_dies_in_between_is_started_again_and_gets_it_all(tmp_path, monkeypatch, caplog, tries):
    fake = FakeWandb(dies_at=3, tries=tries)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(metrics_module, "WandbView", partial(WandbView, retry_seconds=0.0))
    with MetricsWriter(tmp_path, tensorboard=False, wandb_mode="online") as writer:
        for step in range(1, 7):
            writer.step(metrics(step))
        while fake.tries:  # a run that ends meanwhile would not try again
            time.sleep(0.01)
    assert fake.logged == [1, 2, 3, 4, 5, 6]  # each once, in order
    assert len(fake.starts) == 1 + tries and len({run_id for _, run_id, _ in fake.starts}) == 1
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == list(range(1, 7))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "training goes on: wandb: ConnectionResetError" in said[0]
    assert "wandb works again" in said[1] and "all that waited" in said[1]


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (FakeWandb(hangs="init"), "wandb: 3 points not taken"),
        (FakeWandb(hangs="log"), "wandb: 3 points not taken"),
        (FakeWandb(hangs="finish"), "wandb: not everything was sent"),
        (FakeWandb(dies_at=2, tries=10**6), "wandb: 2 points not taken"),
    ],
)
def test_a_wandb_that_hangs_or_stays_away_delays_nothing_and_loses_no_record(tmp_path, monkeypatch, caplog, fake, said):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_view, "FINISH_SECONDS", 0.2)
    with MetricsWriter(tmp_path, tensorboard=False, wandb_mode="online") as writer:
        for step in range(1, 4):
            writer.step(metrics(step))
        began = time.monotonic()
    assert time.monotonic() - began < 30  # of which a hang would have had 60
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3]
    assert said in caplog.text and "metrics.jsonl has it all" in caplog.text
    folder = f"wandb sync {tmp_path}/wandb/online-run-1-{writer.wandb_run_id}"
    assert (folder in caplog.text) == (fake.hangs in ("log", "finish"))
    fake.back.set()


def test_a_run_that_is_told_to_stop_waits_less_for_wandb_and_says_in_one_line_how_it_stands(
    tmp_path, monkeypatch, caplog, capsys
):
    fake = FakeWandb(hangs="finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_view, "HURRY_SECONDS", 0.1)
    overrides = [f"run.dir={tmp_path}", "logging.tensorboard=false", "logging.wandb=online"]
    log = RunLog(compose_config(overrides, CONFIGS), active=True)
    log.open(0)
    with log:
        log.step(metrics(1), {})
        log.stop(1, "SIGTERM")
    assert "not everything was sent within 0 s" in caplog.text
    assert [record["kind"] for record in read_metrics(tmp_path / METRICS_FILE)] == ["run", "step", "event"]
    fake.back.set()

    capsys.readouterr()
    told = [
        (0, 6, "after step 6 of 300 on SIGTERM: saved step 6; the same command goes on"),
        (4, 4, "after step 4 of 300 on SIGTERM: nothing is new since step 4 was saved; the same command goes on"),
        (0, 0, "after step 0 of 300 on SIGTERM: there is nothing to save yet; the same command begins again"),
        (0, 300, "after step 300 of 300 on SIGTERM: saved step 300, but not its export, which the same command makes"),
    ]
    for start, step, line in told:
        log.stopped(start, step, "SIGTERM")
        assert capsys.readouterr().out == f"stopped {line}\n"


def test_what_waits_for_wandb_is_limited(tmp_path, monkeypatch, caplog):
    fake = FakeWandb(hangs="init")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_view, "_MOST_WAITING", 3)
    with MetricsWriter(tmp_path, tensorboard=False, wandb_mode="online") as writer:
        for step in range(1, 11):
            writer.step(metrics(step))
        fake.back.set()
    assert fake.logged[-3:] == [8, 9, 10] and len(fake.logged) <= 4 and "7 points not taken" in caplog.text


def test_a_wandb_that_cannot_even_start_offline_is_left_out(tmp_path, monkeypatch, caplog):
    fake = FakeWandb()
    fake.init = MagicMock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(metrics_module, "WandbView", partial(WandbView, retry_seconds=0.0))
    with MetricsWriter(tmp_path, tensorboard=False, wandb_mode="online", wandb_run_id="abc") as writer:
        writer.step(metrics(1))
    assert writer.wandb_run_id == "abc" and "training goes on: wandb" in caplog.text


def test_the_id_at_wandb_is_the_runs(tmp_path, monkeypatch):
    """Also where no checkpoint was made since it was given; a run that begins anew gets a new one."""
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    first = write(tmp_path, 0, 2, wandb_mode="online").wandb_run_id
    assert len(first) == 8 and (tmp_path / ID_FILE).read_text() == f"{first}\n"
    assert known_run_id(tmp_path, None) == known_run_id(tmp_path, "another") == first
    assert known_run_id(tmp_path / "no such run", "of_checkpoint") == "of_checkpoint"
    assert write(tmp_path, 2, 4, wandb_mode="online", wandb_run_id=first).wandb_run_id == first
    second = write(tmp_path, 0, 1, wandb_mode="online").wandb_run_id
    assert second != first and (tmp_path / f"{ID_FILE}.1").read_text() == f"{first}\n"
    write(tmp_path, 0, 1)
    assert known_run_id(tmp_path, None) is None
