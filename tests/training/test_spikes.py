"""What is a spike and what is none, what is counted, and what is done about it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_fp4.checkpoint.checkpointer import CheckpointGoneError
from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.training.callbacks.bad_steps import SpikeError, Spikes
from megatron_fp4.training.step import StepResult
from megatron_fp4.training.trainer import Step

RECORDED = [line.split() for line in (Path(__file__).parent / "default_run.txt").read_text().splitlines()[1:]]


def spikes_of(phase: str = "main", checkpoint: int | None = None, **settings: Any) -> Spikes:
    spikes = Spikes(SpikesConfig(**settings))
    spikes.trainer = MagicMock(plan_name="nvfp4")
    spikes.trainer.phase = lambda step: phase  # type: ignore[method-assign]
    spikes.trainer.checkpointer.last_step = lambda: checkpoint  # type: ignore[method-assign]
    spikes.trainer.roll_back.return_value = checkpoint  # type: ignore[attr-defined]
    spikes.trainer.compute_again.return_value = "It is so."  # type: ignore[attr-defined]
    spikes.trainer.samples = lambda done: 8 * done  # type: ignore[method-assign]
    spikes.trainer.data.phases.source_ranges.return_value = []
    return spikes


def feed(spikes: Spikes, numbers: Any, done: int = 0) -> list[int]:
    """Steps of (loss, norm) as in a run; which of them, from `done` + 1, were spikes."""
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


def test_ordinary_runs_have_none_at_defaults() -> None:
    numbers = [(float(loss), float(norm)) for loss, norm, _ in RECORDED]
    assert len(numbers) == 300 and feed(spikes_of(action="skip"), numbers) == []
    assert feed(spikes_of(action="skip"), noisy(2000)) == []
    for spike in ((12.0, 0.5), (4.0, 5.0)):
        assert feed(spikes_of(action="skip"), [*numbers, spike]) == [301]


@pytest.mark.parametrize("threshold", [3.0, 6.0])
def test_limits_are_the_definition(threshold: float) -> None:
    def limit(values: list[float], floor: float) -> float:
        median = statistics.median(values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
        return median + threshold * max(deviation, floor * abs(median))

    numbers = noisy(50)
    last = numbers[-20:]
    losses, norms = limit([loss for loss, _ in last], 0.005), limit([norm for _, norm in last], 0.2)
    for loss, norm, expected in (
        (losses - 1e-9, norms - 1e-9, []),
        (losses + 1e-9, 0.1, [51]),
        (1.0, norms + 1e-9, [51]),
    ):
        spikes = spikes_of(action="skip", threshold=threshold, window=20)
        assert feed(spikes, [*numbers, (loss, norm)]) == expected


def test_what_is_no_measure() -> None:
    """Falling numbers, short histories, spikes, steps that are not finite, and another phase."""
    settings: dict[str, Any] = {"action": "skip", "window": 16, "max_in_row": 100}
    assert feed(spikes_of(**settings), [(10 * 0.9**i + 2, 5 * 0.9**i + 1) for i in range(60)]) == []
    assert feed(spikes_of(**settings), [(2.0, 1.0)] * 7 + [(99.0, 99.0)]) == []
    bad = [(9.0, 9.0), (math.nan, 1.0), (2.0, math.inf)] * 20
    assert feed(spikes_of(**settings), [*noisy(8), *bad]) == list(range(9, 69, 3))
    spikes = spikes_of(**settings)
    feed(spikes, noisy(10))
    spikes.trainer.phase = lambda step: "another"  # type: ignore[method-assign]
    assert feed(spikes, [(9.0, 9.0)] * 8 + [(99.0, 99.0)], 10) == [19]


def test_none_does_nothing() -> None:
    spikes = spikes_of()
    assert spikes.accept is None and feed(spikes, [*noisy(100), (99.0, 99.0)]) == []
    assert spikes.state_dict() == spikes_of().state_dict()


def test_a_resumed_run_decides_as_the_straight_one() -> None:
    settings: dict[str, Any] = {"action": "rollback", "window": 16, "max_in_row": 9}
    numbers = [*noisy(40), (9.0, 1.0), (9.0, 1.0), *noisy(20, seed=1), (9.0, 1.0)]
    straight, first, second = (spikes_of(checkpoint=30, **settings) for _ in range(3))
    expected = feed(straight, numbers)
    found = feed(first, numbers[:41])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + feed(second, numbers[41:], 41) == expected == [41, 42, 63]
    assert second.state_dict() == straight.state_dict()


def test_rollbacks_to_one_checkpoint_are_a_row_whatever_lies_between() -> None:
    spikes = spikes_of(checkpoint=5, action="rollback", window=16, max_in_row=3)
    feed(spikes, noisy(10))
    saved = json.loads(json.dumps(spikes.state_dict()))
    for count in (1, 2):
        assert feed(spikes, [(9.0, 1.0), *noisy(5, seed=count)], 10 * count) == [10 * count + 1]
        spikes.rolled_back(10 * count + 1, 5, saved)
        assert spikes.in_row == count and spikes.state_dict()["history"] == saved["history"]
    with pytest.raises(SpikeError, match=r"3 spikes after the checkpoint of step 5 .* It is so\."):
        feed(spikes, [(9.0, 1.0)], 30)


def test_what_is_recorded() -> None:
    def events(checkpoint: int | None, gone: bool, **settings: Any) -> list[Any]:
        spikes = spikes_of(checkpoint=checkpoint, window=16, **settings)
        if gone:
            spikes.trainer.roll_back.side_effect = CheckpointGoneError("gone")  # type: ignore[attr-defined]
        feed(spikes, [*noisy(10), (9.0, 1.0)])
        (call,) = spikes.trainer.log.metrics.event.call_args_list  # type: ignore[attr-defined]
        assert call.args == (11, "spike")
        return [call.kwargs[name] for name in ("action", "checkpoint", "steps", "samples")]

    assert events(None, False, action="skip") == ["skip", None, [11, 11], [80, 87]]
    assert events(None, False, action="rollback") == ["skip", None, [11, 11], [80, 87]]
    assert events(5, False, action="rollback") == ["rollback", 5, [6, 11], [40, 87]]
    assert events(5, True, action="rollback") == ["skip", None, [11, 11], [80, 87]]
