"""Section `rounding`: the bias of rounding to nearest, the noise of stochastic rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.elements import E2M1_MAX, to_e4m3
from megatron_fp4.quantization.tensor import block_amax
from scripts.study.errors import NEAREST, STOCHASTIC, decoded, gain, relative, statistics
from scripts.study.pictures import draw_means
from scripts.study.tables import short, table
from scripts.study.tensors import Study, synthetic


def study_rounding(study: Study) -> Iterator[tuple[str, str]]:
    """Bias of nearest and stochastic rounding: means of repeated quantizations, and gains."""
    side, draws = study.size.side // 4, study.size.draws
    counts = [2**k for k in range(draws.bit_length()) if 2**k <= draws]
    gaussian = synthetic(side)["Gaussian"].float()
    inside = ~saturated(gaussian)
    everything = torch.ones_like(inside)
    curves = {
        "nearest": mean_errors(gaussian, NEAREST, [1], everything) * len(counts),  # the same each time
        "stochastic": mean_errors(gaussian, STOCHASTIC, counts, everything),
        "stochastic, without saturated values": mean_errors(gaussian, STOCHASTIC, counts, inside),
    }
    shown = [n for n in counts if n in (1, 4, 16, 64, 256, 1024)]
    rows = [[name, *(f"{curve[counts.index(n)]:.4f}" for n in shown)] for name, curve in curves.items()]
    yield "rounding-mean", table(["error of the mean of n quantizations", *(f"n = {n}" for n in shown)], rows)
    if study.pictures is not None:
        draw_means(counts, curves, study.pictures / "rounding.png")

    rows = []
    tensors = synthetic(study.size.side)
    tensors |= {f"{short(name)} dy": kept["dy"] for name, kept in study.captured.items()}
    for name, x in tensors.items():
        exact = x.to(torch.float32)
        small = (exact.abs() <= exact.abs().median()) & (exact != 0)
        nearest = decoded(x, NEAREST)
        random = torch.stack([decoded(x, STOCHASTIC, draw) for draw in range(32)]).mean(0)
        beyond = saturated(exact)
        gains = [f"{gain(q, exact):.4f}" for q in (nearest, random)]
        gains += [f"{gain(random[~beyond], exact[~beyond]):.4f}"]
        gains += [f"{gain(q[small], exact[small]):.3f}" for q in (nearest, random)]
        snr = [statistics(x, operand)["snr_db"] for operand in (NEAREST, STOCHASTIC)]
        rows.append([name, *gains, f"{snr[0] - snr[1]:.2f}", f"{float(beyond.double().mean()):.1%}"])
    header = ["tensor", "gain: nearest", "stochastic", "stochastic, not saturated"]
    header += ["smaller half: nearest", "stochastic", "SNR loss of stochastic, dB", "saturated"]
    yield "rounding-gain", table(header, rows)


def saturated(x: Tensor) -> Tensor:
    """Where FP32 `x` [rows, cols] lies beyond 6 block scales: its block's E4M3 scale was rounded down."""
    tensor_scale = torch.div(torch.full((), 2688.0), x.abs().amax())
    scales = to_e4m3(block_amax(x, (1, 16)) * (tensor_scale * (1 / E2M1_MAX))).to(torch.float32)
    return (x.abs().unflatten(1, (-1, 16)) * tensor_scale > scales[..., None] * E2M1_MAX * (1 + 2**-20)).flatten(1)


def mean_errors(x: Tensor, operand: Operand, counts: list[int], where: Tensor) -> list[float]:
    """Relative error, over the elements `where`, of the mean of n quantizations of `x`, for each n of `counts`."""
    total, errors = torch.zeros_like(x, dtype=torch.float64), []
    for draw in range(counts[-1]):
        total += decoded(x, operand, draw)
        if draw + 1 in counts:
            errors.append(relative(total[where] / (draw + 1), x[where]))
    return errors
