"""Means over groups of tokens: what `mean: removed` subtracts before it quantizes (Averis, arXiv 2603.10444).

Features whose values share a sign cost a quantizer dearly: their common part takes the scale, and what distinguishes
the tokens gets the codes that are left. A tensor x [tokens, features] is the mean of each feature and the rest,

    x = 1 m^T + R        in groups of `size` tokens, one after another; the last group may be shorter

and only R is quantized. m stays in the type of x: it is one row for `size` tokens. In FP32, in this order:

    lane_i = x_i + x_{i+16} + x_{i+32} + ...      16 lanes, each added up one after another; a short group with zeros
    sum    = the lanes by halves                   first eight plus last eight, then four, two and one
    m      = sum * (1 / tokens of the group)       rounded to the type of x
    R      = x - m                                 rounded to the type of x

The order makes the same bits on every device. Groups of one sequence never hold tokens of another where `size` divides
its length: then m depends neither on the micro-batch nor on the mesh. NaN and inf in a group make its m, and with it R
and the product, NaN or inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_LANES = 16


def group_means(x: Tensor, size: int) -> Tensor:
    """m of every group of `size` tokens (a multiple of 16) of x [tokens, features]: [groups, features], x's dtype."""
    full, rest = divmod(x.shape[0], size)
    means = [_sums(x[: full * size], size) * (1 / size)] if full else []
    if rest:
        means.append(_sums(pad(x[full * size :], (0, 0, 0, size - rest)), size) * (1 / rest))
    return (means[0] if len(means) == 1 else torch.cat(means)).to(x.dtype)


def group_sums(means: Tensor, tokens: int, size: int) -> Tensor:
    """What the tokens of each group add up to, by their mean: `means` times their number, in the dtype of `means`."""
    rest, sums = tokens % size, means * size
    return sums if not rest else torch.cat((sums[:-1], (means[-1:].to(torch.float32) * rest).to(means.dtype)))


def without_means(x: Tensor, means: Tensor, size: int) -> Tensor:
    """R [tokens, features] in x's dtype; means: `group_means` of x."""
    full, rest = divmod(x.shape[0], size)
    if not rest:
        return (x.unflatten(0, (full, size)) - means[:, None]).flatten(0, 1)
    return x - means.repeat_interleave(size, dim=0)[: x.shape[0]]


def add_by_group(y: Tensor, terms: Tensor, size: int) -> None:
    """y [tokens, features] += its group's row of FP32 `terms` [groups, features], in FP32, rounded to y's dtype."""
    full, rest = divmod(y.shape[0], size)
    if full:
        y[: full * size].unflatten(0, (full, size)).add_(terms[:full, None])
    if rest:
        y[full * size :].add_(terms[full:])


def _sums(x: Tensor, size: int) -> Tensor:
    """FP32 [groups, features] of x [groups * size, features]."""
    lanes = x.unflatten(0, (-1, size // _LANES, _LANES))
    total = lanes[:, 0].to(torch.float32, copy=True)
    for index in range(1, size // _LANES):
        total.add_(lanes[:, index])
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
