"""Steps without an update: how they are counted, what a spike is and what follows, and the diagnosis."""

import json
import math
import statistics
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from megatron_fp4.checkpoint.checkpointer import CheckpointGoneError
from megatron_fp4.config.schema import Config, ConfigError, SpikesConfig
from megatron_fp4.measure.diagnosis import diagnose_nonfinite, find_nonfinite
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.callbacks.bad_steps import SkippedSteps, Spikes
from megatron_fp4.training.step import StepResult
from megatron_fp4.training.trainer import Callback, Step, Trainer
from tests.training.harness import alone, launch, toy, toy_batches, toy_mesh, train_step

GOOD, BAD = StepResult(2.0, 1.0, False), StepResult(math.nan, 1.0, True)
SPIKE = StepResult(9.0, 1.0, True, spike=True)
TRACKED: dict[str, Any] = {"window": 16, "max_in_row": 100}


def skipped(max_in_row: int, num_steps: int = 1000, state: Any = None) -> SkippedSteps:
    callback = SkippedSteps(max_in_row, num_steps)
    callback.trainer = MagicMock()
    callback.trainer.compute_again.return_value = "It is so."  # type: ignore[attr-defined]
    if state is not None:
        callback.load_state_dict(state)
    return callback


def after(callback: SkippedSteps, done: int, result: StepResult) -> None:
    step = Step(done - 1, [], 0.0)
    step.result = result
    callback.after_step(step)


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    callback = skipped(3)
    for done, result in enumerate([BAD, BAD, GOOD, BAD, SPIKE, BAD], start=1):
        after(callback, done, result)
    assert (callback.consecutive, callback.total) == (2, 4)
    with pytest.raises(DivergedError, match=r"3 steps in a row .* up to step 7 .* those after step 3\. It"):
        after(skipped(3, state=callback.state_dict()), 7, BAD)
    callback = skipped(1)
    after(callback, 9, SPIKE)
    callback.rolled_back(9, 5, None)
    with pytest.raises(DivergedError, match=r"those after step 5\."):
        after(callback, 10, BAD)
    callback = skipped(10, num_steps=2)
    after(callback, 1, SPIKE)
    with pytest.raises(DivergedError, match="the run ends without an update"):
        after(callback, 2, BAD)


def _infinite(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output * math.inf)


def _backward(model: Any) -> None:
    def poison(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.nan)

    model.blocks[0].register_forward_hook(poison)


def _weight(model: Any) -> None:
    with torch.no_grad():
        local_part(model.head.weight)[3, 0] = math.nan


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_infinite, "first the output of blocks.1"),
        (_backward, "first the gradient of the output of blocks.0"),
        (_weight, "weights of head.weight; first the output of the model (its loss)"),
    ],
)
def test_the_diagnosis_names_the_first_nonfinite_place(fault: Any, expected: str) -> None:
    with alone() as mesh:
        model, _ = toy(mesh)
        batches = toy_batches(0, mesh)
        assert "is finite: suspect" in diagnose_nonfinite(model, batches, mesh, StepState(0))
        fault(model)
        assert find_nonfinite(model, batches[0], mesh, StepState(0)) == expected
        assert all(p.grad is None for p in model.parameters())


def _until_the_end(rank: int) -> str:
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda module, inputs, output: output * math.nan)
    step_state, callback = StepState(0), skipped(3)
    callback.trainer.compute_again = lambda diagnose, batch: diagnose(model, batch, mesh, step_state)  # type: ignore
    for index in range(10):
        step = Step(index, toy_batches(index, mesh), 0.0)
        step.result = train_step(model, optimizer, step.batch, mesh, step_state, step=index)
        try:
            callback.after_step(step)
        except DivergedError as error:
            return str(error)
    raise AssertionError("did not end")


def test_all_ranks_end_and_name_the_faulty_rank() -> None:
    first, second = launch(_until_the_end, 2)
    assert first == second and "3 steps in a row" in first and "up to step 3 (" in first
    assert "rank 1, micro-batch 1" in first and "the output of blocks.1" in first and "rank 0" not in first


def spikes_of(action: str = "skip", checkpoint: int | None = None, **settings: Any) -> Spikes:
    spikes = Spikes(SpikesConfig(action=action, **settings))
    spikes.trainer = MagicMock(plan_name="nvfp4")
    spikes.trainer.phase = lambda step: "main"  # type: ignore[method-assign]
    spikes.trainer.checkpointer.last_step = lambda: checkpoint  # type: ignore[method-assign]
    spikes.trainer.roll_back.return_value = checkpoint  # type: ignore[attr-defined]
    spikes.trainer.compute_again.return_value = "It is so."  # type: ignore[attr-defined]
    spikes.trainer.samples = lambda done: 8 * done  # type: ignore[method-assign]
    spikes.trainer.data.phases.source_ranges.return_value = []
    return spikes


