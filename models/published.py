"""A block's parameters as tensors of published models: names, shapes and order of rows.

A mixer has a `HuggingFaceBlock` and a `MegatronBlock` if these formats have its kind of block; exchange/ reads and
writes the formats. Names are within the mixer on our side, and within its module on theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig


@dataclass(frozen=True)
class Section:
    """One tensor of a published model: some rows of one of our parameters. Our packed projections are ordered by group,
    published tensors by section (such as q, k, v).

    name, shape: of the published tensor. rows: int64, for each of its rows the number of our row; None if it is our
    complete parameter in our order. fp32: whether it is always written in FP32. expert: the matrix of our parameter
    [experts, out, in] that it is; None: our parameter is one of all.
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor | None = None
    fp32: bool = False
    expert: int | None = None

    @property
    def module(self) -> str:
        """The published name of the module that has this weight."""
        return self.name.removesuffix(".weight")

    def inside(self, module: str) -> Section:
        """The same tensor, named from outside of the published `module`."""
        return replace(self, name=f"{module}.{self.name}")

    def matrix(self, ours: Tensor) -> Tensor:
        """The matrix of our parameter that this tensor is a part of."""
        return ours if self.expert is None else ours[self.expert]

    def published(self, ours: Tensor) -> Tensor:
        """This tensor, contiguous, from our parameter and in its dtype."""
        ours = self.matrix(ours)
        rows = ours if self.rows is None else ours.index_select(_row_axis(ours), self.rows)
        return rows.contiguous().view(self.shape)


Sections = Mapping[str, Sequence[Section]]
"""Name of our parameter -> its published tensors."""


@dataclass(frozen=True)
class HuggingFaceBlock:
    """A kind of block of transformers' nemotron_h, arcee or llama.

    types: its names in `layers_block_type` of nemotron_h; empty: only Transformers have it. sections: the published
    tensors. settings: our setting -> its key in config.json and the default in transformers; where None is meant, ours
    is 0. fixed: the values that keys must have; an import accepts a missing key. without_key: our settings for which it
    has no key -> the value that it computes. keys_always: whether config.json always has the keys.
    """

    types: tuple[str, ...]
    sections: Callable[[ModelConfig], Sections]
    settings: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    without_key: Mapping[str, Any] = field(default_factory=dict)
    keys_always: bool = True


@dataclass(frozen=True)
class MegatronBlock:
    """A kind of block of Megatron-core's hybrid model.

    module: its module in a layer. linears: names of the linears in it, those of some settings too. norm: key of the
    block's norm in a layer; empty: the first linear has it. sections: the published tensors. sizes: called as
    sizes(shape, known), returns the settings that shapes tell; shape(NAME) is the shape of a tensor, known has the
    other settings. told: the settings that only arguments tell. fixed: settings that Megatron cannot change.
    arguments: our setting -> its argument, and ours where that is None, if the model has such a block. constants:
    arguments that then have these values. gated: whether its FFNs are; None: it has none.
    """

    module: str
    linears: tuple[str, ...]
    sections: Callable[[ModelConfig], Sections]
    sizes: Callable[[Callable[[str], tuple[int, ...]], Mapping[str, Any]], dict[str, Any]] = lambda shape, known: {}
    told: tuple[str, ...] = ()
    fixed: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    arguments: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    gated: Callable[[ModelConfig], bool | None] = lambda config: None
    norm: str = ""

    @property
    def norm_key(self) -> str:
        return self.norm or f"{self.module}.{self.linears[0]}.layer_norm_weight"


def _row_axis(ours: Tensor) -> int:
    """The axis of a parameter's rows; that of experts is before it."""
    return max(ours.dim() - 2, 0)


def split_rows(names: Sequence[str], sizes: Sequence[int], order: Tensor, *columns: int) -> list[Section]:
    """The sections of a parameter whose rows are `published[order]`. sizes: of each section. columns: other axes."""
    rows = order.argsort().split(list(sizes))
    return [Section(name, (size, *columns), at) for name, size, at in zip(names, sizes, rows, strict=True)]


def from_published(sections: Sequence[Section], published: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `Section.published`: our parameter in FP32, from the published tensors by name."""
    shape = shape_of(sections)
    ours = torch.empty(shape)
    for section in sections:
        values = published[section.name].to(torch.float32)
        if section.rows is None:
            section.matrix(ours).view(values.shape).copy_(values)
        else:
            axis, sizes = _row_axis(ours), [*shape]
            sizes[axis] = len(section.rows)
            ours.index_copy_(axis, section.rows, values.view(sizes))
    return ours


def shape_of(sections: Sequence[Section]) -> torch.Size:
    """The shape of our parameter: the rows of all sections, and their columns without the axis of size 1 that published
    convolutions have; or the matrices of all experts."""
    if sections[0].expert is not None:
        return torch.Size((len(sections), *sections[0].shape))
    rows, columns = sum(section.shape[0] for section in sections), sections[0].shape[1:]
    return torch.Size((rows, *(size for size in columns if size != 1 or len(columns) == 1)))


def group_major_order(section_rows: Sequence[int], num_groups: int) -> Tensor:
    """The row order of a packed projection, int64 [rows]: ours is by group, that of published checkpoints by section.

        ours = published[order]             published = ours[order.argsort()]

    Published weights stack their sections: `[q | k | v]`, Mamba-2's `[z | x | B | C | dt]`. Ours stack groups (a KV
    head with its query heads; a state group with its heads): `[q_0 | k_0 | v_0 | q_1 | k_1 | ...]`. So an even split
    over tensor-parallel ranks gives every rank whole groups. section_rows: of each section, multiples of `num_groups`.
    """
    sections = torch.arange(sum(section_rows)).split(list(section_rows))
    return torch.cat([section.view(num_groups, -1) for section in sections], 1).flatten()
