"""Refuses recipes that cannot be computed, and options of them that would change nothing.

Whoever sets an option believes that it does something. Of options without effect only values that are not the default
are refused, and not what an override naturally leaves behind:

    refused                                                         accepted
    `rounding`, `block`, `rht` or BF16 blocks of a recipe that      of a BF16 operand or GEMM in another recipe: they
      quantizes nothing                                               went with the format that was replaced
    `rht_signs` without a transform, `amax` without nvfp4           `amax=shard` without tensor parallelism
    `diagnostics` of a run that never quantizes
    settings of `gradient_noise` with a switch at a fixed step      any of `switch` with `when=never`: a switch that is
    `gradient_noise` where no backward pass has any                   off stays as it was set

What backends cannot compute, and sizes that blocks do not divide, are in backend_support.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from megatron_fp4.config.precision_schema import (
    Bf16BlocksConfig,
    OperandConfig,
    PrecisionConfig,
    RecipeConfig,
    SecondOperandConfig,
    SwitchConfig,
)
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision.backend_support import first_refusal, recipes_by_key
from megatron_fp4.precision.plan import Plan, recipe_of
from megatron_fp4.precision.recipe import GEMMS, SLOTS, OperandSlot, Recipe, uses_amax, uses_signs
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.ms_eden import GROUP as MS_EDEN_GROUP


def validate_precision(precision: PrecisionConfig, device_type: str, key: str = "precision") -> None:
    """Raise ConfigError if `precision` cannot run on `device_type`.

    key: how messages call it; for a switch's target, something like `precision.switch.target=NAME: precision`.
    """
    for refusal in _refusals(precision, device_type, key):
        raise ConfigError(refusal)


def refuse_nothing_quantized(plan: Plan, precision: PrecisionConfig, config: Config, key: str = "precision") -> None:
    """Raise ConfigError if no linear of `plan`, that of `precision` alone, is quantized, although a recipe of it would.

    key: as for `validate_precision`.
    """
    recipes = recipes_by_key(precision, key).values()
    if plan.num_quantized or not plan.rows or not any(recipe.quantized for recipe in recipes):
        return
    blocks, num_blocks = precision.bf16_blocks, config.model.num_blocks
    if blocks.first + blocks.last >= num_blocks:
        why = (
            f"{key}.bf16_blocks.first={blocks.first} and last={blocks.last} leave none of the {num_blocks} blocks of "
            f"model.pattern={config.model.pattern} quantized; lower them to less than {num_blocks} together"
        )
    else:
        why = (
            f"{key}={precision.name} leaves none of the {len(plan.rows)} linears quantized ({plan.rows[0].linear.name}:"
            f" {plan.rows[0].reason}); take some out of bf16_blocks or exceptions"
        )
    # An override reaches into the run's own precision, not into a file that a switch names.
    instead = ", or choose precision=bf16"
    if file := key.rpartition(": ")[0]:
        other = "precision.switch.when=never" if config.precision.name == "bf16" else f"{file.rpartition('=')[0]}=bf16"
        instead = f" in its file or the model's defaults, or set {other}"
    raise ConfigError(why + instead)


def _refusals(precision: PrecisionConfig, device_type: str, key: str) -> Iterator[str]:
    for i, exception in enumerate(precision.exceptions):
        if not exception.names:
            yield f"{key}.exceptions[{i}].names=[] matches no linear; give patterns, or drop the exception"
    for where, of_part in _parts(precision, key):
        for slot in SLOTS:
            operand: OperandConfig = getattr(getattr(of_part, slot.gemm), slot.tensor)
            if operand.format != "bf16":
                yield from _operand(operand, f"{where}.{slot.key}")
                if operand.rounding == "ms_eden":
                    yield from _ms_eden(of_part, slot, operand, where)
        yield from _source(of_part, where)
    recipes = recipes_by_key(precision, key)
    if precision.backend not in ("auto", "emulated"):
        if refusal := first_refusal(precision.backend, recipes, precision.compute_dtype):
            yield f"{refusal.problem} does not go with {key}.backend={precision.backend}; {refusal.remedy}"
        if device_type != "cuda":
            yield (
                f"{key}.backend={precision.backend} needs a CUDA device and this run is on {device_type}; use "
                f"{key}.backend=emulated"
            )
    yield from _without_effect(precision, list(recipes.values()), key)
    yield from _switch(precision, list(recipes.values()), key)


def _parts(precision: PrecisionConfig, key: str) -> list[tuple[str, PrecisionConfig]]:
    """`precision` itself, and for each exception what `precision` would be with its recipe, all with their keys."""
    found = [(key, precision)]
    for i, exception in enumerate(precision.exceptions):
        recipe = recipe_of(exception)
        taken = {field.name: getattr(recipe, field.name) for field in fields(RecipeConfig)}
        found.append((f"{key}.exceptions[{i}].precision={exception.precision}: precision", replace(precision, **taken)))
    return found


def _operand(operand: OperandConfig, key: str) -> Iterator[str]:
    if operand.format not in FORMATS:
        yield f"{key}.format={operand.format} is not known; choose one of bf16, {', '.join(FORMATS)}"
        return
    form, other = FORMATS[operand.format], f"does not go with format={operand.format}"
    if not form.stochastic and operand.rounding != "nearest":
        yield (
            f"{key}.rounding={operand.rounding} {other}: its codes are rounded to nearest, as every "
            f"{operand.format.upper()} training recipe does; use nearest, or another format"
        )
    blocks = [f"{rows}x{columns}" for rows, columns in form.blocks]
    if operand.block not in blocks:
        yield f"{key}.block={operand.block} {other}; choose {' or '.join(blocks)}"
    if operand.four_over_six != "none" and "four_over_six" not in form.options:
        owners = " or ".join(name for name, row in FORMATS.items() if "four_over_six" in row.options)
        yield f"{key}.four_over_six={operand.four_over_six} {other}; it is for {owners}: set it to false"


def _ms_eden(config: PrecisionConfig, slot: OperandSlot, operand: OperandConfig, key: str) -> Iterator[str]:
    """MS-EDEN corrects groups that a transform with random signs mixed, and keeps the mean of gradients right."""
    rht, owners = getattr(config, slot.gemm).rht, [name for name, form in FORMATS.items() if form.encode_ms_eden]
    wrong = {
        f"does not go with format={operand.format}; it is for {' or '.join(owners)}: use another rounding or format": (
            operand.format not in owners
        ),
        "is for dgrad and wgrad, whose errors must average out; in the forward pass rounding to nearest errs less: use "
        "nearest": slot.gemm == "fprop",
        f"does not go with block={operand.block}; set block to 1x16": operand.block != "1x16",
        "does not go with four_over_six: it chooses its scales itself; set one to nearest or false": (
            operand.four_over_six != "none"
        ),
        f"does not go with {key}.{slot.gemm}.rht={rht}: it corrects groups of {MS_EDEN_GROUP} that one transform "
        f"mixed; set {key}.{slot.gemm}.rht={MS_EDEN_GROUP}": rht != MS_EDEN_GROUP,
        f"does not go with {key}.rht_signs={config.rht_signs}: its mean is right over random signs alone; set "
        f"{key}.rht_signs=fresh": config.rht_signs != "fresh",
    }
    yield from (f"{key}.{slot.key}.rounding=ms_eden {why}" for why, holds in wrong.items() if holds)


def _source(config: PrecisionConfig, key: str) -> Iterator[str]:
    """Both other sources than the tensor are codes of the untransformed tensor that fprop makes. `forward` quantizes
    what they stand for, which BF16 has to hold; `codes` are taken as they are, so all about them must be fprop's."""
    for gemm, tensor in (("dgrad", "weight"), ("wgrad", "activation")):
        operand: SecondOperandConfig = getattr(getattr(config, gemm), tensor)
        if operand.source == "tensor" or operand.format == "bf16":
            continue
        given, first = f"{key}.{gemm}.{tensor}.source={operand.source}", getattr(config.fprop, tensor)
        if first.format == "bf16" or (first.format == "fp8" and operand.source == "forward"):
            why = "makes no codes" if first.format == "bf16" else "has scales that BF16 does not hold"
            yield f"{given}, but {key}.fprop.{tensor}.format={first.format} {why}; set it to tensor"
        for name in ("fprop", gemm) if operand.source == "codes" else ("fprop",):
            if rht := getattr(config, name).rht:
                yield (
                    f"{given} does not go with {key}.{name}.rht={rht}: codes are those of an untransformed tensor; set "
                    "one of them to tensor or 0"
                )
        for option in (field.name for field in fields(OperandConfig) if operand.source == "codes"):
            mine, theirs = getattr(operand, option), getattr(first, option)
            if mine != theirs:
                yield (
                    f"{given} takes the codes of fprop, but {option}={mine} differs from "
                    f"{key}.fprop.{tensor}.{option}={theirs}; make them equal, or set source to tensor"
                )


