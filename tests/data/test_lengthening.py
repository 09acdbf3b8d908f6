"""`train.steps` is raised, on the default run's phases and on others: what was done stays, and the rest is laid out."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from data.opening import phase_schedule
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
    return phase_schedule(changed(composed(), {"train.steps": steps, "data.phases": PHASES[name]}), {})


def test_the_default_runs_phases_are_fractions() -> None:
    phases = composed().data.phases
    assert [phase.fraction for phase in phases] == [0.7, 0.2, 0.1] and composed().train.steps == STEPS
    assert [dict(phase.blend) for phase in phases if isinstance(phase.blend, dict)] == BLENDS


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("stopped", [1, 150, 210, 211, 280, STEPS])
@pytest.mark.parametrize("steps", [301, 400, 1000])
def test_lengthening_keeps_what_was_done(name: str, stopped: int, steps: int) -> None:
    before, fresh = laid_out(name, STEPS), laid_out(name, steps)
    consumed = before.samples_before(stopped)
    position = json.loads(json.dumps(before.position(consumed)))
    after = fresh.behind(json.loads(json.dumps(before.description())), consumed)

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
    second = laid_out("fractions", 400).behind(first.description(), first.samples_before(STEPS))
    consumed = second.samples_before(370)
    third = laid_out("fractions", 1000).behind(second.description(), consumed)
    assert [third.locate(i) for i in range(consumed)] == [second.locate(i) for i in range(consumed)]
    names = [(span.name, span.end_step) for span in third.spans if span.num_samples]
    assert names == [
        ("broad", 210), ("balanced", 270), (LAST, 300), ("balanced", 360), (LAST, 370),
        ("broad", 700), ("balanced", 900), (LAST, 1000),
    ]  # fmt: skip


def test_phases_of_a_given_length_say_how_to_lengthen_them() -> None:
    PHASES["steps alone"] = of_lengths({"steps": 210}, {"steps": 60}, {"steps": 30})
    laid_out("steps alone", STEPS)
    with pytest.raises(
        ValueError, match=r"set train\.steps=300, or leave out the length of one phase, which then gets"
    ):
        laid_out("steps alone", 400)
    # That remedy on the run as it stands: the last phase goes on.
    behind = laid_out("steps and the rest", 400).behind(laid_out("steps alone", STEPS).description(), STEPS * 8)
    assert [(span.name, span.end_step) for span in behind.spans] == [("broad", 210), ("balanced", 270), ("prose", 400)]
