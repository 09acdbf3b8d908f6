"""Recipes, tensors and runs of one linear; and its three GEMMs in double precision on operands that the oracle
quantizes."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext, Sharding
from megatron_fp4.precision.recipe import BF16, SLOTS, Gemm, Operand, Recipe, rounded_to_nearest
from megatron_fp4.precision.reference import reference_linear
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.hadamard import fixed_signs
from megatron_fp4.quantization.rounding import Span
from tests.quantization import oracle


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """`recipe` with other operands (`dgrad_weight=...`), transforms (`wgrad_rht=16`) or fields (`amax="shard"`)."""
    for name, gemm in recipe.gemms.items():
        sides = {p.side: changes.pop(p.name) for p in SLOTS if p.gemm == name and p.name in changes}
        changes[name] = replace(gemm, rht=changes.pop(f"{name}_rht", gemm.rht), **sides)
    return replace(recipe, **changes)


nearest = rounded_to_nearest
SR = "stochastic"
X, W, W2 = Operand("nvfp4", (1, 16)), Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16))
DY = Operand("nvfp4", (1, 16), SR)
# The recipe of the paper's section 4.
NVFP4 = Recipe("nvfp4", Gemm(X, W2), Gemm(DY, W2), Gemm(DY, X, 16))
SIX = Operand("nvfp4", (1, 16), four_over_six="squared")
EDEN = Operand("nvfp4", (1, 16), "ms_eden")
EDEN_AGAIN = replace(EDEN, source="forward")
# Quartet II (arXiv 2601.22813).
QUARTET2 = Recipe("nvfp4_quartet2", Gemm(SIX, SIX), Gemm(EDEN, EDEN_AGAIN, 128), Gemm(EDEN, EDEN_AGAIN, 128), "fresh")
MX, MX_DY = Operand("mxfp4", (1, 32)), Operand("mxfp4", (1, 32), SR)
MXFP4 = Recipe("mxfp4", Gemm(MX, MX), Gemm(MX_DY, MX), Gemm(MX_DY, MX, 32))
MXFP4_2D = changed(MXFP4, fprop_weight=Operand("mxfp4", (32, 32)), dgrad_weight=Operand("mxfp4", (32, 32)))
F8, F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
FP8 = Recipe("fp8", Gemm(F8, F8_W), Gemm(F8, F8_W), Gemm(F8, F8))
MX8 = Operand("mxfp8", (1, 32))
MXFP8 = Recipe("mxfp8", Gemm(MX8, MX8), Gemm(MX8, MX8), Gemm(MX8, MX8))
ALL_THE_WAY = Recipe("all_the_way", Gemm(X, W), Gemm(DY, W), Gemm(DY, DY))
QAF = Recipe("qaf", Gemm(X, W))
W8, (X_46, W_46) = Operand("mxfp8", (32, 32)), (replace(operand, four_over_six="absolute") for operand in (X, W2))
F8P, F8P_W = (replace(operand, power_of_two_scales=True) for operand in (F8, F8_W))
# Scales of columns, rows, tensors and 128 elements, and codes of 4, 6 and 8 bits.
INT4 = Operand("e1m2_e5m3_tensor", (8, 8))
FAMILY = Recipe(
    "family",
    Gemm(Operand("e2m1_e4m3_column", (1, 32)), INT4),
    Gemm(Operand("e5m2_row", (1, 16), SR), INT4),
    Gemm(Operand("e2m1_e1m6_128", (1, 16), SR), Operand("e3m2_e8m0", (1, 32)), 16),
)
# They cover every format, transform and source of operands, and operands in BF16.
RECIPES = {
    "bf16": BF16,
    "nvfp4": NVFP4,
    "nvfp4, fresh signs": replace(NVFP4, rht_signs="fresh"),
    "nvfp4, no signs": replace(NVFP4, rht_signs="none"),
    "nvfp4, 1x16 weights": changed(NVFP4, fprop_weight=W, dgrad_weight=W),
    "nvfp4, other weight blocks in dgrad": changed(NVFP4, fprop_weight=W),
    "nvfp4, every transform": changed(NVFP4, fprop_weight=W, dgrad_weight=W, fprop_rht=32, dgrad_rht=64, wgrad_rht=128),
    "nvfp4, transforms of 16": changed(NVFP4, fprop_weight=W, dgrad_weight=W, fprop_rht=16, dgrad_rht=16),
    "nvfp4, four over six": changed(NVFP4, fprop_activation=X_46, wgrad_activation=X_46),
    "nvfp4, four over six in all": changed(
        NVFP4, fprop_activation=X_46, fprop_weight=W_46, dgrad_weight=W_46, wgrad_activation=X_46
    ),
    "nvfp4, codes of fprop": changed(
        NVFP4,
        fprop_weight=W,
        dgrad_weight=replace(W, source="codes"),
        wgrad_activation=replace(X, source="codes"),
        wgrad_rht=0,
    ),
    "nvfp4, codes quantized again": changed(
        NVFP4,
        fprop_activation=SIX,
        fprop_weight=SIX,
        dgrad_weight=replace(W, source="forward"),
        wgrad_activation=replace(X, source="forward"),
    ),
    "nvfp4, forward": QAF,
    "nvfp4, backward": changed(NVFP4, fprop_activation=Operand(), fprop_weight=Operand()),
    "nvfp4, gradients": Recipe("gradients", dgrad=Gemm(DY), wgrad=Gemm(DY)),
    "nvfp4, stochastic weights": Recipe("weights", dgrad=Gemm(DY, replace(W2, rounding=SR))),
    "quartet 2": QUARTET2,
    "all the way": ALL_THE_WAY,
    "mxfp4": MXFP4,
    "mxfp4, square weights": MXFP4_2D,
    "mxfp8": MXFP8,
    "mxfp8, square weights": changed(MXFP8, fprop_weight=W8, dgrad_weight=W8),
    "mxfp8, transforms": changed(MXFP8, fprop_rht=16, dgrad_rht=32, wgrad_rht=64),
    "mxfp8, codes of fprop": changed(MXFP8, wgrad_activation=replace(MX8, source="codes")),
    "fp8": FP8,
    "fp8, powers of two": Recipe("fp8", Gemm(F8P, F8P_W), Gemm(F8P, F8P_W), Gemm(F8P, F8P)),
    "nvfp4 forward, mxfp8 backward": changed(MXFP8, fprop_activation=X, fprop_weight=W2),
    "mxfp8 forward, nvfp4 backward": changed(NVFP4, fprop_activation=MX8, fprop_weight=MX8, dgrad_weight=MX8),
    "mxfp4 forward, nvfp4 backward": changed(
        NVFP4,
        fprop_activation=MX,
        fprop_weight=MXFP4_2D.fprop.right,
        dgrad_weight=MXFP4_2D.fprop.right,
        dgrad_gradient=MX_DY,
    ),
    "family": FAMILY,
    "mixed formats": Recipe("mixed", Gemm(X, F8_W), Gemm(MX_DY, W2), Gemm(F8, MX)),
}


def decoded(x: np.ndarray, operand: Operand, rht: int = 0) -> np.ndarray:
    """The real values of x [rows, k] quantized as `operand` says, in double precision."""
    x = np.asarray(x, dtype=np.float64)
    if rht:
        x = oracle.bfloat16(oracle.rht(oracle.bfloat16(x), fixed_signs(rht).double().numpy()))
    if operand.format == "nvfp4":
        six = operand.four_over_six
        return oracle.nvfp4(x, operand.block[0], six != "", squared=six == "squared").values
    if operand.format == "mxfp4":
        return oracle.mxfp4(x, operand.block[0]).values
    if operand.format == "mxfp8":
        return oracle.mxfp8(x, operand.block[0]).values
    if operand.format == "fp8":
        return oracle.fp8(x, operand.block[0], operand.power_of_two_scales).values
    return oracle.family(x.astype(np.float32), operand.format, operand.block)[2] if operand.quantized else x


def _along_rows(tensor: np.ndarray, fprop: np.ndarray, scale: float, operand: Operand, rht: int) -> np.ndarray:
    """The operand along the rows of `tensor`. fprop: the values of fprop's operand; scale: its tensor scale."""
    if operand.source == "codes":
        return fprop.T
    if operand.source == "forward":
        return decoded(fprop.T / scale, operand, rht) * scale
    return decoded(tensor.T, operand, rht)


