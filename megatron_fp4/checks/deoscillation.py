"""Refuses settings of `optimizer.deoscillation` under which no weight would ever be reset, or not as they say."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fp4.config.schema import Config, ConfigError, DeoscillationConfig
from megatron_fp4.precision.plan import Plan
from megatron_fp4.training.deoscillation import KEY, Windows, watched
from megatron_fp4.training.schedule import WSDSchedule


def validate_deoscillation(config: Config, plans: Sequence[Plan]) -> None:
    """Raise ConfigError for the first setting that would do nothing. plans: before the precision switch, and after it
    if there is one."""
    settings, defaults = config.optimizer.deoscillation, DeoscillationConfig()
    if not settings.interval:
        for name in ("window", "ratio", "start"):
            if (value := getattr(settings, name)) != getattr(defaults, name):
                raise ConfigError(
                    f"{KEY}.{name}={value} has no effect with {KEY}.interval=0; leave it out, or set {KEY}.interval=200"
                )
        return
    if settings.window > settings.interval:
        raise ConfigError(
            f"{KEY}.window={settings.window} is longer than {KEY}.interval={settings.interval}, and windows do not "
            f"overlap; use at most {settings.interval}, or a longer interval"
        )
    if not watched(plans):
        raise ConfigError(
            f"{KEY}.interval={settings.interval} has no effect: no linear of precision={config.precision.name} has "
            "forward weights that are quantized to nearest, without a transform; set it to 0, or choose a recipe that "
            "has, such as precision=nvfp4"
        )
    if settings.interval == settings.window and config.checkpoint.local_interval:
        raise ConfigError(
            f"{KEY}.window={settings.window} of {KEY}.interval={settings.interval} leaves no step between windows, "
            f"and checkpoint.local_interval={config.checkpoint.local_interval} saves only there; use a shorter window, "
            "or set checkpoint.local_interval=0"
        )
    _times(config, plans)


def _times(config: Config, plans: Sequence[Plan]) -> None:
    """Some window must end in time, and with the plan that it began with."""
    settings, steps = config.optimizer.deoscillation, config.train.steps
    schedule = WSDSchedule.of(config)
    try:
        windows = Windows.of(settings, steps, schedule.decay_start_step)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if settings.start == "before_decay" and schedule.decay_start_step == steps:
        raise ConfigError(
            f"{KEY}.start=before_decay, but schedule.decay_fraction={config.schedule.decay_fraction} never decays; "
            f"give a step or a fraction of the run, such as {KEY}.start=0.65"
        )
    if not (found := windows.all()):
        raise ConfigError(
            f"{KEY}.start={settings.start} is step {windows.start}, from which {KEY}.window={settings.window} steps do "
            f"not end before the last of train.steps={steps}; start earlier, or use a window of at most "
            f"{max(1, steps - windows.start - 1)} steps"
        )
    switch = config.precision.switch
    at_step = schedule.switch_step(switch.when)
    if at_step is None:
        return
    quantized = [bool(watched([plan])) for plan in plans]
    if any(quantized[-1] if window.start >= at_step else quantized[0] and window.stop <= at_step for window in found):
        return
    raise ConfigError(
        f"{KEY}.start={settings.start} is step {windows.start}, and precision.switch.when={switch.when} is step "
        f"{at_step}, with no window of {settings.window} steps in which weights stay quantized; start earlier, or set "
        "precision.switch.when=never"
    )
