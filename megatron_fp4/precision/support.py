"""Which configured precisions can be computed, by which backend, and on which machine.

A user who sets an option expects an effect, so options without effect are refused. The default value of an option is
never refused, nor is what an override may leave behind: the block of an operand whose format became BF16; `amax=shard`
without tensor parallelism; any option of `switch` with `when=never`.

`emulated` computes everything, on any device. `transformer_engine` and `torch` are refused, with the reason, where they
cannot run. `auto` is transformer_engine if the run's recipes, the GPU and the installation all allow it, and otherwise
emulated; the reason is shown with the backend's name, because speed depends on it. Experts whose sizes its grouped
kernels do not take are emulated beside it (`emulated_linears`). `auto` is never `torch`, because it has not run on any
chip yet: the user must name it, and the self-test compares it with the reference.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import torch

from megatron_fp4.config.precision_schema import (
    Bf16BlocksConfig,
    OperandConfig,
    PrecisionConfig,
    RecipeConfig,
    SecondOperandConfig,
)
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Alignment, Backend, block_alignment
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.plan import Plan, recipe_of, recipes_in
from megatron_fp4.precision.recipe import GEMMS, SLOTS, OperandSlot, Recipe, recipe_from_config, uses_amax, uses_signs
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.quantization.formats import FORMATS, NAMES
from megatron_fp4.quantization.ms_eden import GROUP as MS_EDEN_GROUP

# ------------------------------------------------------------------------------------------------------------- options


def validate_precision(precision: PrecisionConfig, device_type: str, key: str = "precision") -> None:
    """Raise ConfigError if `precision` cannot run on `device_type`. key: its key in messages; for a switch's target,
    `precision.switch.target=NAME: precision`."""
    for refusal in _refusals(precision, device_type, key):
        raise ConfigError(refusal)


def refuse_sums(config: Config) -> None:
    """Raise ConfigError if `precision.sums=blackwell` meets a GEMM of unknown order, or a native backend."""
    sums, backend = config.precision.sums, config.precision.backend
    if sums == "fp32":
        return
    if backend not in ("auto", "emulated"):
        raise ConfigError(
            f"precision.sums={sums} is for the emulation, and precision.backend={backend} adds in the order of its "
            "chip; use precision.backend=emulated, or leave precision.sums out"
        )
    for key, precision in precisions_by_key(config).items():
        for where, recipe in recipes_by_key(precision, key).items():
            for name, gemm in recipe.gemms.items():
                formats = [operand.format for operand in gemm.operands]
                along_other = any(operand.source == "codes" and operand.block[0] == 1 for operand in gemm.operands)
                if gemm.quantized and (formats != ["nvfp4", "nvfp4"] or along_other):
                    why = f"multiplies {' and '.join(dict.fromkeys(formats))}"
                    raise ConfigError(
                        f"precision.sums={sums}, but {where}.{name} {'has source=codes' if along_other else why}: "
                        "the order of sums is published for nvfp4 with scales along the dot product only; use "
                        "precision.sums=fp32, or such a recipe"
                    )


def refuse_nothing_quantized(plan: Plan, precision: PrecisionConfig, key: str = "precision") -> None:
    """Raise ConfigError if `precision` has a quantized recipe, but no linear in `plan` is quantized."""
    recipes = recipes_by_key(precision, key).values()
    if plan.rows and not plan.num_quantized and any(recipe.quantized for recipe in recipes):
        first = plan.rows[0]
        raise ConfigError(
            f"{key}={precision.name} leaves none of the {len(plan.rows)} linears quantized ({first.linear.name}: "
            f"{first.reason}); remove some from bf16_blocks or exceptions, or choose bf16"
        )


def precisions_by_key(config: Config) -> dict[str, PrecisionConfig]:
    """The precisions of a run before and after its switch, by their keys in messages."""
    found = {"precision": config.precision}
    if config.after_switch is not None:
        found[f"precision.switch.target={config.precision.switch.target}: precision"] = config.after_switch
    return found


def recipes_by_key(precision: PrecisionConfig, key: str) -> dict[str, Recipe]:
    """The recipes of `precision` and of its exceptions, by their keys in messages. key: that of `precision`."""
    return {where: recipe_from_config(part) for where, part in _parts(precision, key)}


def _parts(precision: PrecisionConfig, key: str) -> list[tuple[str, RecipeConfig]]:
    found: list[tuple[str, RecipeConfig]] = [(key, precision)]
    for i, exception in enumerate(precision.exceptions):
        found.append((f"{key}.exceptions[{i}].precision={exception.precision}: precision", recipe_of(exception)))
    return found


def _refusals(precision: PrecisionConfig, device_type: str, key: str) -> Iterator[str]:
    for i, exception in enumerate(precision.exceptions):
        if not exception.names:
            yield f"{key}.exceptions[{i}].names=[] matches no linear; give patterns, or remove the exception"
    for where, part in _parts(precision, key):
        for slot in SLOTS:
            operand: OperandConfig = attrgetter(slot.key)(part)
            if operand.format != "bf16":
                yield from _operand(operand, part, slot, where)
        yield from _source(part, where)
    recipes = recipes_by_key(precision, key)
    if precision.backend not in ("auto", "emulated"):
        for where, recipe in recipes.items():
            if refusal := first_refusal(precision.backend, recipe, precision.compute_dtype, where):
                problem, remedy = refusal
                yield f"{problem} does not go with {key}.backend={precision.backend}; {remedy}"
        if device_type != "cuda":
            yield (
                f"{key}.backend={precision.backend} needs a CUDA device and this run is on {device_type}; use "
                f"{key}.backend=emulated"
            )
    switch = precision.switch
    if switch.when != "never" and switch.target == precision.name:
        yield (
            f"{key}.switch.when={switch.when} would switch from {precision.name} to itself; set "
            f"{key}.switch.when=never or another target"
        )
    noisy = any(recipe.dgrad.quantized or recipe.wgrad.quantized for recipe in recipes.values())
    if switch.when == "gradient_noise" and not noisy:
        yield (
            f"{key}.switch.when=gradient_noise never switches: dgrad and wgrad are not quantized, so there is no "
            "quantization noise; give a step, a fraction, before_decay or never"
        )
    yield from _without_effect(precision, list(recipes.values()), key)


def _operand(operand: OperandConfig, config: RecipeConfig, slot: OperandSlot, key: str) -> Iterator[str]:
    """Refusals of options that the operand's format does not have.

    MS-EDEN is unbiased, which the backward pass needs; in the forward pass rounding to nearest has smaller errors.
    MS-EDEN needs groups that a transform with random signs has mixed.
    """
    given = f"{key}.{slot.key}"
    if operand.format not in FORMATS:
        yield f"{given}.format={operand.format} is not known; choose one of bf16, {NAMES}"
        return
    form = FORMATS[operand.format]
    allowed = {
        "rounding": ["nearest", "stochastic", "ms_eden"] if form.stochastic else ["nearest"],
        "block": [f"{rows}x{columns}" for rows, columns in form.blocks if len(form.blocks) > 1] or [operand.block],
        "four_over_six": ["none", "absolute", "squared"] if "four_over_six" in form.options else ["none"],
    }
    for option, values in allowed.items():
        if (value := getattr(operand, option)) not in values:
            yield f"{given}.{option}={value} does not go with format={operand.format}; use {' or '.join(values)}"
    if operand.rounding != "ms_eden":
        return
    if slot.gemm == "fprop":
        yield f"{given}.rounding=ms_eden is for dgrad and wgrad; use nearest"
    required = {
        f"{slot.key}.format": "nvfp4",
        f"{slot.key}.block": "1x16",
        f"{slot.key}.four_over_six": "none",
        f"{slot.gemm}.rht": MS_EDEN_GROUP,
        "rht_signs": "fresh",
    }
    for option, value in required.items():
        if (other := attrgetter(option)(config)) != value:
            yield f"{given}.rounding=ms_eden does not go with {key}.{option}={other}; set {key}.{option}={value}"


def _source(config: RecipeConfig, key: str) -> Iterator[str]:
    """Refusals of a `source` that needs another operand in fprop. `forward` and `codes` both start from fprop's codes,
    made without a transform. `forward` quantizes their values, which must be exact in BF16. `codes` uses the codes
    unchanged, so all options must equal fprop's."""
    for gemm, tensor in (("dgrad", "weight"), ("wgrad", "activation")):
        operand: SecondOperandConfig = getattr(getattr(config, gemm), tensor)
        if operand.source == "tensor" or operand.format == "bf16":
            continue
        given, fprop = f"{key}.{gemm}.{tensor}.source={operand.source}", getattr(config.fprop, tensor)
        if fprop.format == "bf16" or (operand.source == "forward" and not FORMATS[fprop.format].exact):
            why = "makes no codes" if fprop.format == "bf16" else "has scales that are not exact in BF16"
            yield f"{given}, but {key}.fprop.{tensor}.format={fprop.format} {why}; set source to tensor"
        for name in ("fprop", gemm) if operand.source == "codes" else ("fprop",):
            if rht := getattr(config, name).rht:
                yield f"{given} needs codes without a transform, but {key}.{name}.rht={rht}; use source=tensor or rht=0"
        for option in (field.name for field in fields(OperandConfig) if operand.source == "codes"):
            value, fprop_value = getattr(operand, option), getattr(fprop, option)
            if value != fprop_value:
                yield (
                    f"{given} uses the codes of fprop, but {option}={value} differs from "
                    f"{key}.fprop.{tensor}.{option}={fprop_value}; make them equal, or set source to tensor"
                )


