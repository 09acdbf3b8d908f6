"""Refuses recipes that cannot be computed: formats against blocks, blocks against model and batch.

Tokens and output features never appear here: the linear layer pads them to what kernels demand. Input features are what
the user chose, so they must divide (precision/demands.py). Options without effect are for `validate_effects.py`.
"""

from __future__ import annotations

from dataclasses import fields, replace

from megatron_fp4.checks.effects import validate_effects
from megatron_fp4.config.schema import Config, ConfigError, OperandConfig, PrecisionConfig, RecipeConfig
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend_choice import BACKENDS
from megatron_fp4.precision.demands import TILES, block_demands
from megatron_fp4.precision.plan import first_exception, recipe_of
from megatron_fp4.precision.recipe import GEMMS, PLACES, Place, recipe_from_config
from megatron_fp4.precision.refusals import Refusal, first_refusal, recipes_by_key

BLOCKS = {
    "nvfp4": ("1x16", "16x16"),
    "mxfp4": ("1x32", "32x32"),
    "mxfp8": ("1x32", "32x32"),
    "fp8": ("1x128", "128x128"),
}
# The linears of each kind of block: the first reads the hidden state, the second the width that the block works in.
_PROJECTIONS = {"M": ("in_proj", "out_proj"), "*": ("qkv_proj", "out_proj"), "-": ("up_proj", "down_proj")}
RHT_SIZES = (0, 2, 4, 8, 16, 32, 64, 128)


def validate_precision(precision: PrecisionConfig, config: Config, device_type: str, key: str = "precision") -> None:
    """Raise ConfigError if `precision` cannot run with `config`'s model, batch and mesh on `device_type`.

    key: how messages call it; for a switch's target, something like `precision.switch.target=NAME: precision`.
    """
    _exceptions(precision, key)
    quantized = False
    for part, (where, of_part) in enumerate(parts(precision, key), -1):
        _choices(of_part, where)
        for place, operand in _operands(of_part):
            _operand(operand, f"{where}.{place.key}")
        for gemm in GEMMS:
            if (rht := getattr(of_part, gemm).rht) not in RHT_SIZES:
                raise ConfigError(
                    f"{where}.{gemm}.rht={rht} is no size of a Hadamard transform; use a power of two up to 128, or 0 "
                    "for none"
                )
        _reuse(of_part, where)
        if recipe_from_config(of_part).quantized:
            quantized = True
            _sizes(of_part, config, where, part)
    _backend(precision, config, device_type, key)
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
        for letter in exception.blocks:
            if letter not in _PROJECTIONS:
                raise ConfigError(
                    f"{key}.exceptions[{i}].blocks={exception.blocks} has {letter!r}; block letters are "
                    f"{', '.join(_PROJECTIONS)}, and an empty string means all"
                )


def _operands(config: PrecisionConfig) -> list[tuple[Place, OperandConfig]]:
    return [(place, getattr(getattr(config, place.gemm), place.tensor)) for place in PLACES]


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


def _reuse(config: PrecisionConfig, key: str) -> None:
    """`reuse_fprop` asks for the very codes of fprop, so everything about them must be fprop's."""
    for place, operand in _operands(config):
        if not operand.reuse_fprop:
            continue
        where = f"{key}.{place.key}"
        if place.gemm == "fprop" or place.tensor == "gradient":
            why = "fprop has nothing to reuse" if place.gemm == "fprop" else "fprop never sees gradients"
            raise ConfigError(f"{where}.reuse_fprop=true: {why}; set it to false")
        source: OperandConfig = getattr(config.fprop, place.tensor)
        if source.format == "bf16":
            raise ConfigError(
                f"{where}.reuse_fprop=true, but {key}.fprop.{place.tensor}.format=bf16 makes no codes; set it to false"
            )
        for gemm in (place.gemm, "fprop"):
            if rht := getattr(config, gemm).rht:
                raise ConfigError(
                    f"{where}.reuse_fprop=true does not go with {key}.{gemm}.rht={rht}: codes are those of an "
                    "untransformed tensor; set one of them to false or 0"
                )
        if replace(operand, reuse_fprop=False) != source:
            raise ConfigError(
                f"{where} ({_described(operand)}) differs from {key}.fprop.{place.tensor} ({_described(source)}), "
                "whose codes reuse_fprop=true takes; make them equal or set reuse_fprop to false"
            )


