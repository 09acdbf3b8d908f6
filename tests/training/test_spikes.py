"""What is a spike and what is none, and what is counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.spikes import SpikeError, SpikeGuard
from megatron_fp4.training.step import StepResult, train_step
from tests.training.harness import VOCAB_SIZE, ToyBatch, alone, toy, whole

RECORDED = [line.split() for line in (Path(__file__).parent / "default_run.txt").read_text().splitlines()[1:]]


def feed(guard: SpikeGuard, numbers: Any, done: int = 0, checkpoint: int | None = None) -> list[int]:
    """Give the guard steps of (loss, norm) as a run does; which of them, from `done` + 1, were spikes."""
    found = []
    for step, (loss, norm) in enumerate(numbers, start=done + 1):
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = finite and guard.accept is not None and not guard.accept(loss, norm)
        result = StepResult(loss, norm, skipped=spike or not finite, spike=spike)
        if guard.observe(result, step, lambda: checkpoint) is not None:
            found.append(step)
    return found


def noisy(count: int, seed: int = 0) -> list[tuple[float, float]]:
    generator = np.random.default_rng(seed)
    return [(2 + 0.02 * a, 0.5 * math.exp(0.1 * b)) for a, b in generator.normal(size=(count, 2))]


def test_the_default_run_has_none_at_defaults() -> None:
    numbers = [(float(loss), float(norm)) for loss, norm, _ in RECORDED]
    assert len(numbers) == 300
    for action in ("skip", "rollback"):
        assert feed(SpikeGuard(SpikesConfig(action=action)), numbers) == []  # as one regime, which is the harder
        with_regimes = SpikeGuard(SpikesConfig(action=action))
        for step, (loss, norm, phase) in enumerate(RECORDED):
            with_regimes.enter(phase)
            assert feed(with_regimes, [(float(loss), float(norm))], step) == []
        assert feed(with_regimes, [(12.0, 0.5)], 300) == []  # too little history of the last phase
    assert feed(SpikeGuard(SpikesConfig(action="skip")), [*numbers, (12.0, 0.5)]) == [301]
    assert feed(SpikeGuard(SpikesConfig(action="skip")), [*numbers, (4.0, 5.0)]) == [301]


def test_no_spike_in_two_thousand_ordinary_steps() -> None:
    assert feed(SpikeGuard(SpikesConfig(action="skip")), noisy(2000)) == []


@pytest.mark.parametrize("threshold", [3.0, 6.0])
def test_limits_are_the_definition(threshold: float) -> None:
    guard, numbers = SpikeGuard(SpikesConfig(action="skip", threshold=threshold, window=20, min_history=10)), noisy(50)
    feed(guard, numbers[:-1])
    accepted: list[tuple[float, float]] = []
    for loss, norm in numbers[:-1]:
        last = np.array(accepted[-20:])
        if len(accepted) < 10 or (np.array([loss, norm]) <= _limits(last, threshold)).all():
            accepted.append((loss, norm))
    limits = _limits(np.array(accepted[-20:]), threshold)
    above = float(np.nextafter(limits[0], math.inf)), float(np.nextafter(limits[1], math.inf))
    assert guard.accept is not None
    assert guard.accept(limits[0] * (1 - 1e-12), limits[1] * (1 - 1e-12))
    assert not guard.accept(above[0] * (1 + 1e-12), 0.0) and not guard.accept(0.0, above[1] * (1 + 1e-12))


def _limits(history: np.ndarray, threshold: float) -> np.ndarray:
    median = np.median(history, axis=0)
    mad = np.median(np.abs(history - median), axis=0)
    return median + threshold * np.maximum(1.4826 * mad, np.array([0.005, 0.2]) * median)


def test_flat_falling_and_early_steps_are_none() -> None:
    settings = SpikesConfig(action="skip", window=16, min_history=8)
    flat = [(2.0, 1.0)] * 20
    assert feed(SpikeGuard(settings), [*flat, (2.05, 2.0)]) == []
    assert feed(SpikeGuard(settings), [*flat, (2.07, 1.0)]) == [21] == feed(SpikeGuard(settings), [*flat, (2.0, 2.3)])
    assert feed(SpikeGuard(settings), [*flat, (1e-9, 1e-9)]) == []
    assert feed(SpikeGuard(settings), [(2.0, 1.0)] * 7 + [(99.0, 99.0)]) == []
    falling = [(10 * 0.9**i + 2, 5 * 0.9**i + 1) for i in range(60)]
    assert feed(SpikeGuard(settings), falling) == []


def test_spikes_and_what_is_not_finite_are_no_measure() -> None:
    guard = SpikeGuard(SpikesConfig(action="skip", window=8, min_history=8, max_in_row=100))
    bad = [(9.0, 9.0), (math.nan, 1.0), (2.0, math.inf)] * 20
    assert feed(guard, [*noisy(8), *bad]) == list(range(9, 69, 3))
    assert (guard.in_row, guard.total) == (20, 20)  # what is not finite is not counted, and ends no row
    assert feed(guard, noisy(1), 68) == [] and (guard.in_row, guard.total) == (0, 20)


def test_none_does_nothing() -> None:
    guard = SpikeGuard(SpikesConfig())
    assert guard.accept is None
    guard.enter("main")
    assert feed(guard, [*noisy(100), (99.0, 99.0)]) == []
    assert guard.state_dict() == SpikeGuard(SpikesConfig()).state_dict()


def test_a_new_phase_or_precision_has_a_history_of_its_own() -> None:
    guard = SpikeGuard(SpikesConfig(action="skip", window=16, min_history=8))
    for step, regime in enumerate(["code"] * 10 + ["prose"] * 9):
        guard.enter(regime)
        assert feed(guard, [(2.0 if regime == "code" else 5.0, 1.0)], step) == []
    assert feed(guard, [(9.0, 1.0)], 19) == [20]


@pytest.mark.parametrize("cut", [5, 30, 41, 42])
def test_a_resumed_guard_goes_on_as_the_straight_one(cut: int) -> None:
    settings = SpikesConfig(action="rollback", window=16, min_history=8, max_in_row=9)
    numbers = [*noisy(40), (9.0, 1.0), (9.0, 1.0), *noisy(20, seed=1), (9.0, 1.0)]
    straight, first, second = (SpikeGuard(settings) for _ in range(3))
    for guard in (straight, first):
        guard.enter("main")
    expected = feed(straight, numbers, checkpoint=3)
    found = feed(first, numbers[:cut], checkpoint=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.enter("main")
    assert found + feed(second, numbers[cut:], cut, checkpoint=3) == expected == [41, 42, 63]
    assert second.state_dict() == straight.state_dict()
    second.load_state_dict(None)  # of a checkpoint that knew of no spikes
    assert feed(second, [(99.0, 99.0)], 63) == []


def test_other_settings_take_up_what_is_still_a_measure() -> None:
    before = SpikeGuard(SpikesConfig(action="skip", window=16, min_history=8))
    feed(before, [(9.0, 1.0)] * 8 + noisy(8))
    shorter = SpikeGuard(SpikesConfig(action="rollback", window=8, min_history=8))
    shorter.load_state_dict(before.state_dict())
    assert shorter.state_dict()["history"] == before.state_dict()["history"][8:]
    off = SpikeGuard(SpikesConfig())
    off.load_state_dict(before.state_dict())
    feed(off, noisy(30))
    again = SpikeGuard(SpikesConfig(action="skip", window=16, min_history=8))
    again.load_state_dict(off.state_dict())
    assert feed(again, [(99.0, 99.0)], 46) == []  # the thirty steps in between were not looked at


def test_rollbacks_to_one_checkpoint_are_a_row_whatever_lies_between() -> None:
    guard = SpikeGuard(SpikesConfig(action="rollback", window=16, min_history=8, max_in_row=3))
    feed(guard, noisy(10))
    saved = json.loads(json.dumps(guard.state_dict()))
    for count in (1, 2):
        assert feed(guard, [(9.0, 1.0)], 20, checkpoint=10) == [21]
        guard.rolled_back(saved)
        assert guard.state_dict()["history"] == saved["history"]
        feed(guard, noisy(5, seed=count), checkpoint=10)
        assert (guard.in_row, guard.total) == (count, count)
    assert feed(guard, [(9.0, 1.0)], 30, checkpoint=25) == [31]  # there is a newer one
    assert (guard.in_row, guard.total) == (1, 3)


def test_too_many_in_a_row() -> None:
    guard = SpikeGuard(SpikesConfig(action="skip", window=16, min_history=8, max_in_row=2))
    feed(guard, noisy(10))
    result = StepResult(9.0, 0.5, skipped=True, spike=True)
    first = guard.observe(result, 11, lambda: None)
    assert first is not None
    guard.give_up(first, lambda: "never asked")
    second = guard.observe(result, 12, lambda: None)
    assert second is not None
    with pytest.raises(
        SpikeError, match=r"^2 spikes in a row \(spikes.max_in_row=2\), the last in step 12: loss 9 \(ov"
    ):
        guard.give_up(second, lambda: "It is so.")
    assert "gradient norm 0.5 (within" in str(second)


def pattern(step: int, poisoned: bool) -> list[ToyBatch]:
    """Text that a model learns in a few steps, or noise."""
    generator = torch.Generator().manual_seed(step)
    text = torch.arange(9).repeat(8, 1) + torch.randint(4, (8, 1), generator=generator)
    if poisoned:
        text = torch.randint(VOCAB_SIZE, (8, 9), generator=generator)
    return [ToyBatch(0, text[:, :-1], text[:, 1:])]


def test_a_poisoned_batch_leaves_weights_and_moments_as_they_were() -> None:
    with alone() as mesh:
        model, optimizer = toy(mesh)
        clock, guard = StepState(0), SpikeGuard(SpikesConfig(action="skip", window=32, min_history=16))
        spikes = []
        for step in range(60):
            before = {
                n: whole(t).clone() for n, t in {**model.state_dict(), **optimizer_state(model, optimizer)}.items()
            }
            version = clock.weights_version
            result = train_step(
                model, optimizer, pattern(step, step in (40, 50)), mesh, clock,
                step=step, lr=1e-2, clip_norm=1.0, accept=guard.accept,
            )  # fmt: skip
            if (spike := guard.observe(result, step + 1, lambda: None)) is not None:
                spikes.append(spike.step)
                assert result.skipped and result.spike and clock.weights_version == version
                after = {**model.state_dict(), **optimizer_state(model, optimizer)}
                assert all(torch.equal(whole(after[name]), before[name]) for name in before)
                assert all(parameter.grad is None for parameter in model.parameters())
        assert spikes == [41, 51]
