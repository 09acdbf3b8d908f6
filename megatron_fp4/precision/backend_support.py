"""What each backend cannot compute: anywhere, on a chip, or with what is installed; and which one a run computes with.

`emulated` can all, on any device. `transformer_engine` and `torch` are refused, with the reason, where they cannot run.
`auto` is transformer_engine where the run's recipes, the GPU and the installation all allow it, and else emulated;
either way the reason is shown with the backend's name, because speed depends on it. `auto` is never `torch`, which no
chip has run yet: it has to be named, and the self-test says whether it computes what it should.

What releases of Transformer Engine lack was read from its sources (2.9 to 2.20): one that lacks something computes
other numbers than the reference, or none, and is refused by name before the self-test would find it.

Sizes: input features are what a user chose and must be multiples of what blocks and GEMMs demand (`backend.Alignment`);
tokens and output features never appear here, because the linear layer pads them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fp4.config.precision_schema import PrecisionConfig
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Alignment, Backend, block_alignment
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.plan import Plan, PlannedLinear, recipe_of
from megatron_fp4.precision.recipe import SLOTS, Operand, OperandSlot, Recipe, recipe_from_config
from megatron_fp4.precision.torch_scaled_mm import FORMATS as TORCH_FORMATS
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.quantization.formats import format_of

TE_FORMATS = ("nvfp4", "mxfp8", "fp8")
# Blackwell: data-centre chips, and those of consumers and workstations.
FP4_CAPABILITIES = ((10, 0), (10, 3), (12, 0), (12, 1))
# The first CUDA whose cuBLAS multiplies block-scaled codes.
_TORCH_CUDA = (12, 8)
_EMULATED = "or precision.backend=emulated"


class Refusal(NamedTuple):
    """What cannot be computed, by its key and value, and what to do about it."""

    problem: str
    remedy: str


def recipes_by_key(precision: PrecisionConfig, key: str) -> dict[str, Recipe]:
    """The recipe of `precision`, which messages call `key`, and those of its exceptions, by what messages call them."""
    found = {key: recipe_from_config(precision)}
    for i, exception in enumerate(precision.exceptions):
        where = f"{key}.exceptions[{i}].precision={exception.precision}: precision"
        found[where] = recipe_from_config(recipe_of(exception))
    return found


def first_refusal(backend: str, recipes: Mapping[str, Recipe], compute_dtype: str) -> Refusal | None:
    """The first thing in `recipes` (by the keys of `recipes_by_key`) that a backend cannot compute on any chip."""
    found = (refusal for key, recipe in recipes.items() for refusal in _refusals(backend, recipe, compute_dtype, key))
    return next(found, None)


def _refusals(backend: str, recipe: Recipe, compute_dtype: str, key: str) -> Iterator[Refusal]:
    if backend == "emulated":
        return
    if compute_dtype != "bfloat16":
        yield Refusal(f"{key}.compute_dtype={compute_dtype}", f"use bfloat16, {_EMULATED}")
    native = backend == "transformer_engine"
    if native and recipe.rht_signs == "fresh":
        yield Refusal(f"{key}.rht_signs=fresh", f"use fixed, {_EMULATED}")
    for name, gemm in recipe.gemms.items():
        left, right = (slot for slot in SLOTS if slot.gemm == name)
        for slot in (left, right):
            if recipe[slot].quantized:
                where = f"{key}.{slot.key}"
                yield from _of_any_tensor_core(recipe[slot], where, TE_FORMATS if native else tuple(TORCH_FORMATS))
                yield from _of_transformer_engine(recipe[slot], slot, gemm.rht, where) if native else ()
        if gemm.left.format != gemm.right.format:
            both = f"{key}.{left.key}.format={gemm.left.format} and {right.tensor}.format={gemm.right.format}"
            yield Refusal(f"{both} in one GEMM", f"make them equal, {_EMULATED}")
        sizes = (0, 16) if name == "wgrad" and gemm.left.format == "nvfp4" else (0,)
        if native and gemm.rht not in sizes:
            yield Refusal(f"{key}.{name}.rht={gemm.rht}", f"use {' or '.join(map(str, sizes))}, {_EMULATED}")


def _of_any_tensor_core(operand: Operand, key: str, formats: tuple[str, ...]) -> Iterator[Refusal]:
    if operand.format not in formats:
        remedy = f"it multiplies {' and '.join(formats)}; use one of them or bf16, {_EMULATED}"
        yield Refusal(f"{key}.format={operand.format}", remedy)
    if operand.source == "codes":
        along = "tensor cores want scales along the dot product"
        yield Refusal(f"{key}.source=codes", f"{along}; set it to tensor, {_EMULATED}")


def _of_transformer_engine(operand: Operand, slot: OperandSlot, rht: int, key: str) -> Iterator[Refusal]:
    drawn, (rows, columns) = operand.rounding == "stochastic", operand.block
    if operand.rounding == "ms_eden":
        yield Refusal(f"{key}.rounding=ms_eden", f"it has no such quantizer; use stochastic or nearest, {_EMULATED}")
    if operand.source == "forward":
        yield Refusal(f"{key}.source=forward", f"its quantizers take tensors; use tensor, {_EMULATED}")
    if drawn and (operand.format != "nvfp4" or slot.tensor != "gradient"):
        yield Refusal(f"{key}.rounding=stochastic", f"it rounds only nvfp4 gradients so; use nearest, {_EMULATED}")
    if rows > 1 and slot.tensor != "weight":
        remedy = f"square blocks are for weights there; use 1x{columns}, {_EMULATED}"
        yield Refusal(f"{key}.block={rows}x{columns}", remedy)
    if operand.four_over_six and (rht or drawn):
        other = f"rht={rht}" if rht else "rounding=stochastic"
        yield Refusal(f"{key}.four_over_six=true with {other}", f"set one of them to false, 0 or nearest, {_EMULATED}")


# ------------------------------------------------------------------------------------------------------- this machine


def refused_here(backend: str, recipes: Iterable[Recipe], device_type: str) -> str | None:
    """Why a backend that could compute `recipes` cannot on this machine's `device_type`, or None if it can."""
    if backend == "emulated":
        return None
    if device_type != "cuda":
        return f"the run is on {device_type}"
    if torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability()
    for recipe in recipes:
        if backend == "torch":
            reason = torch_unsupported(recipe, capability)
        else:
            reason = transformer_engine_unsupported(recipe, capability) or outdated(recipe, capability)
        if reason is not None:
            return reason
    return te.not_installed() if backend == "transformer_engine" else None