def _without_effect(precision: PrecisionConfig, recipes: Sequence[Recipe], key: str) -> Iterator[str]:
    """Refusals of options without effect. recipes: the precision's own and those of its exceptions, in this order."""
    recipe, switch, why = recipes[0], precision.switch.when, dict[str, str]()
    nothing = "nothing is quantized; leave it out, or choose a quantized recipe, such as precision=nvfp4"
    if not recipe.quantized:
        of_operands = (f"{slot.key}.{option}" for slot in SLOTS for option in ("rounding", "block"))
        why |= dict.fromkeys((*(f"{gemm}.rht" for gemm in GEMMS), *of_operands), nothing)
    if not uses_signs(recipe.gemms.values()):
        why["rht_signs"] = f"no GEMM has a Hadamard transform; leave it out, or set {key}.wgrad.rht=16"
    if not uses_amax(recipe.gemms.values()):
        why["amax"] = "no format has a scale of a tensor or a row; leave it out, or choose nvfp4"
    if not any(other.quantized for other in recipes):
        why |= {f"bf16_blocks.{field.name}": nothing for field in fields(Bf16BlocksConfig)}
        if switch == "never":
            why |= {"diagnostics.interval": nothing, "recheck_interval": nothing, "sums": nothing}
    if switch not in ("never", "gradient_noise"):
        for name in ("threshold", "interval"):
            why[f"switch.{name}"] = f"only {key}.switch.when=gradient_noise uses it; leave it out, or set that"
    default = PrecisionConfig()
    for option, reason in why.items():
        if (value := attrgetter(option)(precision)) != attrgetter(option)(default):
            yield f"{key}.{option}={value} has no effect: {reason}"


