"""What the linear computes, in plain PyTorch: the specification that backends are compared with, and a place to start.

A linear y = x W^T is three GEMMs, and a recipe says what each of their six operands becomes before it is multiplied:

    fprop  y  = x W^T      left x    [tokens, in]    right W    [out, in]
    dgrad  dx = dy W       left dy   [tokens, out]   right W^T  [in, out]
    wgrad  dW = dy^T x     left dy^T [out, tokens]   right x^T  [in, tokens]

Each operand is laid out as [rows, k] with the dot product along k, and quantized there: every tensor twice, along its
columns for one GEMM and along its rows for another, with scales and draws of its own. A product is the sum over k of
left times right in FP32, multiplied by both tensor scales in FP32, and rounded once.

    transform   both operands of a GEMM, in BF16, by the same orthogonal matrix, which cancels in the product
    quantize    to codes under block scales (and in NVFP4 a tensor scale), to nearest or stochastically by a key
    source      an operand may take the `codes` that fprop made of the same tensor, transposed, instead of its own; or
                be quantized from what these stand for (`forward`: `code * block scale`, exact in BF16; fprop's tensor
                scale is multiplied on at the end), transposed

Tokens and output features are padded with zeros to whole blocks, which changes no code and no product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.precision.backend import block_alignment
from megatron_fp4.precision.recipe import SLOTS, SLOTS_OF, OperandSlot, Recipe
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform, random_signs
from megatron_fp4.quantization.rounding import RoundingKey

Keys = Callable[[str], RoundingKey]


def reference_linear(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
    """y [tokens, out] and dx [tokens, in] in the type of x [tokens, in], and dW [out, in] in FP32.

    w: [out, in]. dy: [tokens, out]. keys: of the draws of an operand by its label (`dgrad_gradient`), and of fresh
    signs by their GEMM's (`wgrad_signs`).
    """
    (tokens, outputs), alignment = dy.shape, block_alignment(recipe)
    more_tokens, more_outputs = -tokens % alignment.tokens, -outputs % alignment.outputs
    tensors = {
        "activation": pad(x, (0, 0, 0, more_tokens)),
        "weight": pad(w.to(x.dtype), (0, 0, 0, more_outputs)),
        "gradient": pad(dy, (0, more_outputs, 0, more_tokens)),
    }
    operands: dict[OperandSlot, tuple[Tensor, Tensor]] = {}
    for slot in SLOTS:
        operand = recipe[slot]
        if operand.source == "tensor":
            tensor = tensors[slot.tensor]
            operands[slot] = _operand(tensor.t() if slot.transposed else tensor, slot, recipe, keys)
            continue
        values, scale = operands[SLOTS_OF[slot.tensor][0]]
        operands[slot] = values.t(), scale
        if operand.source == "forward":
            values, own_scale = _operand(values.t(), slot, recipe, keys)
            operands[slot] = values, own_scale * scale

    def product(gemm: str) -> Tensor:
        (left, left_scale), (right, right_scale) = (operands[slot] for slot in SLOTS if slot.gemm == gemm)
        return (left @ right.t()) * (left_scale * right_scale)

    y, dx = (product(gemm)[:tokens].to(x.dtype) for gemm in ("fprop", "dgrad"))
    return y[:, :outputs], dx, product("wgrad")[:outputs]


def _transformed(rows: Tensor, gemm: str, recipe: Recipe, keys: Keys) -> Tensor:
    """`rows` [rows, k] after the transform of a GEMM, in BF16; themselves where it has none."""
    rht = recipe.gemms[gemm].rht
    if not rht:
        return rows
    signs = fixed_signs(rht) if recipe.rht_signs == "fixed" else torch.ones(rht)
    if recipe.rht_signs == "fresh":
        signs = random_signs(rht, keys(f"{gemm}_signs"), rows.device)
    return random_hadamard_transform(rows.to(torch.bfloat16), rht, signs.to(rows.device))


def _operand(rows: Tensor, slot: OperandSlot, recipe: Recipe, keys: Keys) -> tuple[Tensor, Tensor]:
    """What `rows` [rows, k] become: FP32 values of the same shape, and the FP32 0-dim tensor scale beside them."""
    operand, rows = recipe[slot], _transformed(rows, slot.gemm, recipe, keys)
    one = torch.ones((), device=rows.device)
    if not operand.quantized:
        return rows.to(torch.float32), one
    encoded = operand.encode(rows.to(torch.float32), keys(slot.name))
    scale = encoded.decode_scale()
    return encoded.block_values(), one if scale is None else scale
