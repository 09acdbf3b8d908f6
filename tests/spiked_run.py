"""Runs of pretrain.py on ranks of `launch`, with spikes and a kill in chosen steps."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pretrain
from data.indexed import write_dataset
from megatron_fp4.logging.run_log import TimeLedger
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.signals import StopConditions, StopRequest
from megatron_fp4.training import build, trainer
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import accumulate
from tests.test_pretrain import SMALL
from tests.training.harness import whole

# Settings for quick starts: without TensorBoard, validation and loader workers.
FAST = ["data.num_workers=0", "validation.num_samples=1", "validation.interval=0", "run.device=cpu"]
FAST += ["logging.tensorboard=false", "checkpoint.keep=0", "model.pattern=M*-", "train.sequence_length=32"]
SPIKED = ["spikes.window=6", "checkpoint.interval=5", "train.steps=12", "precision.switch.when=5"]
SPIKED += ["train.global_batch_size=4"]


def small_corpus(folder: Path) -> list[str]:
    """Overrides that read two sources of random tokens, written to `folder`; the built-in corpus takes ten seconds."""
    generator = np.random.default_rng(0)
    for source in ("code", "prose"):
        write_dataset(folder / source, generator.integers(0, 512, (20, 300)), np.uint16)
    phases = "data.phases=[{name: main, fraction: 1.0, blend: {code: 0.5, prose: 0.5}}]"
    return ["data=indexed", f"data.sources={{code: {folder}/code, prose: {folder}/prose}}", phases]


def printed_by(overrides: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    """Run pretrain.py in this process; it must end with `code`, a refusal with one line. Returns what it printed."""
    capsys.readouterr()
    ended = pretrain.main(overrides)
    printed = capsys.readouterr()
    assert ended == code, printed
    if code == 2:
        assert len(printed.err.splitlines()) == 1 and printed.err.startswith("pretrain.py: ")
    return printed.out + printed.err


def spiking(rank: int, spikes: list[int], factor: float) -> Callable[..., Any]:
    """An `accumulate` that multiplies the last rank's loss by `factor` in the steps `spikes`, counted from 1."""
    hooked = False

    def spiked(model: Any, batches: Any, mesh: Any, step_state: Any, **settings: Any) -> Any:
        nonlocal hooked
        if not hooked and rank == mesh.world_size - 1:
            model.register_forward_hook(lambda _, __, loss: loss * factor if step_state.step + 1 in spikes else loss)
        hooked = True
        return accumulate(model, batches, mesh, step_state, **settings)

    return spiked


def spiked_run(
    rank: int, overrides: list[str], spikes: list[int], factor: float, kill_before: int | None = None
) -> dict[str, Any]:
    """Run pretrain.py in this process group with `spiking`.

    kill_before: the step before which the rank kills itself. Returns the state before each step: sums of weights and
    moments, and draws of the generators; or the message of the error that ended the run.
    """
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    config = pretrain.configure([*SMALL, *FAST, *SPIKED, *overrides])
    began: dict[str, Any] = {}

    class Beginnings(trainer.Callback):
        def before_step(self, step: trainer.Step) -> None:
            if step.done == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            model = self.trainer.model
            state = {**model.state_dict(), **optimizer_state(model, self.trainer.optimizer)}
            sums = {name: whole(value).double().sum().item() for name, value in state.items()}
            began[str(step.done)] = [sums, torch.rand(()).item(), random.random()]

    callbacks = pretrain.callbacks_of(config)
    with (
        mock.patch.object(build, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(pretrain, "callbacks_of", lambda _: [*callbacks, Beginnings()]),
        mock.patch.object(trainer, "accumulate", spiking(rank, spikes, factor)),
    ):
        try:
            with pretrain.only_run(config, TimeLedger(), StopRequest(), Progress()) as (run, state):
                stops = StopConditions(Path(config.run.dir), 0.0, StopRequest(), active=False)
                assert state.ended(*run.train(stops)) == 0
        except DivergedError as error:
            return {"error": str(error)}
    return began


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Modification time and size of everything in `folder`."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}
