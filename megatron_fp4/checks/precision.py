"""Refuses recipes that cannot be computed. Whether a model's sizes divide is asked of its plan (precision/sizes.py).

Options without effect are for `validate_effects.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_fp4.checks.effects import validate_effects
from megatron_fp4.checks.torch_backend import validate_torch_backend
from megatron_fp4.config.schema import Config, ConfigError, OperandConfig, PrecisionConfig, RecipeConfig
from megatron_fp4.precision.plan import recipe_of
from megatron_fp4.precision.recipe import GEMMS, recipe_from_config

BLOCKS = {
    "nvfp4": ("1x16", "16x16"),
    "mxfp4": ("1x32", "32x32"),
    "mxfp8": ("1x32", "32x32"),
    "fp8": ("1x128", "128x128"),
}
BACKENDS = ("emulated", "transformer_engine", "torch")
RHT_SIZES = (0, 2, 4, 8, 16, 32, 64, 128)
_TRANSFORMER_ENGINE_FORMATS = {"nvfp4": "1x16", "mxfp8": "1x32", "fp8": "1x128"}  # and activations' blocks there


@dataclass(frozen=True)
class _Gemm:
    """A GEMM's operands under their keys, and its transform's size."""

    name: str
    operands: dict[str, OperandConfig]
    rht: int


def validate_precision(precision: PrecisionConfig, config: Config, device_type: str, key: str = "precision") -> None:
    """Raise ConfigError if `precision` cannot run with `config`'s model, batch and mesh on `device_type`.

    key: how messages call it; for a switch's target, something like `precision.switch.target=NAME: precision`.
    """
    _exceptions(precision, key)
    quantized = False
    for where, of_part in parts(precision, key):
        gemms = _gemms(of_part)
        _choices(of_part, where)
        for gemm in gemms:
            for name, operand in gemm.operands.items():
                _operand(operand, f"{where}.{gemm.name}.{name}")
            if gemm.rht not in RHT_SIZES:
                raise ConfigError(
                    f"{where}.{gemm.name}.rht={gemm.rht} is no size of a Hadamard transform; use a power of two "
                    "up to 128, or 0 for none"
                )
        _reuse(of_part, gemms, where)
        if any(operand.format != "bf16" for gemm in gemms for operand in gemm.operands.values()):
            quantized = True
    _backend(precision, device_type, key)
    for where, of_part in parts(precision, key):
        validate_torch_backend(of_part, device_type, where)
    if quantized:
        _bf16_blocks(precision, config, key)
    _recheck(precision, quantized, key)
    _switch(precision, key)
    validate_effects(precision, [recipe_from_config(of_part) for _, of_part in parts(precision, key)], key)


def parts(precision: PrecisionConfig, key: str) -> list[tuple[str, PrecisionConfig]]:
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


def _gemms(precision: PrecisionConfig) -> list[_Gemm]:
    found = []
    for gemm, names in GEMMS.items():
        config = getattr(precision, gemm)
        found.append(_Gemm(gemm, {name: getattr(config, name) for name in names}, config.rht))
    return found


def _choices(precision: PrecisionConfig, key: str) -> None:
    choices = {
        "compute_dtype": (precision.compute_dtype, ("bfloat16", "float32")),
        "backend": (precision.backend, ("auto", *BACKENDS)),
        "amax": (precision.amax, ("global", "shard")),
        "rht_signs": (precision.rht_signs, ("fixed", "none", "fresh")),
        "recheck_action": (precision.recheck_action, ("end", "warn")),
        "switch.scope": (precision.switch.scope, ("both", "forward", "backward")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{key}.{name}={value} is not known; choose one of {', '.join(allowed)}")


def _operand(operand: OperandConfig, key: str) -> None:
    formats = ("bf16", *BLOCKS)
    if operand.format not in formats:
        raise ConfigError(f"{key}.format={operand.format} is not known; choose one of {', '.join(formats)}")
    if operand.rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"{key}.rounding={operand.rounding} is not known; choose nearest or stochastic")
    if operand.format == "mxfp8" and operand.rounding != "nearest":
        raise ConfigError(
            f"{key}.rounding={operand.rounding} does not go with format=mxfp8: its codes are rounded to nearest, as "
            "every MXFP8 training recipe does; use nearest, or another format"
        )
    if operand.format != "bf16" and operand.block not in BLOCKS[operand.format]:
        raise ConfigError(
            f"{key}.block={operand.block} does not go with format={operand.format}; choose "
            f"{' or '.join(BLOCKS[operand.format])}"
        )
    if operand.four_over_six and operand.format != "nvfp4":
        raise ConfigError(
            f"{key}.four_over_six=true does not go with format={operand.format}; it is for nvfp4: set it to false"
        )
    if operand.power_of_two_scales and operand.format != "fp8":
        microscaled = operand.format in ("mxfp4", "mxfp8")
        always = f" ({operand.format} scales always are powers of two)" if microscaled else ""
        raise ConfigError(
            f"{key}.power_of_two_scales=true does not go with format={operand.format}; it is for fp8: set "
            f"it to false{always}"
        )


def _reuse(precision: PrecisionConfig, gemms: list[_Gemm], key: str) -> None:
    """`reuse_fprop` asks for the very codes of fprop, so everything about them must be fprop's."""
    for gemm in gemms:
        for name, operand in gemm.operands.items():
            if not operand.reuse_fprop:
                continue
            where = f"{key}.{gemm.name}.{name}"
            if gemm.name == "fprop" or name == "gradient":
                why = "fprop has nothing to reuse" if gemm.name == "fprop" else "fprop never sees gradients"
                raise ConfigError(f"{where}.reuse_fprop=true: {why}; set it to false")
            source = getattr(precision.fprop, name)
            if source.format == "bf16":
                raise ConfigError(
                    f"{where}.reuse_fprop=true, but {key}.fprop.{name}.format=bf16 makes no codes; set it to false"
                )
            if gemm.rht or precision.fprop.rht:
                raised = f"{gemm.name}.rht={gemm.rht}" if gemm.rht else f"fprop.rht={precision.fprop.rht}"
                raise ConfigError(
                    f"{where}.reuse_fprop=true does not go with {key}.{raised}: codes are those of an "
                    "untransformed tensor; set one of them to false or 0"
                )
            if replace(operand, reuse_fprop=False) != source:
                raise ConfigError(
                    f"{where} ({_described(operand)}) differs from {key}.fprop.{name} "
                    f"({_described(source)}), whose codes reuse_fprop=true takes; make them equal or set "
                    "reuse_fprop to false"
                )


