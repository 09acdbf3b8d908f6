"""A recipe says how each operand of fprop, dgrad and wgrad is quantized.

    fprop  y  = x W^T      operands x, W         dot product over input features
    dgrad  dx = dy W       operands dy, W^T      dot product over output features
    wgrad  dW = dy^T x     operands dy^T, x^T    dot product over tokens

The blocks of an operand lie along its GEMM's dot product. The paper's recipe (section 4) is

    fprop  x 1x16 nearest       W 16x16 nearest
    dgrad  dy 1x16 stochastic   W 16x16 nearest (fprop's codes, transposed)
    wgrad  dy 1x16 stochastic   x 1x16 nearest, both after a 16-point random Hadamard transform
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from megatron_fp4.config.precision_schema import (
    DgradConfig,
    FpropConfig,
    OperandConfig,
    RecipeConfig,
    SecondOperandConfig,
    WgradConfig,
)
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import QuantizedTensor

# The tensors that each GEMM multiplies: (left, right).
GEMMS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}


@dataclass(frozen=True)
class OperandSlot:
    """One of the six operands. gemm: `fprop`, `dgrad`, `wgrad`. side: `left`, `right`. tensor: as in `GEMMS`."""

    gemm: str
    side: str
    tensor: str

    @cached_property
    def name(self) -> str:
        """The operand's name in keys of draws, records and plans, such as `dgrad_gradient`."""
        return f"{self.gemm}_{self.tensor}"

    @cached_property
    def transposed(self) -> bool:
        """Whether the operand is the transposed tensor, with the dot product along the tensor's rows."""
        return self == SLOTS_OF[self.tensor][1]

    @property
    def key(self) -> str:
        """The operand's key in the configuration below `precision`, such as `dgrad.gradient`."""
        return f"{self.gemm}.{self.tensor}"


SLOTS = tuple(
    OperandSlot(gemm, side, tensor)
    for gemm, tensors in GEMMS.items()
    for side, tensor in zip(("left", "right"), tensors, strict=True)
)
FPROP_ACTIVATION, FPROP_WEIGHT, DGRAD_GRADIENT, DGRAD_WEIGHT, WGRAD_GRADIENT, WGRAD_ACTIVATION = SLOTS
# Both uses of each tensor: as it is stored, with the dot product along its columns; and transposed.
SLOTS_OF = {
    "activation": (FPROP_ACTIVATION, WGRAD_ACTIVATION),
    "weight": (FPROP_WEIGHT, DGRAD_WEIGHT),
    "gradient": (DGRAD_GRADIENT, WGRAD_GRADIENT),
}


@dataclass(frozen=True)
class Operand:
    """How one operand of one GEMM is quantized. block: (rows, columns). four_over_six: the errors that it compares,
    `absolute` or `squared`; empty: off. source: as in `SecondOperandConfig`."""

    format: str = "bf16"
    block: tuple[int, int] = (1, 1)
    rounding: str = "nearest"
    four_over_six: str = ""
    power_of_two_scales: bool = False
    source: str = "tensor"

    @property
    def quantized(self) -> bool:
        return self.format != "bf16"

    @property
    def in_4_bits(self) -> bool:
        return self.quantized and format_of(self.format).bits == 4

    @property
    def bits(self) -> float:
        """Bits of an element, with its share of the block's scale; 16 in BF16. (FP32 scales of more do not count.)"""
        if not self.quantized:
            return 16.0
        form = format_of(self.format)
        return form.bits + (form.scale_bits / math.prod(self.block) if len(form.blocks) > 1 else 0.0)

    @property
    def drawn(self) -> bool:
        """Whether its codes depend on random draws, for elements (`stochastic`) or block scales (`ms_eden`)."""
        return self.rounding != "nearest"

    def encode(self, rows: Tensor, key: RoundingKey | None = None, amax: Tensor | None = None) -> QuantizedTensor:
        """Quantize FP32 `rows` [rows, k] to the operand's format.

        key: for the draws, if it is `drawn`; None rounds to nearest, which `ms_eden` cannot. amax: as
        `Format.amax`, of the tensor that `rows` are part of (None: of `rows`). Raises ValueError for an unknown format.
        """
        form = format_of(self.format)
        if self.rounding == "ms_eden":
            assert form.encode_ms_eden is not None, f"{self.format} has no MS-EDEN"
            return form.encode_ms_eden(rows, key, amax=amax)
        options = {name: getattr(self, name) for name in form.options}
        if form.scope:
            options["amax"] = form.amax(rows) if amax is None else amax
        return form.encode(rows, self.block, key if self.drawn else None, **options)

    def __str__(self) -> str:
        if not self.quantized:
            return "bf16"
        marks = {
            "SR": self.rounding == "stochastic",
            "MS-EDEN": self.rounding == "ms_eden",
            "4/6": self.four_over_six != "",
            "squared": self.four_over_six == "squared",
            "2^k": self.power_of_two_scales,
            "as fprop": self.source == "codes",
            "of fprop's codes": self.source == "forward",
        }
        block = [f"{self.block[0]}x{self.block[1]}"] if len(format_of(self.format).blocks) > 1 else []
        return " ".join((self.format, *block, *(mark for mark, holds in marks.items() if holds)))


@dataclass(frozen=True)
class Gemm:
    """One GEMM: its two operands, in the order of `GEMMS`, and the size of their Hadamard transform (0: none)."""

    left: Operand = Operand()
    right: Operand = Operand()
    rht: int = 0

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return self.left, self.right

    @property
    def quantized(self) -> bool:
        return self.left.quantized or self.right.quantized


