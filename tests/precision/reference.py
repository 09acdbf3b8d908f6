"""A linear layer and its three GEMMs in double precision, on operands that the oracle quantized to nearest."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.linear import LinearNumerics, quantized_linear
from megatron_fp4.precision.recipe import Operand, Recipe
from megatron_fp4.quantization.hadamard import fixed_signs
from tests.quantization import oracle

SR = "stochastic"
X, W, W2 = Operand("nvfp4", (1, 16)), Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16))
DY = Operand("nvfp4", (1, 16), SR)
# Section 4 of the paper, written out here once more.
NVFP4 = Recipe("nvfp4", X, W2, DY, W2, DY, X, wgrad_rht=16)
MX, MX_DY = Operand("mxfp4", (1, 32)), Operand("mxfp4", (1, 32), SR)
MXFP4 = Recipe("mxfp4", MX, MX, MX_DY, MX, MX_DY, MX, wgrad_rht=32)
MXFP4_2D = replace(MXFP4, fprop_weight=Operand("mxfp4", (32, 32)), dgrad_weight=Operand("mxfp4", (32, 32)))
F8, F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
FP8 = Recipe("fp8", F8, F8_W, F8, F8_W, F8, F8)
MX8 = Operand("mxfp8", (1, 32))
MXFP8 = Recipe("mxfp8", MX8, MX8, MX8, MX8, MX8, MX8)
ALL_THE_WAY = Recipe("all_the_way", X, W, DY, W, DY, DY)
QAF = Recipe("qaf", X, W)


def nearest(recipe: Recipe) -> Recipe:
    """The recipe without stochastic rounding."""
    return replace(recipe, **{name: replace(op, rounding="nearest") for name, op in recipe.operands.items()})


def decoded(x: np.ndarray, operand: Operand, rht: int = 0, signs: np.ndarray | None = None) -> np.ndarray:
    """What `operand` makes of x [rows, k], as real values in double."""
    x = np.asarray(x, dtype=np.float64)
    if rht:
        x = oracle.bfloat16(
            oracle.rht(oracle.bfloat16(x), fixed_signs(rht).double().numpy() if signs is None else signs)
        )
    if operand.format == "nvfp4":
        return oracle.nvfp4(x, operand.block[0], operand.four_over_six).values
    if operand.format == "mxfp4":
        return oracle.mxfp4(x, operand.block[0]).values
    if operand.format == "mxfp8":
        return oracle.mxfp8(x, operand.block[0]).values
    if operand.format == "fp8":
        return oracle.fp8(x, operand.block[0], operand.power_of_two_scales).values
    return x


def linear(x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dw in double of operands quantized to nearest, each along its GEMM's dot product."""
    x_fprop = decoded(x, recipe.fprop_activation, recipe.fprop_rht)
    w_fprop = decoded(w, recipe.fprop_weight, recipe.fprop_rht)
    w_dgrad = decoded(w.T, recipe.dgrad_weight, recipe.dgrad_rht)
    x_wgrad = decoded(x.T, recipe.wgrad_activation, recipe.wgrad_rht)
    if recipe.dgrad_weight.reuse_fprop:
        w_dgrad = w_fprop.T
    if recipe.wgrad_activation.reuse_fprop:
        x_wgrad = x_fprop.T
    y = oracle.gemm(x_fprop, w_fprop)
    dx = oracle.gemm(decoded(dy, recipe.dgrad_gradient, recipe.dgrad_rht), w_dgrad)
    dw = oracle.gemm(decoded(dy.T, recipe.wgrad_gradient, recipe.wgrad_rht), x_wgrad)
    return y, dx, dw


def run(x: Tensor, w: Tensor, dy: Tensor, numerics: LinearNumerics) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of the package's layer."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = quantized_linear(x, w, numerics)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def numerics_of(recipe: Recipe, **settings) -> LinearNumerics:
    """A linear's numerics with a clock of its own."""
    return LinearNumerics(name="blocks.0.mixer.in_proj", recipe=recipe, clock=RunClock(seed=1), **settings)


def tensors(
    tokens: int, inputs: int, outputs: int, seed: int = 0, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy of plausible sizes, as values that BF16 holds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    w = torch.randn(outputs, inputs, generator=generator) * 0.02
    dy = torch.randn(tokens, outputs, generator=generator) * 1e-4
    return tuple(t.bfloat16().to(dtype) for t in (x, w, dy))  # type: ignore[return-value]


def double(t: Tensor) -> np.ndarray:
    """As a double-precision array."""
    return t.detach().double().numpy()
