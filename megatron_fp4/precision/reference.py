"""The specification of the linear in plain PyTorch. Read it first; tests compare the backends with it.

A linear y = x W^T consists of three GEMMs. A recipe says how each of their six operands is quantized:

    fprop  y  = x W^T      left x    [tokens, in]    right W    [out, in]
    dgrad  dx = dy W       left dy   [tokens, out]   right W^T  [in, out]
    wgrad  dW = dy^T x     left dy^T [out, tokens]   right x^T  [in, tokens]

Each operand is [rows, k] with the dot product along k, and its blocks lie along k. So every tensor is quantized twice,
along its columns for one GEMM and along its rows for another, each time with its own scales and draws. A product is the
sum over k of left times right in FP32, multiplied by both tensor scales in FP32, and rounded once.

    transform   of both operands of a GEMM, in BF16, by the same orthogonal matrix, which cancels in the product
    quantize    to codes with block scales (and in NVFP4 a tensor scale), to nearest or stochastically with a key
    source      what the second operand of a tensor is made from: the `tensor`; fprop's `codes`, transposed, as they
                are; or `forward`: the transposed values of these codes (`code * block scale`, exact in BF16), which are
                quantized again and at the end multiplied by fprop's tensor scale as well

Tokens and output features are padded with zeros to complete blocks, which changes no code and no product.
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
    """Returns y [tokens, out] and dx [tokens, in] in the dtype of x [tokens, in], and dW [out, in] in FP32.

    w: [out, in]. dy: [tokens, out]. keys: returns the key for an operand's draws by its name (`dgrad_gradient`) and for
    the fresh signs of a GEMM (`wgrad_signs`).
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
    """`rows` [rows, k] after the GEMM's transform, in BF16; unchanged if it has none."""
    rht = recipe.gemms[gemm].rht
    if not rht:
        return rows
    signs = fixed_signs(rht) if recipe.rht_signs == "fixed" else torch.ones(rht)
    if recipe.rht_signs == "fresh":
        signs = random_signs(rht, keys(f"{gemm}_signs"), rows.device)
    return random_hadamard_transform(rows.to(torch.bfloat16), rht, signs.to(rows.device))


def _operand(rows: Tensor, slot: OperandSlot, recipe: Recipe, keys: Keys) -> tuple[Tensor, Tensor]:
    """Quantize `rows` [rows, k]: FP32 `code * block scale` of the same shape, and the FP32 0-dim tensor scale."""
    operand, rows = recipe[slot], _transformed(rows, slot.gemm, recipe, keys)
    one = torch.ones((), device=rows.device)
    if not operand.quantized:
        return rows.to(torch.float32), one
    encoded = operand.encode(rows.to(torch.float32), keys(slot.name))
    scale = encoded.decode_scale()
    return encoded.block_values(), one if scale is None else scale
