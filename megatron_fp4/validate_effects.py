"""Refuses recipes with options that would change nothing, because whoever sets one believes that it does something.

Only values that are not the default are refused, and not what an override naturally leaves behind:

    refused                                                         accepted
    stochastic rounding of an operand in BF16                       its `block`: part of the format that was replaced,
    a Hadamard transform of a GEMM of which nothing is quantized      and put back with it
    `rht_signs` without a transform, `amax` without nvfp4           `amax=shard` without tensor parallelism
    `block` or BF16 blocks of a recipe that quantizes nothing
    `diagnostics` of a run that never quantizes
    settings of `gradient_noise` with a switch at a fixed step      any of `switch` with `when=never`: a switch that is
    `gradient_noise` where the backward pass has none                 off stays as it was set
"""

from __future__ import annotations

from megatron_fp4.config import Bf16BlocksConfig, ConfigError, OperandConfig, PrecisionConfig, SwitchConfig
from megatron_fp4.precision.recipe import GEMMS, Recipe, recipe_from_config


def validate_effects(precision: PrecisionConfig, quantized: bool, key: str) -> None:
    """Raise ConfigError for the first option of `precision` without an effect; `key` is how messages call it.

    quantized: whether its recipe or that of an exception quantizes anything.
    """
    recipe = recipe_from_config(precision)
    for gemm, names in GEMMS.items():
        operands = {f"{key}.{gemm}.{name}": getattr(getattr(precision, gemm), name) for name in names}
        _operands(operands, recipe)
        rht = getattr(precision, gemm).rht
        if rht and all(operand.format == "bf16" for operand in operands.values()):
            raise ConfigError(
                f"{key}.{gemm}.rht={rht} has no effect: neither operand of {gemm} is quantized, and the transform "
                "would cancel; set it to 0, or quantize an operand"
            )
    if precision.rht_signs != PrecisionConfig().rht_signs and not recipe.uses("rht_signs", GEMMS):
        raise ConfigError(
            f"{key}.rht_signs={precision.rht_signs} has no effect without a Hadamard transform; leave it at fixed, or "
            f"set {key}.wgrad.rht=16"
        )
    if precision.amax != PrecisionConfig().amax and not recipe.uses("amax", GEMMS):
        raise ConfigError(
            f"{key}.amax={precision.amax} has no effect: only nvfp4 operands have a tensor maximum; leave it at global"
        )
    if not quantized:
        _unquantized(precision, key)
    _gradient_noise(precision.switch, recipe, key)


def _operands(operands: dict[str, OperandConfig], recipe: Recipe) -> None:
    for key, operand in operands.items():
        if operand.format != "bf16":
            continue
        if operand.rounding != OperandConfig().rounding:
            raise ConfigError(
                f"{key}.rounding={operand.rounding} has no effect with format=bf16; set it to nearest, or choose "
                "another format"
            )
        if operand.block != OperandConfig().block and not recipe.quantized:
            raise ConfigError(
                f"{key}.block={operand.block} has no effect: nothing of this recipe is quantized; leave it out, or "
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


def _gradient_noise(switch: SwitchConfig, recipe: Recipe, key: str) -> None:
    if switch.when == "gradient_noise":
        if not any(op.quantized for name, op in recipe.operands.items() if not name.startswith("fprop")):
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