def uses_signs(gemms: Iterable[Gemm]) -> bool:
    """Whether `rht_signs` has an effect on any of `gemms`."""
    return any(gemm.rht for gemm in gemms)


def uses_amax(gemms: Iterable[Gemm]) -> bool:
    """Whether `amax` has an effect on any of `gemms`."""
    operands = (operand for gemm in gemms for operand in gemm.operands if operand.quantized)
    return any(format_of(operand.format).scope not in ("", "128") for operand in operands)


@dataclass(frozen=True)
class Recipe:
    """Three GEMMs, and for all of them the signs of Hadamard transforms (`fixed`, `none`, `fresh`) and whether
    tensor-parallel ranks share a tensor's maximum (`amax`: `global` or `shard`). `recipe[slot]` is an operand."""

    name: str = "bf16"
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    rht_signs: str = "fixed"
    amax: str = "global"

    def __getitem__(self, slot: OperandSlot) -> Operand:
        operand: Operand = getattr(getattr(self, slot.gemm), slot.side)
        return operand

    @cached_property
    def gemms(self) -> dict[str, Gemm]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @cached_property
    def operands(self) -> dict[OperandSlot, Operand]:
        return {slot: self[slot] for slot in SLOTS}

    @cached_property
    def formats(self) -> frozenset[str]:
        return frozenset(operand.format for operand in self.operands.values() if operand.quantized)

    @property
    def quantized(self) -> bool:
        return bool(self.formats)

    def describe(self) -> list[str]:
        """One line per GEMM, for people."""
        lines = []
        for (name, gemm), symbols in zip(self.gemms.items(), ("x|W", "dy|W", "dy|x"), strict=True):
            transform = f", RHT {gemm.rht} ({self.rht_signs} signs)" if gemm.rht else ""
            lines.append(f"{name} {symbols}: {gemm.left} | {gemm.right}{transform}")
        return lines


BF16 = Recipe()


def recipe_from_config(config: RecipeConfig) -> Recipe:
    """The recipe of a precision or of an exception that support.py has checked."""

    def gemm(part: FpropConfig | DgradConfig | WgradConfig, tensors: tuple[str, str]) -> Gemm:
        left, right = (_operand(getattr(part, tensor), config.fp8_power_of_two_scales) for tensor in tensors)
        # Without quantized operands a transform would only cancel in the product.
        return Gemm(left, right, part.rht if left.quantized or right.quantized else 0)

    fprop, dgrad, wgrad = (gemm(getattr(config, name), tensors) for name, tensors in GEMMS.items())
    return Recipe(config.name, fprop, dgrad, wgrad, config.rht_signs, config.amax)


def _operand(config: OperandConfig, powers_of_two: bool) -> Operand:
    if config.format == "bf16":
        return Operand()
    blocks = format_of(config.format).blocks
    rows, columns = map(int, config.block.split("x")) if len(blocks) > 1 else blocks[0]
    return Operand(
        format=config.format,
        block=(rows, columns),
        rounding=config.rounding,
        four_over_six="" if config.four_over_six == "none" else config.four_over_six,
        power_of_two_scales=powers_of_two and config.format == "fp8",
        source=config.source if isinstance(config, SecondOperandConfig) else "tensor",
    )


def rounded_to_nearest(recipe: Recipe) -> Recipe:
    """`recipe` with all operands rounded to nearest."""

    def nearest(gemm: Gemm) -> Gemm:
        left, right = (replace(operand, rounding="nearest") for operand in gemm.operands)
        return replace(gemm, left=left, right=right)

    return replace(recipe, fprop=nearest(recipe.fprop), dgrad=nearest(recipe.dgrad), wgrad=nearest(recipe.wgrad))


def switched_recipe(current: Recipe, other: Recipe, scope: str) -> Recipe:
    """The recipe after a switch of `scope` (`both`, `forward` or `backward`) from `current` to `other`.

    16x16 weights give both passes equal codes. After a switch of the backward pass alone this has no purpose, and
    fprop's weights take 1x16 blocks (paper, appendix D). After a switch of one pass, operands made from fprop's codes
    are quantized from their tensor, because fprop has another recipe than they.

    `rht_signs` and `amax` apply to all GEMMs; they come from the recipe whose GEMMs use them. Raises ValueError if
    GEMMs of both recipes use one and its values differ.
    """
    if scope == "both":
        return other
    switched = ("fprop",) if scope == "forward" else ("dgrad", "wgrad")
    gemms = {name: other.gemms[name] if name in switched else gemm for name, gemm in current.gemms.items()}
    weight = gemms["fprop"].right
    if scope == "backward" and not other.dgrad.right.quantized and weight.block[0] > 1:
        gemms["fprop"] = replace(gemms["fprop"], right=replace(weight, block=(1, weight.block[1])))
    for name in ("dgrad", "wgrad"):
        gemms[name] = replace(gemms[name], right=replace(gemms[name].right, source="tensor"))
    shared = {}
    for option, uses in (("rht_signs", uses_signs), ("amax", uses_amax)):
        before, after = getattr(current, option), getattr(other, option)
        current_uses = uses(gemm for name, gemm in current.gemms.items() if name not in switched)
        other_uses = uses(other.gemms[name] for name in switched)
        if current_uses and other_uses and before != after:
            raise ValueError(
                f"precision.switch.scope={scope}: {current.name} keeps precision.{option}={before} and {other.name} "
                f"has {after}, but all GEMMs share one; make them equal, or set precision.switch.scope=both"
            )
        shared[option] = after if other_uses else before
    fprop, dgrad, wgrad = gemms.values()
    return Recipe(f"{current.name}, {scope} {other.name}", fprop, dgrad, wgrad, **shared)
