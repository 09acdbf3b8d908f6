"""Section `hadamard`: what the random Hadamard transform gains, and where."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.precision.emulated import gemm
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization import random_hadamard_transform
from megatron_fp4.quantization.hadamard import HADAMARD_SIZES
from scripts.study.errors import NEAREST, SQUARE, STOCHASTIC, decoded, gain, quantized, relative, statistics
from scripts.study.pictures import draw_hadamard
from scripts.study.tables import short, table
from scripts.study.tensors import Study, synthetic, token_outliers


def study_hadamard(study: Study) -> Iterator[tuple[str, str]]:
    """What the transform does to operands, to wgrad, and to fprop."""
    rows = []
    for name, kept in study.captured.items():
        for which in ("x", "dy"):
            columns = kept[which].t()
            before, after = (statistics(x, NEAREST) for x in (columns, random_hadamard_transform(columns.contiguous())))
            quantities = (("crest", ".1f"), ("zeroed", ".1%"), ("snr_db", ".1f"))
            rows.append([f"{short(name)} {which}ᵀ", *(f"{before[q]:{f}} / {after[q]:{f}}" for q, f in quantities)])
    yield "rht-operands", table(["operand of wgrad", "crest", "zeroed", "SNR, dB"], rows)

    tokens, sizes = 2 * study.size.side, (0, *HADAMARD_SIZES)
    gains: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for where, scale in (("x", 10), ("x", 30), ("x", 100), ("dy", 100)):
        x, dy, outlier = token_outliers(tokens, tokens // 4, scale, where)
        quiet, loud = (dy.double()[rows].t() @ x.double()[rows] for rows in (~outlier, outlier))
        name = f"{where} of 1 token in 64 x{scale}"
        results = [wgrad(x, dy, size, draws=4) for size in sizes]
        gains[name] = [gain(result.double() - loud, quiet) for result in results]
        errors[name] = [relative(result, quiet + loud) for result in results]
    for name, kept in study.captured.items():
        exact = kept["dy"].double().t() @ kept["x"].double()
        errors[short(name)] = [relative(wgrad(kept["x"], kept["dy"], size, draws=4), exact) for size in sizes]
    at = sizes.index(16)
    rows = [
        [n, f"{e[0]:.3f} / {e[at]:.3f}", f"{gains[n][0]:.3f} / {gains[n][at]:.3f}" if n in gains else ""]
        for n, e in errors.items()
    ]
    yield "rht-wgrad", table(["x and dy", "error of dW", "gain of the ordinary tokens' share of dW"], rows)
    header = ["x and dy", "none", *(str(size) for size in HADAMARD_SIZES)]
    yield "rht-size", table(header, [[n, *(f"{g:.3f}" for g in values)] for n, values in gains.items()])
    if study.pictures is not None:
        draw_hadamard(gains, errors, sizes, study.pictures / "hadamard.png")

    rows = []
    weights = {
        "outlier channels x, Gaussian W": (
            synthetic(study.size.side)["outlier channels"],
            synthetic(study.size.side)["Gaussian"],
        )
    }
    weights |= {short(name): (kept["x"], kept["W"]) for name, kept in study.captured.items()}
    for name, (x, w) in weights.items():
        exact = x.double() @ w.double().t()
        plain, turned = (gemm(quantized(x, NEAREST, r), quantized(w, SQUARE, r), torch.float32) for r in (0, 16))
        unlike = relative(weight_seen(w, SQUARE, 16), decoded(w.t(), SQUARE).t())
        rows.append([name, f"{relative(plain, exact):.3f}", f"{relative(turned, exact):.3f}", f"{unlike:.3f}"])
    yield "rht-fprop", table(["x and W", "error of y", "with RHT", "fprop's W against dgrad's, with RHT"], rows)


def wgrad(x: Tensor, dy: Tensor, rht: int, draws: int = 1) -> Tensor:
    """dW = dy^T x by the recipe (dy stochastic, x nearest) with a transform of size `rht`, averaged over draws."""
    right = quantized(x.t(), NEAREST, rht)
    products = (gemm(quantized(dy.t(), STOCHASTIC, rht, draw), right, torch.float32) for draw in range(draws))
    return torch.stack(list(products)).mean(0)


def weight_seen(w: Tensor, operand: Operand, rht: int) -> Tensor:
    """The W [out, in] that fprop multiplies by when both operands are transformed: quantized, then turned back."""
    values = decoded(random_hadamard_transform(w.contiguous(), rht), operand)
    # The transform is orthogonal: transforming the identity gives the matrix that undoes it.
    matrix = random_hadamard_transform(torch.eye(rht), rht)
    return (values.unflatten(1, (-1, rht)) @ matrix.t()).flatten(1)
