import subprocess
import sys
import threading
import time
import types
from functools import partial
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from assembly import CONFIGS
from megatron_fp4.config.compose import compose_config
from megatron_fp4.logging import metrics as metrics_module
from megatron_fp4.logging import wandb_view
from megatron_fp4.logging.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_fp4.logging.run_log import RunLog
from megatron_fp4.logging.wandb_view import ID_FILE, WandbView, known_run_id
from tests.logging.written import metrics, write


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
        "import sys; from megatron_fp4.logging.metrics import MetricsWriter; "
        f"MetricsWriter({str(tmp_path)!r}, tensorboard=False).close(); "
        "sys.exit('wandb' in sys.modules or 'tensorboard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