# --------------------------------------------------------------------------------------------------------------- sizes


def check_sizes(plan: Plan, tensor: int, backend: str) -> None:
    """Raise ConfigError unless blocks and transforms divide the input features of every quantized linear of `plan`.

    The linear pads tokens and output features, so these need no check. tensor: the tensor-parallel ranks, which shard
    the input features of some linears. backend: as in `precision.backend`.
    """
    if problem := _size_problem(plan, tensor, block_alignment):
        raise ConfigError(f"{problem}, as its format or transform requires; use a multiple, or choose another format")
    for row in plan.rows:
        # If ranks split a transform's group, each would mix other features than one rank alone. Groups of rows (KV
        # heads, state groups) are padded one by one, and each is on one rank.
        linear, multiple = row.linear, tensor * block_alignment(row.recipe).group_outputs
        shared = tensor > 1 and not linear.input_sharded and linear.groups == 1 and linear.experts == 1
        if row.recipe.dgrad.rht and shared and linear.out_features % multiple:
            raise ConfigError(
                f"{linear.out_features} output features of {linear.title} are not a multiple of "
                f"parallel.tensor={tensor} x {multiple // tensor} = {multiple}, as {row.key}.dgrad.rht="
                f"{row.recipe.dgrad.rht} requires; use a multiple, fewer ranks, or a smaller transform"
            )
        if linear.experts > 1 and backend == "torch":
            raise ConfigError(
                f"precision.backend={backend} does not go with {linear.name}: it has no GEMM for experts; use "
                "precision.backend=auto or emulated"
            )
        if linear.experts > 1 and linear.out_features % (outputs := block_alignment(row.recipe).outputs):
            raise ConfigError(
                f"{linear.out_features} output features of {linear.title} are not a multiple of {outputs}, as experts "
                f"need with the blocks of {row.key}={row.recipe.name}; use a multiple, or choose another format"
            )
    if backend == "transformer_engine" and (problem := _size_problem(plan, tensor, te.alignment)):
        remedy = "use a multiple, or precision.backend=emulated"
        raise ConfigError(f"{problem}, as precision.backend={backend} requires; {remedy}")


