"""A recipe: what each operand of fprop, dgrad and wgrad gets.

    fprop  y  = x W^T      operands x, W         dot product over input features
    dgrad  dx = dy W       operands dy, W^T      dot product over output features
    wgrad  dW = dy^T x     operands dy^T, x^T    dot product over tokens

Every operand is quantized along its GEMM's dot product. The paper's recipe (section 4) is

    fprop  x 1x16 nearest       W 16x16 nearest
    dgrad  dy 1x16 stochastic   W 16x16 nearest (the transposed codes of fprop's)
    wgrad  dy 1x16 stochastic   x 1x16 nearest, both after a 16-point random Hadamard transform
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_fp4.config.schema import (
    DgradConfig,
    FpropConfig,
    OperandConfig,
    PrecisionConfig,
    RecipeConfig,
    WgradConfig,
)

GEMMS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}


@dataclass(frozen=True)
class Operand:
    """One operand of one GEMM; the fields are those of `OperandConfig`, the block parsed to (rows, columns)."""

    format: str = "bf16"
    block: tuple[int, int] = (1, 1)
    rounding: str = "nearest"
    four_over_six: bool = False
    power_of_two_scales: bool = False
    reuse_fprop: bool = False

    @property
    def quantized(self) -> bool:
        """Whether anything happens to the tensor at all."""
        return self.format != "bf16"

    def __str__(self) -> str:
        if not self.quantized:
            return "bf16"
        marks = [self.format, f"{self.block[0]}x{self.block[1]}"]
        marks += ["SR"] if self.rounding == "stochastic" else []
        marks += ["4/6"] if self.four_over_six else []
        marks += ["2^k"] if self.power_of_two_scales else []
        marks += ["as fprop"] if self.reuse_fprop else []
        return " ".join(marks)


@dataclass(frozen=True)
class Recipe:
    """Six operands, the size of the Hadamard transform of each GEMM (0: none), where its signs come from, and whether
    tensor-parallel ranks share their tensors' maxima (`amax`: `global` or `shard`)."""

    name: str = "bf16"
    fprop_activation: Operand = Operand()
    fprop_weight: Operand = Operand()
    dgrad_gradient: Operand = Operand()
    dgrad_weight: Operand = Operand()
    wgrad_gradient: Operand = Operand()
    wgrad_activation: Operand = Operand()
    fprop_rht: int = 0
    dgrad_rht: int = 0
    wgrad_rht: int = 0
    rht_signs: str = "fixed"
    amax: str = "global"

    @property
    def operands(self) -> dict[str, Operand]:
        """The six operands by name."""
        names = ("fprop_activation", "fprop_weight", "dgrad_gradient", "dgrad_weight")
        return {name: getattr(self, name) for name in (*names, "wgrad_gradient", "wgrad_activation")}

    @property
    def quantized(self) -> bool:
        """Whether any operand of any GEMM is quantized."""
        return any(operand.quantized for operand in self.operands.values())

    def uses(self, option: str, gemms: Iterable[str]) -> bool:
        """Whether `rht_signs` or `amax` makes a difference to any of `gemms`."""
        if option == "rht_signs":
            return any(getattr(self, f"{gemm}_rht") for gemm in gemms)
        assert option == "amax"
        return any(getattr(self, f"{gemm}_{name}").format == "nvfp4" for gemm in gemms for name in GEMMS[gemm])

    def describe(self) -> list[str]:
        """One line per GEMM, for people."""

        def line(gemm: str, left: Operand, right: Operand, rht: int) -> str:
            transform = f", RHT {rht} ({self.rht_signs} signs)" if rht else ""
            return f"{gemm}: {left} | {right}{transform}"

        return [
            line("fprop x|W", self.fprop_activation, self.fprop_weight, self.fprop_rht),
            line("dgrad dy|W", self.dgrad_gradient, self.dgrad_weight, self.dgrad_rht),
            line("wgrad dy|x", self.wgrad_gradient, self.wgrad_activation, self.wgrad_rht),
        ]


BF16 = Recipe()


