"""A new ability of a run needs only a callback and its row in the list; and what each seed decides."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain
from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.training.trainer import Callback, Step, Trainer
from models import provider as models
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, losses

pytestmark = pytest.mark.slow


class Toy(Callback):
    """Counts steps, requests a checkpoint after the third, and records its calls."""

    name = "toy"

    def __init__(self) -> None:
        self.count, self.seen = 0, list[Any]()

    def start(self, done: int) -> None:
        self.seen.append(("start", done, self.count))

    def before_step(self, step: Step) -> None:
        self.seen.append(("before", step.index))

    @contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        self.seen.append("in")
        yield
        self.seen.append("out")

    def after_step(self, step: Step) -> None:
        self.count += 1
        self.seen.append(("after", step.done, step.result.loss > 0))
        step.save = step.save or step.done == 3

    def on_checkpoint(self, done: int) -> None:
        self.seen.append(("save", done))

    def finish(self, done: int, stop: Any) -> bool:
        self.seen.append(("finish", done, stop()))
        return True

    def close(self) -> None:
        self.seen.append("close")

    def conclude(self) -> None:
        self.seen.append("conclude")

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int | None) -> None:
        self.count = state or 0


def of_step(index: int) -> list[Any]:
    return [("before", index), "in", "out", ("after", index + 1, True)]


def test_a_callback_is_called_in_order_and_its_state_is_resumed(tmp_path: Path, monkeypatch) -> None:
    composed, toys = pretrain.callbacks_of, list[Toy]()

    def with_toy(config: Config) -> list[Callback]:
        toys.append(Toy())
        return [*composed(config), toys[-1]]

    plain = [*SMALL, *FAST, *small_corpus(tmp_path), "train.global_batch_size=2", "checkpoint.interval=0"]
    plain += ["precision.switch.when=never", "train.steps=4"]
    assert pretrain.main([*plain, f"run.dir={tmp_path}/plain"]) == 0
    monkeypatch.setattr(pretrain, "callbacks_of", with_toy)
    assert pretrain.main([*plain, f"run.dir={tmp_path}/run"]) == 0
    end = [("save", 4), ("finish", 4, False), "close", "conclude"]
    steps = [of_step(index) for index in range(4)]
    assert toys[0].seen == [("start", 0, 0), *steps[0], *steps[1], *steps[2], ("save", 3), *steps[3], *end]
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

    resumed = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000003"
    assert pretrain.main([*plain, resumed, f"run.dir={tmp_path}/branch"]) == 0
    assert toys[1].seen == [("start", 3, 3), *steps[3], *end]


def test_callbacks_are_closed_if_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, toys = pretrain.callbacks_of, [Toy(), Toy()]
    toys[1].start = lambda done: 1 / 0  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(pretrain, "callbacks_of", lambda config: [*composed(config), *toys])
    with pytest.raises(ZeroDivisionError):
        pretrain.main([*SMALL, *FAST, *small_corpus(tmp_path), f"run.dir={tmp_path}/run"])
    assert toys[0].seen == [("start", 0, 0), "close"] and toys[1].seen == ["close"]


def test_each_seed_can_vary_without_the_other(mesh: ParallelMesh, tmp_path: Path) -> None:
    """`data.seed` decides the order of the data, `run.seed` everything else."""
    common = [*SMALL, *FAST, *small_corpus(tmp_path), f"run.dir={tmp_path}/run"]

    def build(*seeds: str) -> tuple[torch.Tensor, torch.Tensor]:
        """An initial weight and the tokens of the first step."""
        run = Trainer(compose_config([*common, *seeds], pretrain.CONFIGS), models, data, [], mesh)
        run.initialize()
        batches = next(iter(run.data.loader.steps(0, 1)))
        return local_part(next(iter(run.model.parameters()))).detach(), torch.cat([batch.tokens for batch in batches])

    weight, tokens = build("run.seed=1")
    other_data = build("run.seed=1", "data.seed=2")
    assert torch.equal(other_data[0], weight) and not torch.equal(other_data[1], tokens)
    other_weights = build("run.seed=2", "data.seed=1")
    assert not torch.equal(other_weights[0], weight) and torch.equal(other_weights[1], tokens)