def refuse_emulated_experts(plan: Plan, backend: str) -> None:
    """Raise ConfigError if `precision.backend=transformer_engine` would emulate linears of experts."""
    for name, why in emulated_linears(plan, backend).items():
        if backend == "transformer_engine":
            raise ConfigError(
                f"precision.backend={backend} does not go with {name}: {why}; use precision.backend=auto, which "
                "emulates such experts alone, or emulated"
            )


def emulated_linears(plan: Plan, backend: str) -> dict[str, str]:
    """The linears that a run with `backend` emulates: name -> why. Why is empty if the backend emulates all of them."""
    if backend != "transformer_engine":
        return {row.linear.name: "" for row in plan.rows if backend == "emulated"}
    rows = [(row.recipe, row.linear) for row in plan.rows if row.linear.experts > 1]
    whys = {of.name: te.emulated_experts(recipe, of.in_features, of.out_features) for recipe, of in rows}
    return {name: why for name, why in whys.items() if why}


def _size_problem(plan: Plan, tensor: int, alignment: Callable[[Recipe], Alignment]) -> str:
    """The first quantized linear whose input features on a rank are not the multiple, in words; empty if none."""
    for row in plan.rows:
        linear, ranks = row.linear, tensor if row.linear.input_sharded else 1
        inputs = alignment(row.recipe).inputs
        if row.recipe.quantized and linear.in_features % (ranks * inputs):
            given = f"{linear.input_key}={linear.in_features}, the input of {linear.title},"
            of_ranks = f"parallel.tensor={ranks} x {inputs} = " if ranks > 1 else ""
            return f"{given} is not a multiple of {of_ranks}{ranks * inputs}"
    return ""


# ------------------------------------------------------------------------------------------------- what a backend takes

BACKENDS: dict[str, Callable[[], Backend]] = {
    "emulated": EmulatedBackend,
    "transformer_engine": te.TransformerEngineBackend,
    "torch": TorchBackend,
}
_HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL = ((9, 0),), ((10, 0), (10, 3)), ((12, 0), (12, 1))
# backend -> the formats that it multiplies -> the compute capabilities on which it does so.
TAKES: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
    "transformer_engine": {
        "nvfp4": (*_BLACKWELL, *_CONSUMER_BLACKWELL),
        "mxfp8": _BLACKWELL,
        "fp8": (*_HOPPER, *_BLACKWELL),
    },
    "torch": {"nvfp4": (*_BLACKWELL, *_CONSUMER_BLACKWELL), "mxfp8": (*_BLACKWELL, *_CONSUMER_BLACKWELL)},
}
# The first CUDA version whose cuBLAS multiplies block-scaled codes.
_TORCH_CUDA = (12, 8)


