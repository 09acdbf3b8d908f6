import pytest

from megatron_fp4.config.precision_schema import SwitchConfig
from megatron_fp4.precision.plan import Plan, PrecisionController, PrecisionSwitch, switch_step
from megatron_fp4.precision.rng import StepState


def test_the_step_of_a_switch():
    given = {"never": None, "gradient_noise": None, "before_decay": 850, "0.8": 800, "0.0001": 0, "1e-1": 100}
    given |= {"0": 0, "1": 1, "1000": 1000}
    assert {when: switch_step(when, 1000, 850) for when in given} == given
    for when in ("", "soon", "1001", "1.0", "0.0", "-5", "nan", "inf", "0,8"):
        with pytest.raises(ValueError, match="a step between 0 and train"):
            switch_step(when, 1000, 850)


def refuse() -> float:
    raise AssertionError("nothing must be measured")


def test_a_switch_happens_once_at_its_step_or_at_the_first_later_step():
    switch = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert [switch.before_step(step, refuse) for step in range(6)] == [False, False, False, True, False, False]
    assert switch.switched_at == 3
    late = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert late.before_step(10, refuse) and late.switched_at == 10


def test_gradient_noise_is_measured_at_intervals_and_switches_after_consecutive_measurements():
    """Also across a checkpoint."""

    def controller() -> PrecisionController:
        switch = PrecisionSwitch(SwitchConfig(when="gradient_noise", threshold=2.0, interval=5))
        return PrecisionController({}, Plan(()), StepState(seed=0), switch=switch, plan_after_switch=Plan(()))

    first, resumed = controller(), controller()
    # Neither the threshold itself nor NaN is below the threshold.
    for step, ratio in enumerate((1.0, 1.9, 2.0, 1.0, float("nan"), 1.0, 1.0)):
        assert not first.before_step(5 * step, lambda ratio=ratio: ratio)
        assert not any(first.before_step(5 * step + between, refuse) for between in range(1, 5))
    resumed.load_state_dict(first.state_dict())
    assert resumed.before_step(35, lambda: 1.0) and resumed.switch.switched_at == 35
    after = controller()
    after.load_state_dict(resumed.state_dict())
    for one in (resumed, after):
        assert one.switch.switched_at == 35 and not any(one.before_step(step, refuse) for step in range(36, 50))