def feed(spikes: Spikes, numbers: Any, done: int = 0) -> list[int]:
    """Feed (loss, norm) of each step after `done`; returns the steps that were spikes."""
    found = []
    for index, (loss, norm) in enumerate(numbers, start=done):
        step = Step(index, [], 0.0)
        spikes.before_step(step)
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = finite and spikes.accept is not None and not spikes.accept(loss, norm)
        step.result = StepResult(loss, norm, skipped=spike or not finite, spike=spike)
        total = spikes.total
        spikes.after_step(step)
        if spikes.total > total:
            found.append(step.done)
    return found


def noisy(count: int, seed: int = 0) -> list[tuple[float, float]]:
    generator = np.random.default_rng(seed)
    return [(2 + 0.02 * a, 0.5 * math.exp(0.1 * b)) for a, b in generator.normal(size=(count, 2))]


def test_the_limits_of_spikes_by_their_definition() -> None:
    def limit(values: list[float], floor: float) -> float:
        median = statistics.median(values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
        return median + 3 * max(deviation, floor * abs(median))

    numbers = noisy(50)
    losses, norms = (limit([pair[index] for pair in numbers[-20:]], floor) for index, floor in ((0, 0.005), (1, 0.2)))
    for loss, norm, expected in (
        (losses - 1e-9, norms - 1e-9, []),
        (losses + 1e-9, 0.1, [51]),
        (1, norms + 1e-9, [51]),
    ):
        assert feed(spikes_of(threshold=3.0, window=20), [*numbers, (loss, norm)]) == expected


def test_what_is_not_a_spike() -> None:
    """No spikes are noise, falling numbers, and steps after a short history or at the start of a phase; with
    action=none there are none at all. Spikes and steps that are not finite do not enter the history."""
    assert feed(spikes_of(), noisy(2000)) == []
    assert feed(spikes_of(**TRACKED), [(10 * 0.9**i + 2, 5 * 0.9**i + 1) for i in range(60)]) == []
    assert feed(spikes_of(**TRACKED), [(2.0, 1.0)] * 7 + [(99.0, 99.0)]) == []
    bad = [(9.0, 9.0), (math.nan, 1.0), (2.0, math.inf)] * 20
    assert feed(spikes_of(**TRACKED), [*noisy(8), *bad]) == list(range(9, 69, 3))
    spikes = spikes_of(**TRACKED)
    feed(spikes, noisy(10))
    spikes.trainer.phase = lambda step: "another"  # type: ignore[method-assign]
    assert feed(spikes, [(9.0, 9.0)] * 8 + [(99.0, 99.0)], 10) == [19]
    off = spikes_of("none")
    assert off.accept is None and feed(off, [*noisy(100), (99.0, 99.0)]) == []
    assert off.state_dict() == spikes_of("none").state_dict()


def test_only_one_callback_decides_about_updates() -> None:
    class Vote(Callback):
        accept = lambda self, loss, norm: loss < 9  # noqa: E731

    callbacks: list[Any] = [Vote(), spikes_of("skip")]
    with pytest.raises(ConfigError, match="the callbacks Vote and Spikes both decide whether a step updates"):
        Trainer(Config(), MagicMock(), MagicMock(), callbacks, MagicMock())


def test_rollbacks_to_one_checkpoint_count_as_in_a_row() -> None:
    spikes = spikes_of("rollback", checkpoint=5, window=16, max_in_row=2)
    feed(spikes, noisy(10))
    saved = json.loads(json.dumps(spikes.state_dict()))
    assert feed(spikes, [(9.0, 1.0), *noisy(5, seed=1)], 10) == [11]
    spikes.rolled_back(11, 5, saved)
    assert spikes.in_row == 1 and spikes.state_dict()["history"] == saved["history"]
    with pytest.raises(DivergedError, match=r"2 spikes after the checkpoint of step 5 .* It is so\."):
        feed(spikes, [(9.0, 1.0)], 30)


def test_a_spike_is_skipped_if_the_checkpoint_is_gone() -> None:
    """Other records of spikes are in tests/test_spikes_run.py."""
    spikes = spikes_of("rollback", 5, **TRACKED)
    spikes.trainer.roll_back.side_effect = CheckpointGoneError("gone")  # type: ignore[attr-defined]
    feed(spikes, [*noisy(10), (9.0, 1.0)])
    (call,) = spikes.trainer.log.event.call_args_list  # type: ignore[attr-defined]
    recorded = [call.kwargs[name] for name in ("action", "checkpoint", "steps", "samples")]
    assert (call.args[:2], recorded) == ((11, "spike"), ["skip", None, [11, 11], [80, 87]])
