from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_fp4.measure.nonfinite import diagnose_nonfinite, find_nonfinite
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.nonfinite_guard import NonFiniteError, NonFiniteGuard
from megatron_fp4.training.step import StepResult, train_step
from tests.training.harness import alone, launch, toy, toy_batches, toy_mesh

GOOD = StepResult(2.0, 1.0, skipped=False)
BAD = StepResult(math.nan, math.inf, skipped=True)
SPIKE = StepResult(9.0, 9.0, skipped=True, spike=True)


def test_guard_counts_in_a_row() -> None:
    guard = NonFiniteGuard(max_skipped_steps=3)
    for step, result in enumerate([BAD, BAD, GOOD, BAD, SPIKE, BAD], start=1):
        guard.observe(result, step, lambda: "never asked")
    assert (guard.consecutive, guard.total) == (2, 4)
    again = NonFiniteGuard(max_skipped_steps=3)
    again.load_state_dict(guard.state_dict())
    message = r"3 steps in a row .* up to step 7 \(.* those after step 3\. It is so\."
    for one in (guard, again):
        with pytest.raises(NonFiniteError, match=message):
            one.observe(BAD, 7, lambda: "It is so.")


def test_guard_knows_which_weights_a_rollback_left() -> None:
    guard = NonFiniteGuard(max_skipped_steps=1)
    guard.observe(SPIKE, 9, lambda: "never asked")
    guard.rolled_back(9, 5)
    with pytest.raises(NonFiniteError, match=r"up to step 10 .* those after step 5\."):
        guard.observe(BAD, 10, lambda: "")


def test_a_run_without_any_update_is_not_finished() -> None:
    """However many steps in a row it may skip; one update is enough, and a resume counts on."""
    guard = NonFiniteGuard(max_skipped_steps=10, num_steps=3)
    guard.observe(BAD, 1, lambda: "")
    again = NonFiniteGuard(max_skipped_steps=10, num_steps=3)
    again.load_state_dict(guard.state_dict())
    again.observe(BAD, 2, lambda: "")
    with pytest.raises(NonFiniteError, match=r"the run ends without an update: 3 steps .* those after step 0\. Why\."):
        again.observe(BAD, 3, lambda: "Why.")
    for step, result in enumerate([BAD, GOOD, BAD], start=1):
        guard.observe(result, step, lambda: "never asked")


def test_guard_reads_the_state_of_older_checkpoints() -> None:
    guard = NonFiniteGuard(max_skipped_steps=3)
    guard.load_state_dict({"consecutive": 2, "total": 7})
    with pytest.raises(NonFiniteError, match=r"up to step 6 .* those after step 3\."):
        guard.observe(BAD, 6, lambda: "")


def test_names_the_first_module_forward() -> None:
    with alone() as mesh:
        model, _ = toy(mesh)
        model.blocks[1].register_forward_hook(lambda module, inputs, output: output * math.inf)
        batch = toy_batches(0, mesh)[0]
        report = find_nonfinite(model, batch, mesh, StepState(0))
        assert report.output == "blocks.1" and not report.weights
        assert "the output of blocks.1" in str(report)
        assert all(p.grad is None for p in model.parameters())


def test_names_the_first_module_backward() -> None:
    with alone() as mesh:
        model, _ = toy(mesh)

        def poison(module: Any, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: gradient * math.nan)

        model.blocks[0].register_forward_hook(poison)
        report = find_nonfinite(model, toy_batches(0, mesh)[0], mesh, StepState(0))
        assert report.output is None and report.output_gradient == "blocks.0"
        assert report.gradients == [n for n, _ in model.named_parameters() if n.startswith(("emb", "blocks.0"))]
        assert "blocks.0" in str(report) and "more" in str(report)


def test_names_weights_and_says_when_all_is_well() -> None:
    with alone() as mesh:
        model, _ = toy(mesh)
        batches = toy_batches(0, mesh)
        assert "is finite: suspect" in diagnose_nonfinite(model, batches, mesh, StepState(0))
        with torch.no_grad():
            local_part(model.head.weight)[3, 0] = math.nan
        report = find_nonfinite(model, batches[0], mesh, StepState(0))
        assert report.weights == ["head.weight"] and report.output == "the model (its loss)"


def _until_abort(rank: int) -> tuple[str, int]:
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda module, inputs, output: output * math.nan)
    clock, guard = StepState(0), NonFiniteGuard(3)
    for step in range(10):
        batches = toy_batches(step, mesh)
        result = train_step(model, optimizer, batches, mesh, clock, step=step, lr=1e-2, clip_norm=1.0)
        try:
            guard.observe(result, step + 1, lambda: diagnose_nonfinite(model, batches, mesh, clock))  # noqa: B023
        except NonFiniteError as error:
            return str(error), step
    raise AssertionError("did not abort")


def test_too_many_in_a_row_abort_everywhere_and_name_the_rank() -> None:
    first, second = launch(_until_abort, 2)
    assert first == second
    message, step = first
    assert step == 2
    assert "3 steps in a row" in message and "up to step 3 (" in message and "those after step 0." in message
    assert "rank 1, micro-batch 1" in message and "the output of blocks.1" in message
    assert "rank 0" not in message
