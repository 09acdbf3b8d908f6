"""Section `weights`: blocks of 1x16 and of 16x16 for W, and the gradients that follow from each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.precision.recipe import Operand
from scripts.study.errors import NEAREST, SQUARE, decoded, relative, statistics
from scripts.study.tables import short, table
from scripts.study.tensors import Study, generator, synthetic


def study_weights(study: Study) -> Iterator[tuple[str, str]]:
    """What 16x16 blocks cost, and what they keep: one W for the forward and the backward pass."""
    weights = {"Gaussian": synthetic(study.size.side)["Gaussian"]}
    weights |= {f"{short(name)} W": kept["W"] for name, kept in study.captured.items()}
    rows = []
    for name, w in weights.items():
        cells = [name]
        for operand in (NEAREST, SQUARE):
            fprop, dgrad = decoded(w, operand), decoded(w.t(), operand).t()
            moved = float((fprop != dgrad).double().mean())
            cells += [f"{statistics(w, operand)['snr_db']:.1f}", f"{moved:.1%}", f"{relative(dgrad, fprop):.3f}"]
        rows.append(cells)
    parts = ("SNR, dB", "values that differ", "dgrad's W against fprop's")
    yield "weights", table(["W", *(f"{block}: {part}" for block in ("1x16", "16x16") for part in parts)], rows)
    rows = []
    for depth in study.size.depths:
        one, two = (gradient_errors(study.size.side // 4, depth, operand) for operand in (NEAREST, SQUARE))
        rows.append([str(depth), *(f"{e:.3f}" for pair in zip(one, two, strict=True) for e in pair)])
    header = [
        "layers",
        "1x16: against own forward",
        "16x16: against own forward",
        "1x16: against exact",
        "16x16: against exact",
    ]
    yield "chain-rule", table(header, rows)


def gradient_errors(dim: int, depth: int, operand: Operand) -> tuple[float, float]:
    """Error of dx of `depth` layers relu(W x) whose W is quantized by `operand` along each GEMM's dot product: against
    the gradient of the function that the forward pass computed, and against that of the unquantized network."""
    g = generator(4)
    weights = [torch.randn(dim, dim, generator=g).bfloat16().float() * math.sqrt(2 / dim) for _ in range(depth)]
    x, dy = torch.randn(64, dim, generator=g), torch.randn(64, dim, generator=g)
    forward = [decoded(w, operand) for w in weights]
    backward = [decoded(w.t(), operand).t() for w in weights]
    ours = gradient(x, dy, forward, backward)
    return relative(ours, gradient(x, dy, forward, forward)), relative(ours, gradient(x, dy, weights, weights))


def gradient(x: Tensor, dy: Tensor, forward: list[Tensor], backward: list[Tensor]) -> Tensor:
    """dx of a stack of relu(W x), with `forward` as its weights on the way up and `backward` on the way down."""
    masks = []
    for w in forward:
        x = x @ w.t()
        masks.append(x > 0)
        x = x * masks[-1]
    for w, mask in zip(reversed(backward), reversed(masks), strict=True):
        dy = (dy * mask) @ w
    return dy
