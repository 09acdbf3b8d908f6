"""What quantization did to a tensor or a product, as sums that add up.

Everything here is a sum (or a maximum) over elements, so that the numbers of chunks, micro-batches and ranks combine
to those of the whole; `operand_statistics` and `relative_error` turn the totals into what people read:

    snr_db      10 log10( sum x^2 / sum (q - x)^2 ), x what the quantizer saw (behind a Hadamard transform), q what it
                made of it
    zeroed      share of the nonzero x that became zero
    saturated   share of the nonzero x beyond the largest value that their block's scale can express; a scale of zero
                expresses nothing, and what it covers counts as zeroed alone
    amax, rms   largest magnitude and root mean square before the transform; crest = amax / rms
    *_rht       the same three behind the transform; its purpose is a smaller crest
    error       ||q - exact|| / ||exact|| of a product (Frobenius norms)

Sums are FP64 tensors on the tensors' own device: nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

OPERAND_SUMS = ("signal", "error", "nonzero", "zeroed", "saturated", "raw_signal", "raw_count")
OPERAND_MAXIMA = ("raw_amax", "amax")
PRODUCT_SUMS = ("signal", "error")

# Block scales are themselves rounded numbers: an element this close to the largest code is on it, not beyond.
_ON_THE_LIMIT = 1.0 + 2.0**-20


def operand_sums(x: Tensor, values: Tensor, limits: Tensor) -> Tensor:
    """The first five of `OPERAND_SUMS`: FP64 [5]. (The other two are of the tensor before a transform.)

    x: FP32 [rows, cols], what the quantizer saw. values: FP32 [rows, cols], what it made of it, dequantized.
    limits: FP32 [rows, cols / block], the largest magnitude that each block's scale can express.
    """
    magnitude = x.abs().unflatten(-1, (limits.shape[-1], -1))
    reach = torch.where(limits > 0, limits * _ON_THE_LIMIT, math.inf)
    saturated = torch.count_nonzero(magnitude > reach[..., None])
    counts = torch.stack((torch.count_nonzero(x), torch.count_nonzero(values), saturated)).to(torch.float64)
    # Zeros stay zeros in every format, so a count of what is left is a count of what was lost.
    counts[1] = counts[0] - counts[1]
    return torch.cat((_sums_of_squares(x, values - x), counts))


def sums_in_units(sums: Tensor, unit: Tensor) -> Tensor:
    """`OPERAND_SUMS` of a tensor from those of the tensor in units of `unit`, 0-dim: FP64 [7]."""
    signal, error, nonzero, zeroed, saturated, raw_signal, raw_count = sums.unbind()
    square = unit.to(torch.float64).square()
    return torch.stack((signal * square, error * square, nonzero, zeroed, saturated, raw_signal * square, raw_count))


def product_sums(result: Tensor, exact: Tensor) -> Tensor:
    """`PRODUCT_SUMS` of a product [rows, cols] and of the same product unquantized, FP32: FP64 [2]."""
    return _sums_of_squares(exact, result - exact)


def operand_statistics(sums: Sequence[float], maxima: Sequence[float], transformed: bool) -> dict[str, float]:
    """The statistics at the top of this file from totals in the order of `OPERAND_SUMS` and `OPERAND_MAXIMA`.

    transformed: whether a Hadamard transform stood before the quantizer; without one, the `*_rht` are left out.
    A tensor without a nonzero element has an SNR of infinity and shares of 0.
    """
    signal, error, nonzero, zeroed, saturated, raw_signal, raw_count = sums
    raw_amax, amax = maxima
    statistics = {
        "snr_db": _decibels(signal, error),
        "zeroed": zeroed / max(nonzero, 1.0),
        "saturated": saturated / max(nonzero, 1.0),
        "amax": raw_amax,
        "rms": (rms := math.sqrt(raw_signal / raw_count)),
        "crest": raw_amax / rms if rms > 0 else 0.0,
    }
    if transformed:
        rms_rht = math.sqrt(signal / raw_count)
        crest_rht = amax / rms_rht if rms_rht > 0 else 0.0
        statistics |= {"amax_rht": amax, "rms_rht": rms_rht, "crest_rht": crest_rht}
    return statistics


def relative_error(sums: Sequence[float]) -> float:
    """||result - exact|| / ||exact|| from totals in the order of `PRODUCT_SUMS`; 0 where both are 0."""
    signal, error = sums
    if signal == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / signal)


def sum_of_squares(x: Tensor) -> Tensor:
    """FP64, 0-dim."""
    return _sums_of_squares(x)[0]


def _sums_of_squares(*tensors: Tensor) -> Tensor:
    # FP32 norms (1e-4 exact, which is 0.001 dB) squared in FP64; FP64 copies would cost several times as much.
    norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]
    return torch.stack(norms).to(torch.float64).square_()


def _decibels(signal: float, error: float) -> float:
    if signal > 0 and error > 0:
        return 10 * (math.log10(signal) - math.log10(error))
    if math.isnan(signal) or math.isnan(error):
        return math.nan
    return -math.inf if error > 0 else math.inf
