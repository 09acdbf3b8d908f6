import pytest

from megatron_fp4.config.precision_schema import SwitchConfig
from megatron_fp4.precision.switch import PrecisionSwitch, switch_step


@pytest.mark.parametrize(
    "when, step",
    [
        ("never", None),
        ("gradient_noise", None),
        ("before_decay", 850),
        ("0.8", 800),
        ("0.0001", 0),
        ("1e-1", 100),
        ("0", 0),
        ("1", 1),
        ("500", 500),
        ("1000", 1000),
    ],
)
def test_the_step_of_a_switch(when, step):
    assert switch_step(when, 1000, 850) == step


@pytest.mark.parametrize("when", ["", "soon", "1001", "1.0", "0.0", "-5", "-0.5", "1.5", "nan", "inf", "Never", "0,8"])
def test_other_times_are_refused_with_value_and_remedy(when):
    with pytest.raises(ValueError) as error:
        switch_step(when, 1000, 850)
    message = str(error.value)
    assert f"precision.switch.when={when} " in message
    for remedy in ("never", "before_decay", "gradient_noise", "fraction between 0 and 1", "train.steps=1000"):
        assert remedy in message
    assert error.value.__cause__ is None


def test_a_switch_comes_once_at_its_step():
    switch = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert [switch.try_switch(step) for step in range(6)] == [False, False, False, True, False, False]
    assert switch.switched_at == 3
    assert not switch.measures(0)


def test_a_run_continued_past_its_step_switches_at_once():
    switch = PrecisionSwitch(SwitchConfig(when="3"), 3)
    assert switch.try_switch(10)
    assert switch.switched_at == 10


def test_gradient_noise_needs_patience_in_a_row():
    switch = PrecisionSwitch(SwitchConfig(when="gradient_noise", threshold=2.0, interval=5, patience=3), None)
    for ratio in (1.0, 1.9, 2.0, 1.0, 1.0):  # the threshold itself is not below
        switch.record(ratio)
        assert not switch.try_switch(7)
    switch.record(1.0)
    assert switch.try_switch(8)
    assert switch.switched_at == 8
    assert not switch.try_switch(9)


def test_a_measurement_that_is_not_a_number_is_not_below():
    switch = PrecisionSwitch(SwitchConfig(when="gradient_noise", patience=1), None)
    switch.record(float("nan"))
    assert not switch.try_switch(1)


def test_measurements_happen_at_the_interval_until_the_switch():
    switch = PrecisionSwitch(SwitchConfig(when="gradient_noise", interval=5, patience=1), None)
    assert [step for step in range(12) if switch.measures(step)] == [0, 5, 10]
    switch.record(0.1)
    assert switch.try_switch(11)
    assert not any(switch.measures(step) for step in range(12, 30))


def test_state_survives_a_checkpoint():
    config = SwitchConfig(when="gradient_noise", threshold=2.0, patience=2)
    switch = PrecisionSwitch(config, None)
    switch.record(1.0)
    resumed = PrecisionSwitch(config, None)
    resumed.load_state_dict(switch.state_dict())
    assert not resumed.try_switch(3)
    resumed.record(1.0)
    assert resumed.try_switch(4)
    after = PrecisionSwitch(config, None)
    after.load_state_dict(resumed.state_dict())
    assert after.switched_at == 4
    assert not after.try_switch(5)
    assert set(after.state_dict()) == {"switched_at", "num_below"}
