"""The records of a run; TensorBoard and wandb, also when they fail; and how the wall time is accounted for."""

import json
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, LoggingConfig, RunConfig
from megatron_fp4.logging import metrics as module
from megatron_fp4.logging import run_log
from megatron_fp4.logging.files import cut_after, iterate_records
from megatron_fp4.logging.metrics import ID_FILE, MetricsWriter, StepMetrics, known_run_id, last_validation
from megatron_fp4.logging.run_folder import read_records
from megatron_fp4.logging.run_log import RunLog, TimeLedger, goodput_of
from pretrain import CONFIGS
from tests.programs import wait_until

SAMPLES = [{"prompt": "def", "text": " f(x):\n    é", "ended": False}, {"prompt": "", "text": None, "ended": False}]


def metrics(step: int, loss: float = 3.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step, tokens=step * 4096, loss=loss, lr=1e-3, grad_norm=1.5, tokens_per_second=40e3, model_tflops=0.02,
        step_time=0.1, skipped=skipped, phase="broad", plan="nvfp4", data_wait=0.01,
    )  # fmt: skip


@contextmanager
def writing(run_dir: Path, start: int = 0, active: bool = True, **settings: Any) -> Iterator[MetricsWriter]:
    """A writer of a run with these `logging` settings; TensorBoard is off by default."""
    logging = LoggingConfig(**{"tensorboard": False, **settings})
    with closing(MetricsWriter(Config(run=RunConfig(dir=str(run_dir)), logging=logging), start, active)) as writer:
        yield writer


def write(run_dir: Path, start: int, end: int, **settings: Any) -> None:
    """Write records of the steps from `start` + 1 to `end`."""
    with writing(run_dir, start, **settings) as writer:
        writer.record(start, "run", {"total_steps": 10})
        for step in range(start + 1, end + 1):
            writer.step(metrics(step, loss=10.0 - step))


def board(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_records_of_every_kind(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.record(0, "run", {"steps": 10})
        writer.step(metrics(1, loss=math.nan, skipped=True))
        writer.record(1, "gradient_noise", {"ratio": 2.0})
        writer.event(1, "switch", target="bf16")
        writer.texts(1, SAMPLES)
    run, step, noise, event, text = read_records(tmp_path / "run")
    assert run == {"kind": "run", "step": 0, "steps": 10}
    assert step == {
        "kind": "step", "step": 1, "tokens": 4096, "loss": None, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_second": 4e4,
        "model_tflops": 0.02, "step_time": 0.1, "skipped": True, "phase": "broad", "plan": "nvfp4", "data_wait": 0.01,
    }  # fmt: skip
    assert noise == {"kind": "gradient_noise", "step": 1, "ratio": 2.0}
    assert event == {"kind": "event", "step": 1, "event": "switch", "target": "bf16"}
    assert text == {"kind": "event", "step": 1, "event": "text", "samples": SAMPLES}
    with writing(tmp_path / "other", active=False) as writer:
        writer.texts(1, SAMPLES)
    assert not (tmp_path / "other").exists()


def test_a_resume_records_each_step_once_and_a_fresh_start_keeps_the_old_records(tmp_path: Path) -> None:
    write(tmp_path, 0, 6, tensorboard=True)
    write(tmp_path, 4, 8, tensorboard=True)
    found = read_records(tmp_path)
    assert [record["step"] for record in found if record["kind"] == "step"] == list(range(1, 9))
    assert [point.step for point in board(tmp_path).Scalars("loss/train")] == list(range(1, 9))
    write(tmp_path, 0, 1, tensorboard=True)
    assert len(read_records(tmp_path)) == 2 and [*iterate_records(tmp_path / "metrics.jsonl.1")] == found
    assert (tmp_path / "tensorboard.1").is_dir()


class FakeWandb(types.ModuleType):
    """What a run uses of wandb. refuses: `init` fails online. key: whether there is an API key. hangs: a function that
    never returns. dies_at: the step from which `log` fails, for the next `tries` calls."""

    def __init__(self, refuses: bool = False, key: bool = True, hangs: str = "", dies_at: int = 0, tries: int = 0):
        super().__init__("wandb")
        self.refuses, self.key, self.hangs, self.dies_at, self.tries = refuses, key, hangs, dies_at, tries
        self.starts: list[Any] = []
        self.logged: list[tuple[int, Any]] = []

    Settings = dict

    def Table(self, columns: Any, data: Any) -> Any:
        return columns, data

    def login(self, prompt: bool) -> bool:
        assert not prompt, "login would ask on the terminal"
        return self.key

    def init(self, *, mode: str, dir: str, id: str, **rest: Any) -> Any:
        self.maybe_hang("init")
        self.starts.append((mode, id))
        if mode == "online" and self.refuses:
            raise RuntimeError("CommError:\nno route")
        folder = f"{dir}/wandb/{mode}-run-1-{id}/files"
        return types.SimpleNamespace(dir=folder, log=self.log, finish=partial(self.maybe_hang, "finish"))

    def log(self, values: Any, step: int) -> None:
        if self.tries and step >= self.dies_at:
            self.tries -= 1
            raise ConnectionResetError("Connection lost")
        self.logged.append((step, values))

    def teardown(self) -> None:
        raise ConnectionResetError("Connection lost")  # as the real one does when its service is gone

    def maybe_hang(self, where: str) -> None:
        if self.hangs == where:
            threading.Event().wait()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeWandb]:
    def use(**settings: Any) -> FakeWandb:
        monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb(**settings))
        return fake

    return use