def linear(x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dw in double precision, of operands rounded to nearest, each quantized along its GEMM's dot product."""
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
    fprop_operands = ((x, fprop.left), (w, fprop.right))
    x_fprop, w_fprop = (decoded(tensor, operand, fprop.rht) for tensor, operand in fprop_operands)
    x_scale, w_scale = (
        np.abs(tensor).max() / (6 * (256 if operand.four_over_six else 448)) if operand.format == "nvfp4" else 1.0
        for tensor, operand in fprop_operands
    )
    w_dgrad = _along_rows(w, w_fprop, w_scale, dgrad.right, dgrad.rht)
    x_wgrad = _along_rows(x, x_fprop, x_scale, wgrad.right, wgrad.rht)
    dy_dgrad, dy_wgrad = decoded(dy, dgrad.left, dgrad.rht), decoded(dy.T, wgrad.left, wgrad.rht)
    return x_fprop @ w_fprop.T, dy_dgrad @ w_dgrad.T, dy_wgrad @ x_wgrad.T


def run(x: Tensor, w: Tensor, dy: Tensor, context: LinearContext) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of `quantized_linear`."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = quantized_linear(x, w, context)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def specified(x: Tensor, w: Tensor, dy: Tensor, context: LinearContext) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of the specification, with the context's draws."""
    step_state = context.step_state
    return reference_linear(
        x, w, dy, context.recipe, lambda label: context.key(step_state.step, step_state.micro_batch, label)
    )


def context_of(recipe: Recipe, num_groups: int = 1, first_output: int = 0, **settings) -> LinearContext:
    """The context of a linear, with its own StepState. first_output: where its output features begin in the global
    tensor."""
    settings["sharding"] = Sharding(outputs=Span(first_output), num_groups=num_groups)
    return LinearContext(name="blocks.0.mixer.in_proj", recipe=recipe, step_state=StepState(seed=1), **settings)


def tensors(tokens: int, inputs: int, outputs: int, seed: int = 0, dtype=torch.float32) -> tuple[Tensor, ...]:
    """x, w and dy of realistic magnitudes, with values that are exact in BF16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    w = torch.randn(outputs, inputs, generator=generator) * 0.02
    dy = torch.randn(tokens, outputs, generator=generator) * 1e-4
    return tuple(t.bfloat16().to(dtype) for t in (x, w, dy))  # type: ignore[return-value]


def double(t: Tensor) -> np.ndarray:
    """As a double-precision array."""
    return t.detach().double().numpy()
