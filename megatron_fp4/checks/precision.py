"""Refuses recipes that cannot be computed. A plan says whether a model's sizes divide (precision/backend_support.py).

Options without effect are for `checks/effects.py`.
"""

from __future__ import annotations

from dataclasses import fields, replace

from megatron_fp4.checks.effects import validate_effects
from megatron_fp4.config.precision_schema import OperandConfig, PrecisionConfig, RecipeConfig, SecondOperandConfig
from megatron_fp4.config.schema import Bf16BlocksDefault, Config, ConfigError
from megatron_fp4.precision.backend_support import first_refusal, recipes_by_key
from megatron_fp4.precision.plan import Plan, recipe_of
from megatron_fp4.precision.recipe import SLOTS, OperandSlot
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.ms_eden import GROUP as MS_EDEN_GROUP


def validate_precision(precision: PrecisionConfig, config: Config, device_type: str, key: str = "precision") -> None:
    """Raise ConfigError if `precision` cannot run with `config`'s model, batch and mesh on `device_type`.

    key: how messages call it; for a switch's target, something like `precision.switch.target=NAME: precision`.
    """
    _exceptions(precision, key)
    for where, of_part in _parts(precision, key):
        for slot, operand in _operands(of_part):
            _operand(operand, f"{where}.{slot.key}")
            _ms_eden(of_part, slot, operand, where)
        _source(of_part, where)
    recipes = recipes_by_key(precision, key)
    quantized = any(recipe.quantized for recipe in recipes.values())
    _backend(precision, device_type, key)
    _recheck(precision, quantized, key)
    _switch(precision, key)
    validate_effects(precision, list(recipes.values()), key)


def refuse_nothing_quantized(plan: Plan, precision: PrecisionConfig, config: Config, key: str = "precision") -> None:
    """Raise ConfigError if no linear of `plan`, that of `precision` alone, is quantized, although a recipe of it would.

    key: as for `validate_precision`.
    """
    recipes = recipes_by_key(precision, key).values()
    if plan.num_quantized or not plan.rows or not any(recipe.quantized for recipe in recipes):
        return
    where, instead = "", "choose precision=bf16"
    blocks, num_blocks = precision.bf16_blocks, config.model.num_blocks
    ends = blocks.first + blocks.last >= num_blocks
    if file := key.rpartition(": ")[0]:  # a switch's target: an override reaches only into what its file refers to
        defaults = [
            f"by model.{name}"
            for name in ("nvfp4_bf16_blocks", "fp8_bf16_blocks")
            if ends and getattr(config.model, name) == Bf16BlocksDefault(blocks.first, blocks.last)
        ]
        where = f", {' or '.join([*defaults, 'in its file'])}"
        # A run in BF16 does not switch to BF16.
        unswitched = config.precision.name == "bf16"
        instead = f"set {'precision.switch.when=never' if unswitched else file.rpartition('=')[0] + '=bf16'}"
    if ends:
        why = (
            f"{key}.bf16_blocks.first={blocks.first} and last={blocks.last} leave none of the {num_blocks} blocks of "
            f"model.pattern={config.model.pattern} quantized"
        )
        remedy = f"lower them to less than {num_blocks} together"
    else:
        example = f"{plan.rows[0].linear.name}: {plan.rows[0].reason}"
        why = f"{key}={precision.name} leaves none of the {len(plan.rows)} linears quantized ({example})"
        remedy = "take some out of bf16_blocks or exceptions"
    raise ConfigError(f"{why}; {remedy}{where}, or {instead}")


def _parts(precision: PrecisionConfig, key: str) -> list[tuple[str, PrecisionConfig]]:
    """`precision` itself, and for each exception what `precision` would be with its recipe, all with their keys."""
    found = [(key, precision)]
    for i, exception in enumerate(precision.exceptions):
        recipe = recipe_of(exception)
        taken = {field.name: getattr(recipe, field.name) for field in fields(RecipeConfig)}
        found.append((f"{key}.exceptions[{i}].precision={exception.precision}: precision", replace(precision, **taken)))
    return found


def _exceptions(precision: PrecisionConfig, key: str) -> None:
    for i, exception in enumerate(precision.exceptions):
        if not exception.names:
            raise ConfigError(f"{key}.exceptions[{i}].names=[] matches no linear; give patterns, or drop the exception")


def _operands(config: PrecisionConfig) -> list[tuple[OperandSlot, OperandConfig]]:
    return [(slot, getattr(getattr(config, slot.gemm), slot.tensor)) for slot in SLOTS]


def _operand(operand: OperandConfig, key: str) -> None:
    form = FORMATS.get(operand.format)
    if form is None and operand.format != "bf16":
        raise ConfigError(f"{key}.format={operand.format} is not known; choose one of bf16, {', '.join(FORMATS)}")
    if form is not None and not form.stochastic and operand.rounding != "nearest":
        raise ConfigError(
            f"{key}.rounding={operand.rounding} does not go with format={operand.format}: its codes are rounded to "
            f"nearest, as every {operand.format.upper()} training recipe does; use nearest, or another format"
        )
    blocks = [] if form is None else [f"{rows}x{columns}" for rows, columns in form.blocks]
    if form is not None and operand.block not in blocks:
        raise ConfigError(
            f"{key}.block={operand.block} does not go with format={operand.format}; choose {' or '.join(blocks)}"
        )
    if operand.four_over_six != "none" and (form is None or "four_over_six" not in form.options):
        owners = " or ".join(name for name, other in FORMATS.items() if "four_over_six" in other.options)
        raise ConfigError(
            f"{key}.four_over_six={operand.four_over_six} does not go with format={operand.format}; it is for "
            f"{owners}: set it to false"
        )