def _backend(precision: PrecisionConfig, device_type: str, key: str) -> None:
    if precision.backend != "transformer_engine":
        return
    if refusal := transformer_engine_refusal(precision, key):
        problem, remedy = refusal
        raise ConfigError(f"{problem} does not go with {key}.backend=transformer_engine; {remedy}")
    if device_type != "cuda":
        raise ConfigError(
            f"{key}.backend=transformer_engine needs a CUDA device and this run is on {device_type}; use "
            f"{key}.backend=emulated"
        )


def transformer_engine_refusal(precision: PrecisionConfig, key: str) -> tuple[str, str] | None:
    """The first thing in a precision config that Transformer Engine cannot do on any chip, and the remedies, or None.

    Which chip can do what is in `precision/transformer_engine.py`.
    """
    for where, of_part in parts(precision, key):
        if refusal := _recipe_refusal(of_part, where):
            return refusal
    return None


def _recipe_refusal(precision: PrecisionConfig, key: str) -> tuple[str, str] | None:
    emulated = "or backend=emulated"
    if precision.compute_dtype != "bfloat16":
        return f"{key}.compute_dtype={precision.compute_dtype}", f"use bfloat16, {emulated}"
    if precision.rht_signs == "fresh":
        return f"{key}.rht_signs=fresh", f"use fixed, {emulated}"
    gemms = _gemms(precision)
    for gemm in gemms:
        for name, operand in gemm.operands.items():
            if refusal := _operand_refusal(operand, name, gemm, f"{key}.{gemm.name}.{name}"):
                return refusal
        (first_name, first), (second_name, second) = gemm.operands.items()
        if first.format != second.format:
            both = f"{key}.{gemm.name}.{first_name}.format={first.format} and {second_name}.format={second.format}"
            return f"{both} in one GEMM", f"make them equal, {emulated}"
        allowed = (0, 16) if gemm.name == "wgrad" and first.format in ("bf16", "nvfp4") else (0,)
        if gemm.rht not in allowed:
            return f"{key}.{gemm.name}.rht={gemm.rht}", f"use {' or '.join(map(str, allowed))}, {emulated}"
    return None