def recipe_from_config(config: PrecisionConfig | RecipeConfig) -> Recipe:
    """The recipe of a precision config or of an exception (which `megatron_fp4.checks.combinations` has checked)."""
    fprop, dgrad, wgrad = config.fprop, config.dgrad, config.wgrad
    return Recipe(
        name=config.name,
        fprop_activation=_operand(fprop.activation),
        fprop_weight=_operand(fprop.weight),
        dgrad_gradient=_operand(dgrad.gradient),
        dgrad_weight=_operand(dgrad.weight),
        wgrad_gradient=_operand(wgrad.gradient),
        wgrad_activation=_operand(wgrad.activation),
        fprop_rht=_rht(fprop),
        dgrad_rht=_rht(dgrad),
        wgrad_rht=_rht(wgrad),
        rht_signs=config.rht_signs,
        amax=config.amax,
    )


def switched_recipe(current: Recipe, target: Recipe, scope: str) -> Recipe:
    """The recipe after a switch of `scope` (`both`, `forward` or `backward`) from `current` to `target`.

    A switch of the backward pass alone leaves 16x16 weights without their purpose (equal codes in both passes);
    fprop's weights then take 1x16 blocks, as in the paper's appendix D. After a switch of one pass, operands of the
    other that took fprop's codes are quantized by themselves: those codes are of another recipe now.

    `rht_signs` and `amax` are one for all GEMMs: those of the recipe of which a part remains that uses them.
    Raises ValueError for a scope that is none, and where parts of both recipes use one of these and differ in it.
    """
    if scope == "both":
        return target
    if scope == "forward":
        return replace(
            current,
            name=f"{current.name}, forward {target.name}",
            rht_signs=_shared("rht_signs", current, target, ("fprop",), scope),
            amax=_shared("amax", current, target, ("fprop",), scope),
            fprop_activation=target.fprop_activation,
            fprop_weight=target.fprop_weight,
            fprop_rht=target.fprop_rht,
            dgrad_weight=replace(current.dgrad_weight, reuse_fprop=False),
            wgrad_activation=replace(current.wgrad_activation, reuse_fprop=False),
        )
    if scope != "backward":
        raise ValueError(f"precision.switch.scope={scope!r} is not one of both, forward, backward")
    weight = current.fprop_weight
    if not target.dgrad_weight.quantized and weight.block[0] > 1:
        weight = replace(weight, block=(1, weight.block[1]))
    return replace(
        target,
        name=f"{current.name}, backward {target.name}",
        fprop_activation=current.fprop_activation,
        fprop_weight=weight,
        fprop_rht=current.fprop_rht,
        dgrad_weight=replace(target.dgrad_weight, reuse_fprop=False),
        wgrad_activation=replace(target.wgrad_activation, reuse_fprop=False),
        rht_signs=_shared("rht_signs", current, target, ("dgrad", "wgrad"), scope),
        amax=_shared("amax", current, target, ("dgrad", "wgrad"), scope),
    )


def _shared(option: str, current: Recipe, target: Recipe, taken: tuple[str, ...], scope: str) -> str:
    """`rht_signs` or `amax` of a recipe that has the GEMMs `taken` from `target` and the others from `current`."""
    kept = [gemm for gemm in GEMMS if gemm not in taken]
    before, after = getattr(current, option), getattr(target, option)
    keeps, takes = current.uses(option, kept), target.uses(option, taken)
    if keeps and takes and before != after:
        raise ValueError(
            f"precision.{option}={before} goes on in {' and '.join(kept)} after a switch of "
            f"precision.switch.scope={scope}, but {target.name} has {after} for {' and '.join(taken)}, and a linear "
            f"has one {option} for all GEMMs; make them equal, or set precision.switch.scope=both"
        )
    return str(after if takes else before)


def _operand(config: OperandConfig) -> Operand:
    if config.format == "bf16":
        return Operand()
    rows, columns = config.block.split("x")
    return Operand(
        format=config.format,
        block=(int(rows), int(columns)),
        rounding=config.rounding,
        four_over_six=config.four_over_six,
        power_of_two_scales=config.power_of_two_scales,
        reuse_fprop=config.reuse_fprop,
    )


def _rht(gemm: FpropConfig | DgradConfig | WgradConfig) -> int:
    """The transform's size; none where neither operand is quantized, since it would cancel."""
    left, right = (getattr(gemm, name) for name in ("activation", "weight", "gradient") if hasattr(gemm, name))
    return gemm.rht if left.format != "bf16" or right.format != "bf16" else 0
