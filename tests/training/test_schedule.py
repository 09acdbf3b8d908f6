from typing import get_args, get_type_hints

import pytest

from megatron_fp4.config.schema import ScheduleConfig
from megatron_fp4.training.optimizer import WSDSchedule

PEAK = 3e-4
DECAYS = get_args(get_type_hints(ScheduleConfig)["decay"])


def schedule(num_steps: int = 1000, **changes: object) -> WSDSchedule:
    return WSDSchedule(ScheduleConfig(**changes), PEAK, num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 600, 12345])
def test_warmup_stable_decay(decay: str, num_steps: int) -> None:
    wsd = schedule(num_steps, decay=decay)
    rates = [wsd.lr(step) for step in range(num_steps)]
    assert rates[-1] == PEAK * 0.01
    assert all(rate > 0 for rate in rates)
    if wsd.warmup_steps:
        assert rates[0] == PEAK / wsd.warmup_steps
        assert rates[wsd.warmup_steps - 1] == PEAK
    assert all(rate == PEAK for rate in rates[wsd.warmup_steps : wsd.decay_start_step])
    assert rates[: wsd.warmup_steps] == sorted(rates[: wsd.warmup_steps])
    decaying = rates[wsd.decay_start_step :]
    assert decaying[0] < PEAK
    assert decaying == sorted(decaying, reverse=True)


def test_boundaries() -> None:
    wsd = schedule(600, warmup_fraction=0.02, decay_fraction=0.15)
    assert (wsd.warmup_steps, wsd.decay_start_step) == (12, 510)


def test_rewarm_climbs_to_the_schedule_again() -> None:
    wsd = schedule(100, decay_fraction=0.2)
    assert wsd.lr(49, switched_at=50, rewarm_steps=4) == PEAK
    assert [wsd.lr(step, 50, 4) for step in range(50, 55)] == [PEAK * f for f in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert wsd.lr(50, switched_at=50) == PEAK
    assert wsd.lr(82, 82, 2) == wsd.lr(82) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_fraction": 0.6, "decay_fraction": 0.6}, "overlap"),
        ({"decay": "exponential", "min_lr_ratio": 0.0}, "never reaches"),
        ({"num_steps": 0}, "train.steps is 0"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        WSDSchedule(ScheduleConfig(), 0.0, 10)