def first_refusal(backend: str, recipe: Recipe, compute_dtype: str, key: str = "precision") -> tuple[str, str] | None:
    """The first option of `recipe` that a native backend cannot compute on any chip: (key=value, remedy), or None."""
    formats, native = TAKES[backend], backend == "transformer_engine"
    # (whether it is refused, the option and its value, what to use instead)
    checks: list[tuple[bool, str, str]] = [
        (compute_dtype != "bfloat16", f"compute_dtype={compute_dtype}", "bfloat16"),
        (native and recipe.rht_signs == "fresh", "rht_signs=fresh", "fixed"),
    ]
    for slot, operand in recipe.operands.items():
        rht, stochastic, six = recipe.gemms[slot.gemm].rht, operand.rounding == "stochastic", operand.four_over_six
        can_draw = operand.format == "nvfp4" and slot.tensor == "gradient"
        rows, columns = operand.block
        square = rows > 1 and (slot.tensor != "weight" or operand.format == "mxfp8")
        of_slot = [
            (operand.format not in formats, f"format={operand.format}", f"{' or '.join(formats)} or bf16"),
            (operand.source == "codes", "source=codes", "tensor: tensor cores need scales along the dot product"),
            (native and operand.rounding == "ms_eden", "rounding=ms_eden", "stochastic or nearest"),
            (native and operand.source == "forward", "source=forward", "tensor"),
            (native and stochastic and not can_draw, "rounding=stochastic", "nearest: only nvfp4 gradients have it"),
            (native and square, f"block={rows}x{columns}", f"1x{columns}: only nvfp4 and fp8 weights have squares"),
            (native and bool(six) and (rht > 0 or stochastic), f"four_over_six={six}", "none"),
        ]
        checks += [(refused, f"{slot.key}.{what}", use) for refused, what, use in of_slot if operand.quantized]
    for name, gemm in recipe.gemms.items():
        left, right = gemm.left.format, gemm.right.format
        sizes = (0, 16) if name == "wgrad" and left == "nvfp4" else (0,)
        checks.append((left != right, f"{name} of {left} and {right}", "equal formats in one GEMM"))
        checks.append((native and gemm.rht not in sizes, f"{name}.rht={gemm.rht}", " or ".join(map(str, sizes))))
    found = ((f"{key}.{what}", f"use {use}, or precision.backend=emulated") for refused, what, use in checks if refused)
    return next(found, None)