def _ms_eden(config: PrecisionConfig, slot: OperandSlot, operand: OperandConfig, key: str) -> None:
    """MS-EDEN corrects groups that a transform with random signs mixed, and keeps the mean of gradients right."""
    if operand.rounding != "ms_eden" or operand.format == "bf16":
        return
    where, rht = f"{key}.{slot.key}", getattr(config, slot.gemm).rht
    form = FORMATS[operand.format]
    if form.encode_ms_eden is None:
        owners = " or ".join(name for name, other in FORMATS.items() if other.encode_ms_eden is not None)
        raise ConfigError(
            f"{where}.rounding=ms_eden does not go with format={operand.format}; it is for {owners}: use another "
            "rounding, or another format"
        )
    if slot.gemm == "fprop":
        raise ConfigError(
            f"{where}.rounding=ms_eden is for dgrad and wgrad, whose errors must average out; in the forward pass "
            "rounding to nearest errs less: use nearest"
        )
    if operand.block != "1x16":
        raise ConfigError(f"{where}.rounding=ms_eden does not go with block={operand.block}; set block to 1x16")
    if operand.four_over_six != "none":
        raise ConfigError(
            f"{where}.rounding=ms_eden does not go with four_over_six: it chooses its scales itself; set one of "
            "them to nearest or false"
        )
    if rht != MS_EDEN_GROUP:
        raise ConfigError(
            f"{where}.rounding=ms_eden does not go with {key}.{slot.gemm}.rht={rht}: it corrects groups of "
            f"{MS_EDEN_GROUP} that one transform mixed; set {key}.{slot.gemm}.rht={MS_EDEN_GROUP}"
        )
    if config.rht_signs != "fresh":
        raise ConfigError(
            f"{where}.rounding=ms_eden does not go with {key}.rht_signs={config.rht_signs}: its mean is right over "
            f"random signs alone; set {key}.rht_signs=fresh"
        )


def _source(config: PrecisionConfig, key: str) -> None:
    """Both other sources than the tensor are codes of the untransformed tensor that fprop makes. `forward` quantizes
    what they stand for, which BF16 has to hold; `codes` are taken as they are, so all about them must be fprop's."""
    for gemm, tensor in (("dgrad", "weight"), ("wgrad", "activation")):
        operand: SecondOperandConfig = getattr(getattr(config, gemm), tensor)
        if operand.source == "tensor" or operand.format == "bf16":
            continue
        given, first = f"{key}.{gemm}.{tensor}.source={operand.source}", getattr(config.fprop, tensor)
        if first.format == "bf16" or (first.format == "fp8" and operand.source == "forward"):
            why = "makes no codes" if first.format == "bf16" else "has scales that BF16 does not hold"
            raise ConfigError(f"{given}, but {key}.fprop.{tensor}.format={first.format} {why}; set it to tensor")
        for name in ("fprop", gemm) if operand.source == "codes" else ("fprop",):
            if rht := getattr(config, name).rht:
                raise ConfigError(
                    f"{given} does not go with {key}.{name}.rht={rht}: codes are those of an untransformed tensor; set "
                    "one of them to tensor or 0"
                )
        if operand.source == "codes":
            for field in fields(OperandConfig):
                mine, theirs = getattr(operand, field.name), getattr(first, field.name)
                if mine != theirs:
                    raise ConfigError(
                        f"{given} takes the codes of fprop, but {field.name}={mine} differs from "
                        f"{key}.fprop.{tensor}.{field.name}={theirs}; make them equal, or set source to tensor"
                    )


def _backend(precision: PrecisionConfig, device_type: str, key: str) -> None:
    backend = precision.backend
    if backend in ("auto", "emulated"):
        return
    if refusal := first_refusal(backend, recipes_by_key(precision, key), precision.compute_dtype):
        raise ConfigError(f"{refusal.problem} does not go with {key}.backend={backend}; {refusal.remedy}")
    if device_type != "cuda":
        raise ConfigError(
            f"{key}.backend={backend} needs a CUDA device and this run is on {device_type}; use {key}.backend=emulated"
        )


def _recheck(precision: PrecisionConfig, quantized: bool, key: str) -> None:
    interval = precision.recheck_interval
    if interval and not quantized and precision.switch.when == "never":
        raise ConfigError(
            f"{key}.recheck_interval={interval}, but precision={precision.name} quantizes nothing that could be "
            f"compared; set {key}.recheck_interval=0"
        )


def _switch(precision: PrecisionConfig, key: str) -> None:
    switch = precision.switch
    if switch.when != "never" and switch.target == precision.name:
        raise ConfigError(
            f"{key}.switch.when={switch.when} would switch from {precision.name} to itself; set "
            f"{key}.switch.when=never or another target"
        )