def _without_effect(precision: PrecisionConfig, recipes: Sequence[Recipe], key: str) -> Iterator[str]:
    """recipes: its own and those of its exceptions, in this order."""
    recipe, default = recipes[0], PrecisionConfig()
    never = not any(other.quantized for other in recipes)
    unquantized = "has no effect: nothing of this recipe is quantized; leave it out, or choose a quantized one, such as"
    if not recipe.quantized:
        for option, value in _set_options(precision):
            yield f"{key}.{option}={value} {unquantized} precision=nvfp4"
    if precision.rht_signs != default.rht_signs and not uses_signs(recipe.gemms.values()):
        yield (
            f"{key}.rht_signs={precision.rht_signs} has no effect without a Hadamard transform; leave it at fixed, or "
            f"set {key}.wgrad.rht=16"
        )
    if precision.amax != default.amax and not uses_amax(recipe.gemms.values()):
        yield f"{key}.amax={precision.amax} has no effect: only nvfp4 has tensor maxima; leave it at global"
    for field in fields(Bf16BlocksConfig) if never else ():
        if (value := getattr(precision.bf16_blocks, field.name)) != getattr(default.bf16_blocks, field.name):
            yield f"{key}.bf16_blocks.{field.name}={value} {unquantized} precision=nvfp4"
    if never and precision.diagnostics.interval and precision.switch.when == "never":
        yield (
            f"{key}.diagnostics.interval={precision.diagnostics.interval} has nothing to measure: nothing is ever "
            "quantized; set it to 0, or choose a quantized recipe, such as precision=nvfp4"
        )
    if never and precision.recheck_interval and precision.switch.when == "never":
        yield (
            f"{key}.recheck_interval={precision.recheck_interval}, but precision={precision.name} quantizes nothing "
            f"that could be compared; set {key}.recheck_interval=0"
        )