@pytest.mark.slow
def test_the_real_wandb_offline(tmp_path: Path) -> None:
    write(tmp_path, 0, 2, wandb="offline")
    run_id = (tmp_path / ID_FILE).read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*"))) == 1


def test_texts_are_in_tensorboard_and_wandb(tmp_path: Path, use: Callable[..., FakeWandb]) -> None:
    fake = use()
    with writing(tmp_path, tensorboard=True, wandb="online") as writer:
        writer.texts(1, SAMPLES)
    (shown,) = board(tmp_path).Tensors("text/1/text_summary")
    # An indented code block of Markdown shows the text unchanged.
    assert shown.tensor_proto.string_val[0].decode() == "    def| f(x):\n        é" and shown.step == 1
    table = fake.logged[-1][1]["text/samples"]
    assert table == (["prompt", "text", "ended"], [["def", " f(x):\n    é", False], ["", None, False]])


def test_tensorboard_gets_all_steps_after_its_disk_has_failed(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    (tmp_path / "tensorboard").touch()  # no folder can be made there
    with writing(tmp_path, 1, tensorboard=True) as writer:
        writer.step(metrics(2))
        wait_until(lambda: "LOGGING FAILED" in caplog.text)
        (tmp_path / "tensorboard").unlink()
        writer.step(metrics(3))
        wait_until(lambda: "tensorboard works again" in caplog.text)
    assert [point.step for point in board(tmp_path).Scalars("loss/train")] == [2, 3]


@pytest.mark.parametrize(("settings", "why"), [({"refuses": True}, "no route"), ({"key": False}, "no API key")])
def test_if_wandb_does_not_answer_the_run_records_offline(tmp_path: Path, use: Any, settings: Any, why: str) -> None:
    fake = use(**settings)
    write(tmp_path, 0, 1, wandb="online")
    run_id = known_run_id(tmp_path)
    assert len(fake.logged) == 1 and fake.starts[-1] == ("offline", run_id)
    (event,) = [record for record in read_records(tmp_path) if record["kind"] == "event"]
    assert event["event"] == "wandb_offline" and why in event["reason"] and "\n" not in event["reason"]
    assert event["reason"].endswith(f"send it later: wandb sync {tmp_path}/wandb/offline-run-1-{run_id}")


def test_if_wandb_dies_it_is_started_again_and_gets_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[..., FakeWandb]
) -> None:
    fake = use(dies_at=3, tries=3)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    with writing(tmp_path, wandb="online") as writer:
        for step in range(1, 7):
            writer.step(metrics(step))
        wait_until(lambda: not fake.tries)  # a run that has ended would not try again
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 6]  # each once, in order
    assert len(fake.starts) == 4 and len({run_id for _, run_id in fake.starts}) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"hangs": "init"}, "3 points were not written"), ({"dies_at": 2, "tries": 10**6}, "2 points were not written")],
)
def test_if_wandb_hangs_or_stays_away_the_run_continues_and_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, use: Any, settings: Any, message: str
) -> None:
    fake = use(**settings)
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.2)  # otherwise the end waits for half a minute
    with writing(tmp_path, wandb="online") as writer:
        for step in (1, 2, 3):
            writer.step(metrics(step))
            wait_until(lambda: fake.logged or fake.hangs)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]
    assert f"wandb: {message}" in caplog.text


def test_a_run_keeps_its_id_at_wandb(tmp_path: Path, monkeypatch, use: Callable[..., FakeWandb]) -> None:
    """A run that begins again from scratch gets a new id. A file with the id that cannot be read counts as none."""
    fake = use()
    write(tmp_path, 0, 2, wandb="online")
    first = known_run_id(tmp_path)
    write(tmp_path, 2, 3, wandb="online")
    assert first is not None and [run_id for _, run_id in fake.starts] == [first, first]
    write(tmp_path, 0, 1, wandb="online")
    assert known_run_id(tmp_path) != first and (tmp_path / f"{ID_FILE}.1").read_text() == f"{first}\n"
    (tmp_path / ID_FILE).write_bytes(b"\xff\xfe\x00bad")
    assert known_run_id(tmp_path) is None
    (tmp_path / ID_FILE).write_text(first)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError("a bad disk")))
    assert known_run_id(tmp_path) is None


