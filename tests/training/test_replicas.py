"""Replicas are compared: all ranks find and name each changed tensor and state."""

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pretrain
from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.logging.run_log import TimeLedger
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.runtime import signals
from megatron_fp4.runtime.errors import ExitCode, WrongNumbersError, exit_code_of
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.signals import StopConditions, StopRequest
from megatron_fp4.training import build
from megatron_fp4.training.callbacks import replicas
from megatron_fp4.training.callbacks.replicas import Difference, Replicas
from megatron_fp4.training.trainer import Callback, Step, Trainer
from models import provider as models
from scripts import replay
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, records
from tests.training.harness import launch

pytestmark = pytest.mark.slow

WEIGHT, NORM = "blocks.1.mixer.out_proj.weight", "blocks.0.norm.weight"


def _tensor(trainer: Trainer, name: str, key: str = "") -> torch.Tensor:
    parameter = dict(trainer.model.named_parameters())[name]
    return local_part(trainer.optimizer.state[parameter][key] if key else parameter)


def _exchange(tensor: torch.Tensor) -> None:
    flat = tensor.view(-1)
    flat[:2] = flat[:2].flip(0).clone()


# (change on the last of four ranks, what the message names, groups of ranks that hold different values)
FAULTS: dict[str, tuple[Callable[[Trainer], object], str, list[list[int]]]] = {
    "weight": (lambda t: _tensor(t, WEIGHT).mul_(1.5), WEIGHT, [[1, 3]]),
    "exchanged": (lambda t: _exchange(_tensor(t, WEIGHT)), WEIGHT, [[1, 3]]),
    "moment": (lambda t: _tensor(t, WEIGHT, "exp_avg").add_(1e-9), f"{WEIGHT}.exp_avg", [[1, 3]]),
    "norm": (lambda t: _tensor(t, NORM)[:1].mul_(1.5), NORM, [[1, 3], [2, 3]]),
    "buffer": (lambda t: t.model.counts.add_(1), "counts", [[0, 1, 2, 3]]),
    "generator": (lambda t: torch.rand(1), "torch's generator", [[0, 1, 2, 3]]),
    "data": (lambda t: setattr(t.data.loader, "consumed_samples", 7), "data", [[0, 1, 2, 3]]),
}


def _disturbed(rank: int, overrides: list[str]) -> dict[str, tuple[str, list[Difference]]]:
    """Make each fault after the second step on two replicas of two tensor-parallel ranks; returns what is found."""
    config = compose_config([*overrides, "parallel.replicate=2", "parallel.tensor=2"], pretrain.CONFIGS)
    trainer = Trainer(config, models, data, [Replicas()], build_mesh(config.parallel, torch.device("cpu")), quiet=True)
    callback = trainer.callbacks[0]
    trainer.initialize()
    trainer.begin(0)
    for _ in trainer.steps(0, 2):
        pass
    trainer.model.register_buffer("counts", torch.zeros(4))
    weights = [_tensor(trainer, WEIGHT), _tensor(trainer, WEIGHT, "exp_avg"), _tensor(trainer, NORM)]
    touched = [*weights, trainer.model.counts]
    state, generator = [tensor.clone() for tensor in touched], torch.get_rng_state()
    consumed, found = trainer.data.loader.consumed_samples, {}
    for name, (disturb, _, _) in FAULTS.items():
        callback._compared = None
        callback.compare(2)
        if rank == 3:
            disturb(trainer)
        callback._agreed, callback._compared = 1, None
        with pytest.raises(WrongNumbersError) as error:
            callback.compare(2)
        assert exit_code_of(error.value) is ExitCode.WRONG_NUMBERS
        found[name] = str(error.value), replicas.compare(trainer)[1]
        for tensor, before in zip(touched, state, strict=True):
            tensor.copy_(before)
        torch.set_rng_state(generator)
        trainer.data.loader.consumed_samples = consumed
    return found


def test_a_fault_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    settings = [*SMALL, *FAST, *small_corpus(tmp_path), f"run.dir={tmp_path}/run"]
    found = launch(_disturbed, 4, settings)
    for fault, (_, named, ranks) in FAULTS.items():
        assert len({of_rank[fault][0] for of_rank in found}) == 1
        message, differences = found[0][fault]
        assert sorted(list(difference.sums) for difference in differences) == ranks
        assert all(difference.names == [named] for difference in differences)
        assert f"hold different {named}" in message and "agreed after step 1." in message
        # Of four ranks the majority is right; of two, nothing is known.
        assert ("against the majority: 3" in message) == (len(ranks[0]) == 4)
        assert all(difference.values or fault in ("buffer", "generator", "data") for difference in differences)
        assert ("scripts/replay.py" in message) == (len(ranks[0]) == 2)


class Disturb(Callback):
    """Asks to stop after the fourth step; before the sixth, changes a weight of the second rank."""

    def before_step(self, step: Step) -> None:
        if step.done == 4:
            (Path(self.trainer.config.run.dir) / "STOP").touch()
        if step.done == 6 and self.trainer.mesh.rank == 1:
            _tensor(self.trainer, WEIGHT).mul_(1.5)


def _run(rank: int, overrides: list[str], run_dir: Path) -> tuple[str, str]:
    """Run two replicas, resume after four steps and a switch, and change one of them before the sixth step. Returns the
    message and what a replay prints."""
    os.environ["WORLD_SIZE"] = "2"
    callbacks, printed, message = pretrain.callbacks_of, io.StringIO(), ""
    with (
        mock.patch.object(build, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(pretrain, "callbacks_of", lambda config: [*callbacks(config), Disturb()]),
        mock.patch.object(signals, "LOOK_EVERY", 0.0),
    ):
        config = pretrain.configure([*overrides, f"run.dir={run_dir}"])
        for _ in range(2):
            try:
                with pretrain.only_run(config, TimeLedger(), StopRequest(), Progress()) as (trainer, _):
                    trainer.train(StopConditions(run_dir, 0.0, StopRequest(), active=rank == 0))
            except WrongNumbersError as error:
                message = str(error)
        dist.barrier()  # until the first rank has closed the records
        with contextlib.redirect_stdout(printed):
            replay.replay(replay.parse([str(run_dir), "--step", "6", "--trust-config"]))
    return message, printed.getvalue()


def test_a_run_ends_and_its_replay_names_the_wrong_rank(tmp_path: Path) -> None:
    """Until then replicas agree, also after a switch, saves and a resume."""
    settings = [*SMALL, *FAST, *small_corpus(tmp_path), "parallel.replicate=2", "run.replicas_interval=2"]
    settings += ["checkpoint.interval=4", "precision.switch.when=3", "train.steps=12"]
    (message, printed), (same, _) = launch(_run, 2, settings, tmp_path / "run")
    assert message == same and "They agreed after step 4." in message
    (event,) = records(tmp_path / "run", "replicas")
    assert (event["step"], event["agreed"]) == (6, 4)
    assert f"{WEIGHT} differs from these steps' on rank 0 by" in printed and "rank 1 was wrong" in printed