def _set_options(precision: PrecisionConfig) -> Iterator[tuple[str, object]]:
    """Options of operands and transforms that are not at their default, and their values."""
    for gemm, tensors in GEMMS.items():
        if rht := getattr(precision, gemm).rht:
            yield f"{gemm}.rht", rht
        for tensor in tensors:
            operand = getattr(getattr(precision, gemm), tensor)
            for option in ("rounding", "block"):
                if (value := getattr(operand, option)) != getattr(OperandConfig(), option):
                    yield f"{gemm}.{tensor}.{option}", value


def _switch(precision: PrecisionConfig, recipes: Sequence[Recipe], key: str) -> Iterator[str]:
    switch, noisy = precision.switch, any(recipe.dgrad.quantized or recipe.wgrad.quantized for recipe in recipes)
    if switch.when != "never" and switch.target == precision.name:
        yield (
            f"{key}.switch.when={switch.when} would switch from {precision.name} to itself; set "
            f"{key}.switch.when=never or another target"
        )
    if switch.when == "gradient_noise" and not noisy:
        yield (
            f"{key}.switch.when=gradient_noise never switches: dgrad and wgrad are not quantized and make no "
            "noise; give a step, a fraction, before_decay or never"
        )
    for name in ("threshold", "interval", "patience") if switch.when not in ("never", "gradient_noise") else ():
        if (value := getattr(switch, name)) != getattr(SwitchConfig(), name):
            yield (
                f"{key}.switch.{name}={value} has no effect with {key}.switch.when={switch.when}; leave it out, or "
                f"set {key}.switch.when=gradient_noise"
            )