def test_a_run_log_records_its_start_steps_validation_stop_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, use: Callable[..., FakeWandb]
) -> None:
    """A run that is asked to stop waits only HURRY_SECONDS for wandb."""
    fake = use(hangs="finish")
    monkeypatch.setattr(module, "HURRY_SECONDS", 0.1)
    overrides = [f"run.dir={tmp_path}", "logging.tensorboard=false", "logging.wandb=online", "logging.interval=2"]
    (tmp_path / "summary.json").write_text("{}")
    log = RunLog(compose_config(overrides, CONFIGS), active=True, times=TimeLedger())
    log.open(0, world_size=1)
    with log:
        for step in (1, 2, 3):
            log.step(metrics(step))
        log.metrics.record(3, "validation", {"losses": {"code": 2.0}}, {"loss/validation": 2.0})
        log.stop(3, "SIGTERM")
        wait_until(lambda: len(fake.logged) == 4)  # three steps and the validation; then only `finish` is left
    assert "not everything was sent within 0 s" in caplog.text and (tmp_path / "summary.json.1").exists()
    records = read_records(tmp_path)
    kinds = [record.get("event", record["kind"]) for record in records]
    assert kinds == ["run", "time", "step", "step", "time", "step", "validation", "stop", "time"]
    assert records[-1]["step"] == 3 and records[-1]["seconds"]["start-up"] > 0
    assert last_validation(tmp_path, 3) == records[-3] and last_validation(tmp_path, 2) is None
    with (tmp_path / "metrics.jsonl").open("a") as file:  # a second validation after the same step
        file.write('{"kind": "validation", "step": 3, "loss": 7.0}\n')
    assert (last_validation(tmp_path, 3) or {})["loss"] == 7.0


def test_all_wall_time_is_accounted_for_and_repeated_steps_count_as_lost(tmp_path: Path, monkeypatch) -> None:
    """A step takes one second and half a second of data wait; the first one of a start takes ten seconds."""
    path, clock = tmp_path / "metrics.jsonl", types.SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(run_log, "time", clock)

    def record(ledger: TimeLedger, step: int, kind: str = "time") -> None:
        with path.open("a") as file:
            times = ledger.record() if kind == "time" else {}
            file.write(json.dumps({"kind": kind, "step": step, **times}) + "\n")

    def train(ledger: TimeLedger, first: int, last: int) -> None:
        for step in range(first, last + 1):
            ledger.at(step, "data")
            clock.now += 0.5
            ledger.at(step, "before the step")
            clock.now += 10 if step in (1, 5) and step == first else 1

    ledger = TimeLedger(began=90.0)
    ledger.at(0, "build")
    clock.now += 5
    record(ledger, 0, "run")
    train(ledger, 1, 1)
    parts = "imports 10.0, build 5.0, data 0.5, before the step 10.0"
    assert ledger.of_start() == f"this start took 25.5 s to the end of its first step: {parts}"
    train(ledger, 2, 4)
    ledger.at(4, "save")
    clock.now += 2
    record(ledger, 4)
    train(ledger, 5, 8)  # then it is killed; the last checkpoint is of step 4
    record(ledger, 8)
    whole = clock.now - 90.0

    clock.now += 1000
    again = TimeLedger(began=clock.now)
    again.resume(tmp_path, 4)
    cut_after(path, 4)
    record(again, 4)
    assert again.seconds["lost work"] == pytest.approx(4 * 1.5 + 9)
    train(again, 5, 6)
    record(again, 6, "run")
    record(again, 6)
    expected = {"steps": 4.0, "first step": 20.0, "start-up": 15.0, "data wait": 3.0, "saves": 2.0, "lost work": 15.0}
    assert again.seconds == pytest.approx(expected)
    assert sum(again.seconds.values()) == pytest.approx(whole + 10.5 + 1.5)
    assert (goodput_of(iterate_records(path)) or "").startswith("6.8% of 59s in 2 starts; first step 33.9%")
    # A second resume from the same checkpoint still counts the time that was lost before.
    third = TimeLedger(began=clock.now)
    third.resume(tmp_path, 4)
    assert third.seconds["lost work"] == pytest.approx(15 + 12)
    assert goodput_of([{"kind": "run", "step": 0}]) is None