def torch_unsupported(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why `scaled_mm` cannot multiply the operands of `recipe` on such a GPU, with this PyTorch, or None if it can."""
    if not recipe.quantized:
        return None
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < _TORCH_CUDA:
        needed = ".".join(map(str, _TORCH_CUDA))
        return f"block-scaled GEMMs need CUDA {needed} and this PyTorch is built with {torch.version.cuda}"
    if capability not in FP4_CAPABILITIES:
        chips = ", ".join(f"{major}.{minor}" for major, minor in FP4_CAPABILITIES)
        return f"block-scaled GEMMs need compute capability {chips} and this GPU has {capability[0]}.{capability[1]}"
    return None


def transformer_engine_unsupported(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why no release of Transformer Engine can train `recipe` on a GPU of this compute capability, or None."""
    chip = f"this GPU has {capability[0]}.{capability[1]}"
    if "nvfp4" in recipe.formats and capability not in FP4_CAPABILITIES:
        return f"native NVFP4 training needs compute capability 10.0, 10.3, 12.0 or 12.1 and {chip}"
    if "mxfp8" in recipe.formats and capability[0] != 10:
        return f"native MXFP8 needs compute capability 10.x and {chip}"
    if "fp8" in recipe.formats:
        if capability != (9, 0) and capability[0] != 10:
            return f"native FP8 block scaling needs compute capability 9.0 or 10.x and {chip}"
        fp32_scales = any(op.format == "fp8" and not op.power_of_two_scales for op in recipe.operands.values())
        if fp32_scales and capability[0] == 10:
            return f"{chip}, whose FP8 GEMM takes no scales but powers of two (precision.fp8_power_of_two_scales=true)"
    return None


# ------------------------------------------------------------------------------------- releases of Transformer Engine


def _lacking(recipe: Recipe, capability: tuple[int, int]) -> Iterator[tuple[tuple[int, int], str]]:
    """Releases from which on something is there that `recipe` needs on such a GPU, and what earlier ones do."""
    operands = recipe.operands.values()
    drawn, of_12 = any(operand.rounding == "stochastic" for operand in operands), capability[0] == 12
    if recipe.quantized:
        yield (2, 10), "GEMMs want a workspace from their caller"
    if drawn and recipe.wgrad.rht:
        yield (2, 12), "dgrad's and wgrad's copies of a gradient are rounded by the same draws"
    if "nvfp4" in recipe.formats:
        yield (2, 14), "NVFP4 block scales are rounded in another order"
    if of_12 and recipe.wgrad.rht:
        yield (2, 16), "the Hadamard transform takes a kernel that 12.x cannot run"
    if any(operand.four_over_six for operand in operands):
        yield (2, 17), "there is no four-over-six"
    if any(operand.format == "mxfp8" and operand.block[0] > 1 for operand in operands):
        yield (2, 20), "square MXFP8 blocks were not seen in the sources"
    if of_12 and drawn:
        yield (2, 19), "stochastic rounding makes every gradient zero on 12.x"


def outdated(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why the installed release is too old for `recipe` on this GPU, or None if it is not, or if none is installed."""
    installed = installed_version()
    numbers = None if installed is None else re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None:
        return None
    release = (int(numbers[1]), int(numbers[2]))
    lacking = [(needed, before) for needed, before in _lacking(recipe, capability) if release < needed]
    if not lacking:
        return None
    reasons = ", ".join(f"before {major}.{minor} {before}" for (major, minor), before in lacking)
    newest = ".".join(map(str, max(lacking)[0]))
    return f"Transformer Engine {installed} is installed and precision={recipe.name} needs {newest} or newer: {reasons}"


def installed_version() -> str | None:
    """The version of the installed package, such as `2.20.2`; None if there is none."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------------------- sizes


def check_sizes(plan: Plan, tensor: int, backend: str) -> None:
    """Raise ConfigError unless every quantized linear of `plan` has input features that blocks and transforms divide.

    tensor: ranks that share the input features of some linears. backend: as `precision.backend` has it.
    """

    def fewer_ranks(size: int, multiple: int, shards: int) -> str:
        fewer = [str(n) for n in range(1, shards) if shards % n == 0 and size % (n * multiple) == 0]
        return f", or parallel.tensor={' or '.join(fewer)}" if fewer else ""

    if found := _misfit(plan, tensor, block_alignment):
        row, multiple = found
        size, shards = row.linear.in_features, tensor if row.linear.input_sharded else 1
        below = size // (shards * multiple) * shards * multiple
        working = f"{below} or {below + shards * multiple}" if below else str(shards * multiple)
        by_format = (
            f"{slot.key}.format={operand.format}"
            for slot, operand in row.recipe.operands.items()
            if operand.quantized and format_of(operand.format).tile == multiple
        )
        raise ConfigError(
            f"{_inputs(row, tensor)} is the input of {row.linear.title} and not a multiple of {multiple}, as "
            f"{row.key}.{next(by_format, f'fprop.rht={row.recipe.fprop.rht}')} needs; {working} work"
            f"{fewer_ranks(size, multiple, shards)}, or choose another format"
        )
    for row in plan.rows:
        # Ranks share output features so that one transform would mix those of two. Groups (KV heads, state groups) are
        # padded one by one and never lie on two ranks.
        multiple, size = block_alignment(row.recipe).group_outputs, row.linear.out_features
        shared = tensor > 1 and not row.linear.input_sharded and row.linear.groups == 1
        if row.recipe.dgrad.rht and shared and size % (tensor * multiple):
            raise ConfigError(
                f"{size} output features of {row.linear.title} / parallel.tensor={tensor} are not a multiple of "
                f"{multiple}, as {row.key}.dgrad.rht={row.recipe.dgrad.rht} needs, which mixes as many; use a multiple "
                f"of {tensor * multiple}{fewer_ranks(size, multiple, tensor)}, or a smaller transform"
            )
    if refusal := size_refusal([plan], tensor, backend):
        raise ConfigError(f"{refusal.problem} does not go with precision.backend={backend}; {refusal.remedy}")


def size_refusal(plans: Iterable[Plan | None], tensor: int, backend: str) -> Refusal | None:
    """The first input of a linear that the backend's GEMMs cannot sum over although blocks divide it, or None."""
    for plan in plans:
        if backend == "transformer_engine" and plan is not None and (found := _misfit(plan, tensor, te.alignment)):
            row, multiple = found
            problem = f"{_inputs(row, tensor)}, the input of {row.linear.title},"
            return Refusal(problem, f"use a multiple of {multiple}, or precision.backend=emulated")
    return None


def _misfit(plan: Plan, tensor: int, alignment: Callable[[Recipe], Alignment]) -> tuple[PlannedLinear, int] | None:
    """The first quantized linear whose input features on a rank are not a multiple of what is demanded, and that."""
    for row in plan.rows:
        multiple, shards = alignment(row.recipe).inputs, tensor if row.linear.input_sharded else 1
        if row.recipe.quantized and row.linear.in_features % (shards * multiple):
            return row, multiple
    return None


def _inputs(row: PlannedLinear, tensor: int) -> str:
    each = f" / parallel.tensor={tensor}" if row.linear.input_sharded and tensor > 1 else ""
    return f"{row.linear.input_key}={row.linear.in_features}{each}"


# -------------------------------------------------------------------------------------------------------------- choice

BACKENDS: dict[str, Callable[[], Backend]] = {
    "emulated": lambda: EMULATED,
    "transformer_engine": te.TransformerEngineBackend,
    "torch": TorchBackend,
}


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and why this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def open(self) -> Backend:
        """The backend itself."""
        return BACKENDS[self.name]()


def choose_backend(config: Config, device_type: str, plans: Iterable[Plan | None]) -> BackendChoice:
    """The backend for a checked `config`, before and after its switch, on this machine's `device_type`.

    plans: before and after the switch, None without one.
    Raises ConfigError if `precision.backend=transformer_engine` or `torch` cannot be had, or if the first would be used
    and an environment variable asks it for inexact arithmetic.
    """
    wanted = config.precision.backend
    if wanted == "emulated":
        return BackendChoice("emulated", "as precision.backend says")
    recipes = recipes_by_key(config.precision, "precision")
    if config.after_switch is not None:
        key = f"precision.switch.target={config.precision.switch.target}: precision"
        recipes |= recipes_by_key(config.after_switch, key)
    if wanted == "auto" and not any(recipe.quantized for recipe in recipes.values()):
        return BackendChoice("emulated", "nothing is quantized")
    native = "transformer_engine" if wanted == "auto" else wanted
    refusal = first_refusal(native, recipes, config.precision.compute_dtype)
    refusal = refusal or size_refusal(plans, config.parallel.tensor, native)
    reason = f"it cannot do {refusal.problem}" if refusal else refused_here(native, recipes.values(), device_type)
    if reason is not None and wanted == "auto":
        return BackendChoice("emulated", f"not {native}: {reason}")
    if reason is not None:
        same = ", which has the same codes" if native == "torch" else ""
        raise ConfigError(f"precision.backend={native}: {reason}; use precision.backend=emulated{same}")
    if native == "transformer_engine" and (variable := te.fast_math_variable()):
        raise ConfigError(
            f"{variable} is set, which makes Transformer Engine quantize inexactly; unset it, or use "
            "precision.backend=emulated"
        )
    why = {"transformer_engine": "native on", "torch": "our codes, tensor cores of"}[native]
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return BackendChoice(native, f"{why} compute capability {capability}")


def agreed_backend(choice: BackendChoice) -> BackendChoice:
    """`choice`, if all ranks chose alike; a collective. Raises ConfigError if they did not."""
    choices: list[BackendChoice] = [choice] * dist.get_world_size()
    dist.all_gather_object(choices, choice)
    for rank, other in enumerate(choices):
        if other.name != choices[0].name:
            raise ConfigError(
                f"precision.backend=auto is {choices[0]} on rank 0, but {other} on rank {rank}; make the machines "
                "alike, or name the backend"
            )
    return choice
