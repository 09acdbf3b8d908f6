"""`train.steps` is raised, on the default run's phases and on others: what was done stays, and the rest is laid out."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from data import provider
from data.schedule import PhaseSchedule
from megatron_fp4.config.data_schema import PhaseConfig
from tests.composing import changed, composed

STEPS = 300
TOKENS = 8 * 256  # of a step of the default run
LAST = composed().data.phases[-1].name
BLENDS = [{"code": 0.7, "prose": 0.3}, {"code": 0.5, "prose": 0.5}, {"code": 0.3, "prose": 0.7}]


def of_lengths(*lengths: dict[str, float]) -> list[PhaseConfig]:
    return [
        PhaseConfig(name=name, blend=blend, **length)  # type: ignore[arg-type]
        for name, blend, length in zip(("broad", "balanced", "prose"), BLENDS, lengths, strict=True)
    ]


PHASES = {
    "fractions": list(composed().data.phases),
    "steps and the rest": of_lengths({"steps": 210}, {"steps": 60}, {}),
    "tokens and the rest": of_lengths({"tokens": 210 * TOKENS}, {"tokens": 60 * TOKENS}, {}),
    "a rest in the middle": of_lengths({"steps": 100}, {}, {"steps": 30}),
}


def laid_out(name: str, steps: int) -> PhaseSchedule:
    return provider.phases(changed(composed(), {"train.steps": steps, "data.phases": PHASES[name]}))


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("stopped", [1, 150, 210, 211, 280, STEPS])
@pytest.mark.parametrize("steps", [301, 400, 1000])
def test_lengthening_keeps_what_was_done(name: str, stopped: int, steps: int) -> None:
    before, fresh = laid_out(name, STEPS), laid_out(name, steps)
    consumed = before.samples_before(stopped)
    position = json.loads(json.dumps(before.position(consumed)))
    after = fresh.after(json.loads(json.dumps(before.description())), consumed)

    # What was consumed is where it was, step by step, sample by sample.
    assert [after.samples_before(step) for step in range(stopped + 1)] == [
        before.samples_before(step) for step in range(stopped + 1)
    ]
    assert [after.locate(i) for i in range(consumed)] == [before.locate(i) for i in range(consumed)]
    # Behind it each step has the phase that the new length gives it, to the new end.
    assert after.num_steps == steps and after.spans[-1].end_step == steps
    assert [after.span(step).name for step in range(stopped, steps)] == [
        fresh.span(step).name for step in range(stopped, steps)
    ]
    # And every source goes on where it stood: nothing twice, nothing left out.
    after.stand_at(consumed, position)
    seen = Counter(position["counts"])
    for i in range(consumed, after.num_samples):
        location = after.locate(i)
        assert location.ordinal == seen[location.source]
        seen[location.source] += 1
    assert sum(seen.values()) == steps * 8


def test_lengthening_again_and_again() -> None:
    """From 300 to 400 and, in the middle of what that added, to 1000."""
    first = laid_out("fractions", STEPS)
    second = laid_out("fractions", 400).after(first.description(), first.samples_before(STEPS))
    consumed = second.samples_before(370)
    third = laid_out("fractions", 1000).after(second.description(), consumed)
    assert [third.locate(i) for i in range(consumed)] == [second.locate(i) for i in range(consumed)]
    names = [(span.name, span.end_step) for span in third.spans if span.num_samples]
    assert names == [
        ("broad", 210), ("balanced", 270), (LAST, 300), ("balanced", 360), (LAST, 370),
        ("broad", 700), ("balanced", 900), (LAST, 1000),
    ]  # fmt: skip
