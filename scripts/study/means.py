"""Section `means`: activations and gradients without their means over groups of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.quantization.group_means_cuda import split_means
from scripts.study.errors import NEAREST, decoded
from scripts.study.tables import short, table
from scripts.study.tensors import Study

SIZE = 128
"""Tokens of a group (fewer where there are fewer)."""


def study_means(study: Study) -> Iterator[tuple[str, str]]:
    """How much of x and dy their means hold, and the error of quantizing with and without them, in every linear."""
    rows = []
    for name, kept in study.every_linear.items():
        cells = [f"`{short(name)}`"]
        for which in ("x", "dy"):
            share, before, after = errors(kept[which])
            cells += [f"{share:.1%}", f"{before:.3f}", f"{after:.3f}"]
        rows.append(cells)
    parts = ("in means", "error", "error without means")
    yield "means", table(["linear", *(f"{which}: {part}" for which in ("x", "dy") for part in parts)], rows)


def errors(x: Tensor) -> tuple[float, float, float]:
    """Of x [tokens, features]: the share of its sum of squares that its means hold, and the relative errors of NVFP4
    1x16 along the features, to nearest, with its means and without."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
    _, rest = split_means(x, SIZE)
    norm = x.double().norm()
    with_means, without = (float((decoded(one, NEAREST).double() - one.double()).norm() / norm) for one in (x, rest))
    return 1 - float((rest.double().norm() / norm) ** 2), with_means, without
