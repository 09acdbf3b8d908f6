"""Steps that are not finite: what is counted, when the run ends, and what the diagnosis names."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_fp4.measure.diagnosis import diagnose_nonfinite, find_nonfinite
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.bad_steps import NonFiniteError, SkippedSteps
from megatron_fp4.training.step import StepResult
from megatron_fp4.training.trainer import Step
from tests.training.harness import alone, launch, toy, toy_batches, toy_mesh, train_step

GOOD, BAD = StepResult(2.0, 1.0, False), StepResult(math.nan, 1.0, True)
SPIKE = StepResult(9.0, 1.0, True, spike=True)


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


def test_too_many_in_a_row_end_the_run_also_after_a_resume() -> None:
    callback = skipped(3)
    for done, result in enumerate([BAD, BAD, GOOD, BAD, SPIKE, BAD], start=1):
        after(callback, done, result)
    assert (callback.consecutive, callback.total) == (2, 4)
    again = skipped(3, state=callback.state_dict())
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* up to step 7 .* those after step 3\. It is so\."):
        after(again, 7, BAD)
    old = skipped(3, state={"consecutive": 2, "total": 7})
    with pytest.raises(NonFiniteError, match=r"up to step 6 .* those after step 3\."):
        after(old, 6, BAD)


def test_a_rollback_counts_from_its_checkpoint() -> None:
    callback = skipped(1)
    after(callback, 9, SPIKE)
    callback.rolled_back(9, 5, None)
    with pytest.raises(NonFiniteError, match=r"those after step 5\."):
        after(callback, 10, BAD)


def test_a_run_without_any_update_is_not_finished() -> None:
    callback = skipped(10, num_steps=3)
    for done, result in enumerate([BAD, SPIKE], start=1):
        after(callback, done, result)
    with pytest.raises(NonFiniteError, match="the run ends without an update"):
        after(callback, 3, BAD)
    after(skipped(10, num_steps=3, state={"consecutive": 1, "total": 1, "without_update": 1}), 3, BAD)


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
        (_infinite, SimpleNamespace(weights=[], output="blocks.1")),
        (_backward, SimpleNamespace(weights=[], output=None, output_gradient="blocks.0")),
        (_weight, SimpleNamespace(weights=["head.weight"], output="the model (its loss)")),
    ],
)
def test_the_diagnosis_names_the_first_place(fault: Any, expected: Any) -> None:
    with alone() as mesh:
        model, _ = toy(mesh)
        batches = toy_batches(0, mesh)
        assert "is finite: suspect" in diagnose_nonfinite(model, batches, mesh, StepState(0))
        fault(model)
        report = find_nonfinite(model, batches[0], mesh, StepState(0))
        assert vars(expected).items() <= vars(report).items()
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
        step.result = train_step(model, optimizer, step.batch, mesh, step_state, step=index, lr=1e-2, clip_norm=1.0)
        try:
            callback.after_step(step)
        except NonFiniteError as error:
            return str(error)
    raise AssertionError("did not end")


def test_all_ranks_end_and_name_the_rank() -> None:
    first, second = launch(_until_the_end, 2)
    assert first == second and "3 steps in a row" in first and "up to step 3 (" in first
    assert "rank 1, micro-batch 1" in first and "the output of blocks.1" in first and "rank 0" not in first
