"""Refuses recipes with options that would change nothing, because whoever sets one believes that it does something.

Only values that are not the default are refused, and not what an override naturally leaves behind:

    refused                                                         accepted
    `rounding`, `block`, `rht` or BF16 blocks of a recipe that      of a BF16 operand or GEMM in another recipe: they
      quantizes nothing                                               went with the format that was replaced
    `rht_signs` without a transform, `amax` without nvfp4           `amax=shard` without tensor parallelism
    `diagnostics` of a run that never quantizes
    `recheck_action` without rechecks
    settings of `gradient_noise` with a switch at a fixed step      any of `switch` with `when=never`: a switch that is
    `gradient_noise` where no backward pass has any                   off stays as it was set
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fp4.config.precision_schema import Bf16BlocksConfig, OperandConfig, PrecisionConfig, SwitchConfig
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision.recipe import GEMMS, Recipe, uses_amax, uses_signs


def validate_effects(precision: PrecisionConfig, recipes: Sequence[Recipe], key: str) -> None:
    """Raise ConfigError for the first option of `precision` without an effect; `key` is how messages call it.

    recipes: its own and those of its exceptions, in this order.
    """
    recipe = recipes[0]
    if not recipe.quantized:
        _unquantized_gemms(precision, key)
    if precision.rht_signs != PrecisionConfig().rht_signs and not uses_signs(recipe.gemms.values()):
        raise ConfigError(
            f"{key}.rht_signs={precision.rht_signs} has no effect without a Hadamard transform; leave it at fixed, or "
            f"set {key}.wgrad.rht=16"
        )
    if precision.amax != PrecisionConfig().amax and not uses_amax(recipe.gemms.values()):
        raise ConfigError(
            f"{key}.amax={precision.amax} has no effect: only nvfp4 operands have a tensor maximum; leave it at global"
        )
    if not any(other.quantized for other in recipes):
        _unquantized(precision, key)
    if precision.recheck_action != PrecisionConfig().recheck_action and not precision.recheck_interval:
        raise ConfigError(
            f"{key}.recheck_action={precision.recheck_action} has no effect with {key}.recheck_interval=0; leave it at "
            f"end, or set {key}.recheck_interval=100"
        )
    _gradient_noise(precision.switch, recipes, key)


def _unquantized_gemms(precision: PrecisionConfig, key: str) -> None:
    for gemm, names in GEMMS.items():
        given = {f"{gemm}.rht": (getattr(precision, gemm).rht, 0)}
        for name in names:
            operand = getattr(getattr(precision, gemm), name)
            for option in ("rounding", "block"):
                given[f"{gemm}.{name}.{option}"] = getattr(operand, option), getattr(OperandConfig(), option)
        for option, (value, default) in given.items():
            if value != default:
                raise ConfigError(
                    f"{key}.{option}={value} has no effect: nothing of this recipe is quantized; leave it out, or "
                    "choose a quantized one, such as precision=nvfp4"
                )


def _unquantized(precision: PrecisionConfig, key: str) -> None:
    for name, default in vars(Bf16BlocksConfig()).items():
        if (value := getattr(precision.bf16_blocks, name)) != default:
            raise ConfigError(
                f"{key}.bf16_blocks.{name}={value} has no effect: nothing of this recipe is quantized; leave it out, "
                "or choose a quantized one, such as precision=nvfp4"
            )
    if precision.diagnostics.interval and precision.switch.when == "never":
        raise ConfigError(
            f"{key}.diagnostics.interval={precision.diagnostics.interval} has nothing to measure: nothing is ever "
            "quantized; set it to 0, or choose a quantized recipe, such as precision=nvfp4"
        )


def _gradient_noise(switch: SwitchConfig, recipes: Sequence[Recipe], key: str) -> None:
    if switch.when == "gradient_noise":
        if not any(recipe.dgrad.quantized or recipe.wgrad.quantized for recipe in recipes):
            raise ConfigError(
                f"{key}.switch.when=gradient_noise never switches: dgrad and wgrad are not quantized and make no "
                "noise; give a step, a fraction, before_decay or never"
            )
    elif switch.when != "never":
        for name in ("threshold", "interval", "patience"):
            if (value := getattr(switch, name)) != getattr(SwitchConfig(), name):
                raise ConfigError(
                    f"{key}.switch.{name}={value} has no effect with {key}.switch.when={switch.when}; leave it out, or "
                    f"set {key}.switch.when=gradient_noise"
                )
