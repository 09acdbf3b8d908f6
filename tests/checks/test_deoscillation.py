"""Settings of de-oscillation with which nothing would be reset are refused."""

from __future__ import annotations

import pytest

from assembly import check as validate
from tests.checks.composed import changed, composed, refusal

KEY = "optimizer.deoscillation"
# Of 300 steps; the learning rate decays from step 255 on.
REFUSED = [
    ({"ratio": 4.0}, (), f"{KEY}.ratio=4.0 has no effect with {KEY}.interval=0", f"set {KEY}.interval=200"),
    ({"interval": 40}, (), f"{KEY}.window=50 is longer than {KEY}.interval=40", "use at most 40"),
    ({"interval": 100, "start": "soon"}, (), f"{KEY}.start=soon is not before_decay", "give one of these"),
    ({"interval": 100, "start": "301"}, (), f"{KEY}.start=301 is not", "train.steps=300"),
    ({"interval": 100, "start": "250"}, (), f"{KEY}.start=250 is step 250, from which", "a window of at most 49 steps"),
    ({"interval": 100, "start": "0.5"}, ("precision=bf16",), f"{KEY}.interval=100 has no effect: no linear", "nvfp4"),
    (
        {"interval": 100, "start": "0.5"},
        ("precision.fprop.weight.rounding=stochastic", "precision.fprop.weight.block=1x16"),
        f"{KEY}.interval=100 has no effect: no linear of precision=nvfp4",
        "quantized to nearest",
    ),
    (
        {"interval": 100, "start": "0.5", "precision.switch.when": "120"},
        (),
        f"{KEY}.start=0.5 is step 150, and precision.switch.when=120 is step 120, with no window of 50 steps",
        "precision.switch.when=never",
    ),
    (
        {"interval": 100, "window": 9, "precision.switch.when": "never", "schedule.decay_fraction": 0.0},
        (),
        f"{KEY}.start=before_decay, but schedule.decay_fraction=0.0 never decays",
        f"{KEY}.start=0.65",
    ),
    (
        {"interval": 50, "start": "0.5", "checkpoint.local_dir": "/scratch/c", "checkpoint.local_interval": 10},
        (),
        f"{KEY}.window=50 of {KEY}.interval=50 leaves no step between windows",
        "checkpoint.local_interval=0",
    ),
]


def keys(settings: dict[str, object]) -> dict[str, object]:
    return {name if "." in name else f"{KEY}.{name}": value for name, value in settings.items()}


@pytest.mark.parametrize(("settings", "overrides", "problem", "remedy"), REFUSED)
def test_refused(settings: dict[str, object], overrides: tuple[str, ...], problem: str, remedy: str) -> None:
    message = refusal(keys(settings), *overrides)
    assert message.startswith(problem) and remedy in message


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": 100, "start": "0.5"},
        {"interval": 50, "start": "249", "window": 50, "precision.switch.when": "never"},
        # Behind the switch weights are still in FP4: dgrad and wgrad alone change.
        {"interval": 20, "window": 20, "precision.switch.scope": "backward"},
        {"interval": 100, "start": "0.5", "precision.switch.when": "gradient_noise"},
    ],
)
def test_accepted(settings: dict[str, object]) -> None:
    validate(changed(composed(), keys(settings)), 1, "cpu")