def unsupported(backend: str, recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why no release of a backend multiplies the operands of `recipe` on a GPU of this compute capability, or None."""
    here = f"this GPU has {capability[0]}.{capability[1]}"
    for name in sorted(recipe.formats):
        if capability not in (chips := TAKES[backend][name]):
            supported = ", ".join(f"{major}.{minor}" for major, minor in chips)
            return f"native {name} needs compute capability {supported} and {here}"
    fp8 = [operand for operand in recipe.operands.values() if operand.format == "fp8"]
    if capability in _BLACKWELL and not all(operand.power_of_two_scales for operand in fp8):
        return f"{here}, whose FP8 GEMM only takes powers of two as scales (precision.fp8_power_of_two_scales=true)"
    return None


def _unsupported_here(backend: str, recipes: Iterable[Recipe]) -> str | None:
    """Why a backend cannot compute `recipes` on this machine's GPU with the installed software; None if it can."""
    cuda = torch.version.cuda
    if cuda is None:
        return "this PyTorch is built without CUDA"
    if backend == "torch" and tuple(map(int, cuda.split(".")[:2])) < _TORCH_CUDA:
        return f"block-scaled GEMMs need CUDA 12.8 and this PyTorch is built with {cuda}"
    capability = torch.cuda.get_device_capability()
    for recipe in recipes:
        if reason := unsupported(backend, recipe, capability):
            return reason
        if backend == "transformer_engine" and (reason := _outdated(recipe, capability)):
            return reason
    return te.not_installed() if backend == "transformer_engine" else None


def _outdated(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why the installed Transformer Engine is too old for `recipe` on this GPU; None if it is not, or not installed. By
    the sources of releases 2.9 to 2.20: older ones compute other numbers than the reference, or none."""
    four_over_six = any(operand.four_over_six for operand in recipe.operands.values())
    # (whether the recipe needs a release, the release, what earlier ones do)
    rows = [
        (True, (2, 14), "NVFP4's copies share their draws and block scales are rounded in another order"),
        (four_over_six, (2, 17), "there is no four-over-six"),
        (capability[0] == 12, (2, 19), "stochastic rounding makes every gradient zero on 12.x"),
    ]
    installed = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", installed or "")
    if numbers is None:
        return None
    release = (int(numbers[1]), int(numbers[2]))
    for needs, (major, minor), why in reversed(rows):
        if needs and release < (major, minor):
            needed = f"{recipe.name} needs {major}.{minor} or newer: before, {why}"
            return f"Transformer Engine {installed} is installed and {needed}"
    return None


def installed_version() -> str | None:
    """The version of the installed Transformer Engine, such as `2.20.2`; None if it is not installed."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, the reason for the choice, and for the emulation its order of sums, `precision.sums`."""

    name: str
    reason: str
    sums: str = "fp32"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def open(self) -> Backend:
        return EmulatedBackend(self.sums) if self.name == "emulated" else BACKENDS[self.name]()


def choose_backend(config: Config, device_type: str, plans: Sequence[Plan | None]) -> BackendChoice:
    """The backend for a checked `config` on this machine's `device_type`.

    plans: before and after the switch; None without a switch. Raises ConfigError if `precision.backend` is
    transformer_engine or torch, which cannot run here, or if an environment variable makes it inexact.
    """
    wanted = config.precision.backend
    if (sums := config.precision.sums) != "fp32":
        return BackendChoice("emulated", f"set by precision.sums={sums}", sums)
    if wanted == "emulated":
        return BackendChoice("emulated", "set by precision.backend")
    recipes = [recipe for recipe in recipes_in(plans) if recipe.quantized]
    if wanted == "auto" and not recipes:
        return BackendChoice("emulated", "nothing is quantized")
    native = "transformer_engine" if wanted == "auto" else wanted
    reason: str | None = f"the run is on {device_type}"
    if device_type == "cuda":
        reason = why_not_native(native, config, plans) or _unsupported_here(native, recipes)
    if reason is not None:
        if wanted == "auto":
            return BackendChoice("emulated", f"not {native}: {reason}")
        raise ConfigError(f"precision.backend={native}: {reason}; use precision.backend=emulated")
    if native == "transformer_engine" and (variable := te.fast_math_variable()):
        raise ConfigError(
            f"{variable} is set and makes Transformer Engine quantize inexactly; unset it, or use "
            "precision.backend=emulated"
        )
    why = {"transformer_engine": "native on", "torch": "emulated codes, tensor cores of"}[native]
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return BackendChoice(native, f"{why} compute capability {capability}")


def why_not_native(native: str, config: Config, plans: Iterable[Plan | None]) -> str | None:
    """Why no chip can compute the linears of a checked `config` with the backend `native`; None: one may."""
    for plan in (plan for plan in plans if plan is not None):
        emulated = emulated_linears(plan, native)
        plan = Plan(tuple(row for row in plan.rows if row.linear.name not in emulated))
        for row in plan.rows:
            if refusal := first_refusal(native, row.recipe, config.precision.compute_dtype, row.key):
                return f"it cannot compute {refusal[0]}"
        if native == "transformer_engine" and (problem := _size_problem(plan, config.parallel.tensor, te.alignment)):
            return problem
    return None
