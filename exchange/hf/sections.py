"""One of our parameters as the tensors of a published checkpoint.

Our packed projections stand group by group, published ones section by section (models/packing.py); some published
formats have a tensor of its own for each section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Section:
    """A published tensor made of rows of ours.

    name: its published name. shape: its published shape, of as many elements as the rows. rows: int64, our row number
    of each of its rows, None if it is the whole of ours in our order. fp32: never written in a smaller type.
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor | None = None
    fp32: bool = False

    def published(self, ours: Tensor) -> Tensor:
        """Of our whole parameter: this tensor, contiguous, in the dtype of ours. Extra columns of another width than
        the parameter's, such as packed codes, pass through in the same order of rows."""
        return (ours if self.rows is None else ours[self.rows]).contiguous()


def in_sections(names: Sequence[str], sizes: Sequence[int], order: Tensor, width: int) -> list[Section]:
    """Sections of `sizes` rows each, `width` columns, of a parameter whose rows are `published[order]`."""
    ours = order.argsort()
    return [
        Section(name, (size, width), rows)
        for name, size, rows in zip(names, sizes, ours.split(list(sizes)), strict=True)
    ]


def ours_of(sections: Sequence[Section], published: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The inverse of `Section.published`: our parameter, FP32 [*shape], from the published tensors by name."""
    ours = torch.empty(shape)
    for section in sections:
        values = published[section.name].to(torch.float32)
        if section.rows is None:
            ours.copy_(values.view(shape))
        else:
            ours[section.rows] = values.view(-1, *shape[1:])
    return ours