def _operand_refusal(operand: OperandConfig, name: str, gemm: _Gemm, key: str) -> tuple[str, str] | None:
    emulated = f"or {key.split('.')[0]}.backend=emulated"
    if operand.format == "bf16":
        return None
    if operand.format not in _TRANSFORMER_ENGINE_FORMATS:
        formats = ", ".join(("bf16", *_TRANSFORMER_ENGINE_FORMATS))
        return f"{key}.format={operand.format}", f"it has no such GEMM; use {formats}, {emulated}"
    if operand.reuse_fprop:
        return f"{key}.reuse_fprop=true", f"tensor cores want scales along the dot product; set it to false, {emulated}"
    if operand.rounding == "stochastic" and (operand.format != "nvfp4" or name != "gradient"):
        return f"{key}.rounding=stochastic", f"it rounds only nvfp4 gradients so; use nearest, {emulated}"
    block = _TRANSFORMER_ENGINE_FORMATS[operand.format]
    if name != "weight" and operand.block != block:
        return f"{key}.block={operand.block}", f"square blocks are for weights there; use {block}, {emulated}"
    if operand.four_over_six and (gemm.rht or operand.rounding == "stochastic"):
        with_it = f"rht={gemm.rht}" if gemm.rht else "rounding=stochastic"
        return f"{key}.four_over_six=true with {with_it}", f"set one of them to false, 0 or nearest, {emulated}"
    return None


def _bf16_blocks(precision: PrecisionConfig, config: Config, key: str) -> None:
    blocks, num_blocks = precision.bf16_blocks, config.model.num_blocks
    for name, count in (("first", blocks.first), ("last", blocks.last)):
        if count < 0:
            raise ConfigError(f"{key}.bf16_blocks.{name}={count} is negative; give 0 or more blocks")
    if blocks.first + blocks.last >= num_blocks:
        raise ConfigError(
            f"{key}.bf16_blocks.first={blocks.first} and last={blocks.last} leave none of the {num_blocks} "
            f"blocks of model.pattern={config.model.pattern} quantized; lower them to less than "
            f"{num_blocks} together, or choose precision=bf16"
        )


def _recheck(precision: PrecisionConfig, quantized: bool, key: str) -> None:
    interval = precision.recheck_interval
    if interval < 0:
        raise ConfigError(f"{key}.recheck_interval={interval} is negative; give a number of steps, or 0 for never")
    if interval and not quantized and precision.switch.when == "never":
        raise ConfigError(
            f"{key}.recheck_interval={interval}, but precision={precision.name} quantizes nothing that could be "
            f"compared; set {key}.recheck_interval=0"
        )


def _switch(precision: PrecisionConfig, key: str) -> None:
    switch = precision.switch
    for name, value, least in (
        ("interval", switch.interval, 1),
        ("patience", switch.patience, 1),
        ("rewarm_steps", switch.rewarm_steps, 0),
    ):
        if value < least:
            raise ConfigError(f"{key}.switch.{name}={value} is too small; give {least} or more")
    if not switch.threshold > 0:
        raise ConfigError(f"{key}.switch.threshold={switch.threshold} is not positive; the paper's is sqrt(3) = 1.732")
    if precision.diagnostics.interval < 0:
        raise ConfigError(f"{key}.diagnostics.interval={precision.diagnostics.interval} is negative; give 0 or more")
    if switch.when != "never" and switch.target == precision.name:
        raise ConfigError(
            f"{key}.switch.when={switch.when} would switch from {precision.name} to itself; set "
            f"{key}.switch.when=never or another target"
        )


def _described(operand: OperandConfig) -> str:
    flags = [name for name in ("four_over_six", "power_of_two_scales") if getattr(operand, name)]
    return " ".join([operand.format, operand.block, operand.rounding, *flags])