def _backend(precision: PrecisionConfig, config: Config, device_type: str, key: str) -> None:
    backend = precision.backend
    if backend in ("auto", "emulated"):
        return
    refusal = first_refusal(backend, recipes_by_key(precision, key), precision.compute_dtype)
    if refusal or (refusal := _size_refusal(precision, config, backend)):
        raise ConfigError(f"{refusal.problem} does not go with {key}.backend={backend}; {refusal.remedy}")
    if device_type != "cuda":
        raise ConfigError(
            f"{key}.backend={backend} needs a CUDA device and this run is on {device_type}; use {key}.backend=emulated"
        )


def size_refusal(config: Config, backend: str) -> Refusal | None:
    """The first size of the model that `backend` cannot take on any chip, before or after the switch, or None."""
    for precision in filter(None, (config.precision, config.after_switch)):
        if refusal := _size_refusal(precision, config, backend):
            return refusal
    return None


def _size_refusal(precision: PrecisionConfig, config: Config, backend: str) -> Refusal | None:
    if backend == "transformer_engine":
        for part, (_, of_part) in enumerate(parts(precision, ""), -1):
            if "nvfp4" in recipe_from_config(of_part).formats and (refusal := _fp4_size_refusal(config, of_part, part)):
                return Refusal(*refusal)
    return None


def _fp4_size_refusal(config: Config, precision: PrecisionConfig, part: int) -> tuple[str, str] | None:
    """What an FP4 GEMM sums over must be whole 16 bytes of codes; tokens and output features are padded."""
    multiple, tensor = te.demands(recipe_from_config(precision)).inputs, config.parallel.tensor
    for name, (size, sharded, linear) in _input_dims(config, precision, part).items():
        shards = tensor if sharded else 1
        if size % (shards * multiple):
            each = f" / parallel.tensor={tensor}" if shards > 1 else ""
            return f"{name}={size}{each}, the input of {linear},", f"use a multiple of {multiple}, or backend=emulated"
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


def _sizes(precision: PrecisionConfig, config: Config, key: str, part: int) -> None:
    """The input features of every quantized linear must be what blocks and transforms demand."""
    multiple = block_demands(recipe_from_config(precision)).inputs
    tensor = config.parallel.tensor
    for name, (size, sharded, linear) in _input_dims(config, precision, part).items():
        shards = tensor if sharded else 1
        if size % (shards * multiple):
            each = f" / parallel.tensor={tensor}" if shards > 1 else ""
            below = size // (shards * multiple) * shards * multiple
            working = f"{below} or {below + shards * multiple}" if below else str(shards * multiple)
            fewer = [str(n) for n in range(1, shards) if shards % n == 0 and size % (n * multiple) == 0]
            ranks = f", or parallel.tensor={' or '.join(fewer)}" if fewer else ""
            raise ConfigError(
                f"{name}={size}{each} is the input of {linear} and not a multiple of {multiple}, as "
                f"{_what_demands(precision, multiple, key)} needs; {working} work{ranks}, or choose another format"
            )


def _what_demands(precision: PrecisionConfig, multiple: int, key: str) -> str:
    """The key of the first operand or transform that wants input features to be a multiple of `multiple`."""
    for place, operand in _operands(precision):
        if TILES.get(operand.format) == multiple:
            return f"{key}.{place.key}.format={operand.format}"
    return f"{key}.fprop.rht={precision.fprop.rht}"


def _input_dims(config: Config, precision: PrecisionConfig, part: int) -> dict[str, tuple[int, bool, str]]:
    """Key -> (input features, whether tensor-parallel ranks share them, the linear), of linears under one recipe.

    part: -1 for the run's own recipe, else the number of an exception.
    """
    model, blocks = config.model, precision.bf16_blocks
    projections = set()
    for block in range(blocks.first, model.num_blocks - blocks.last):
        kind = model.pattern[block]
        for projection in _PROJECTIONS[kind]:
            found = first_exception(f"blocks.{block}.mixer.{projection}", kind, precision.exceptions)
            if (-1 if found is None else found[0]) == part:
                projections.add((kind, projection))
    dims = {}
    if any((kind, into) in projections for kind, (into, _) in _PROJECTIONS.items()):
        dims["model.hidden_dim"] = (model.hidden_dim, False, "the projections into every block")
    if ("-", "down_proj") in projections:
        dims["model.ffn_dim"] = (model.ffn_dim, True, "the FFN's down projection")
    if ("*", "out_proj") in projections:
        q_dim = model.num_query_heads * model.head_dim
        dims["model.num_query_heads x model.head_dim"] = (q_dim, True, "the attention's output projection")
    if ("M", "out_proj") in projections:
        inner = model.mamba_inner_dim
        dims["model.mamba_num_heads x model.mamba_head_dim"] = (inner, True, "the Mamba output projection")
    return dims


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
