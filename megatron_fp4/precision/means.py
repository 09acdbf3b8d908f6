"""What a call of a linear does about operands without their means over groups of tokens (`mean: removed`).

    x = 1 m^T + R          quantization/group_means.py, in groups of `mean_group` tokens of one sequence
    y  = Q(R) Q(W)^T + 1 (m Q(W)^T)                  dgrad likewise, of dy
    dW = Q(R_dy)^T Q(R_x) + sum over groups of tokens * m_dy m_x^T

R takes the tensor's place before anything is measured, transformed or quantized. What that takes from a product is
added here: a GEMM of one row (of wgrad one column) a group, `mean_group` times as small as that of the tokens. Means
stay in the compute dtype: four bits would save nothing, and their error would be one that all tokens of a group share.

`reference.py` specifies it. A slice of the tokens, as sequence parallelism has them, is quantized on its rank only
where groups lie in it whole (`mean_tokens` is among what `LinearCall.slices` asks for); means then are gathered beside
the codes. Shards of features are no matter: a mean is one of a single feature, and its product a partial sum like the
tokens' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, RowGroups
from megatron_fp4.precision.gemm_operand import GemmOperand
from megatron_fp4.precision.recipe import USES, Place, Recipe, uses_means
from megatron_fp4.precision.token_messages import start_all_gather
from megatron_fp4.quantization.group_means import add_by_group, group_sums
from megatron_fp4.quantization.group_means_cuda import split_means
from megatron_fp4.quantization.hadamard import random_hadamard_transform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Call(Protocol):
    """What is needed of a `LinearCall`, which says what these are."""

    recipe: Recipe
    backend: Backend
    num_tokens: int
    slices: dict[str, ProcessGroup]
    group_rows: int
    padded_group_rows: int

    def pad_tokens(self, x: Tensor) -> Tensor: ...

    def signs(self, gemm: str) -> Tensor: ...


def adds_means(recipe: Recipe) -> bool:
    """Whether a part of the weight gradient is the product of both tensors' means."""
    return uses_means([recipe.wgrad])


def mean_tokens(recipe: Recipe, tensor: str) -> int:
    """Tokens that share a mean of `tensor` (`activation` or `gradient`), 1 where nobody needs one."""
    needed = adds_means(recipe) or recipe[USES[tensor][0]].removes_mean
    return recipe.mean_group if needed else 1


def split(call: _Call, tensor: str, x: Tensor, needs_wgrad: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """The means [groups, features] of a tensor [tokens, features], padded, or of this rank's slice of it, and what is
    left of it without them, padded; None for what nobody needs. Both in x's dtype."""
    if not (call.recipe[USES[tensor][0]].removes_mean or (needs_wgrad and adds_means(call.recipe))):
        return None, None
    only_means = not any(call.recipe[place].removes_mean for place in USES[tensor])
    means, rest = split_means(x[: call.num_tokens], call.recipe.mean_group, only_means=only_means)
    if only_means:
        return means, None
    return means, rest if rest.shape[0] == x.shape[0] else call.pad_tokens(rest)


def without_means(call: _Call, place: Place, x: Tensor, rest: Tensor | None = None) -> Tensor:
    """What the operand at `place` is made of where that of `x` [tokens, features], padded, would be: `x` itself, or
    what is left of it without its means. rest: that, if it is known already."""
    if not call.recipe[place].removes_mean:
        return x
    rest = split(call, place.tensor, x)[1] if rest is None else rest
    assert rest is not None
    return rest


def means_of_all(call: _Call, tensor: str, means: Tensor | None) -> Tensor | None:
    """The means of all tokens, from those that `split` gave."""
    if means is None or tensor not in call.slices:
        return means
    return start_all_gather(means, call.slices[tensor], beside=False).wait()


def add_means(call: _Call, place: Place, product: Tensor, means: Tensor | None, weight: BackendOperand) -> None:
    """Add to a product [tokens, features], padded, what the means that the operand at `place` is without have of it:
    their own product with the weight, in FP32, the same row for every token of a group."""
    if not call.recipe[place].removes_mean:
        return
    assert means is not None
    rht = call.recipe.gemms[place.gemm].rht
    rows = random_hadamard_transform(means.to(torch.bfloat16), rht, call.signs(place.gemm)) if rht else means
    terms = call.backend.gemm(GemmOperand(rows), weight, torch.float32)
    add_by_group(product[: call.num_tokens], terms, call.recipe.mean_group)


def add_products_of_means(call: _Call, gradient: Tensor, dy_means: Tensor, x_means: Tensor) -> None:
    """Add to a weight gradient, FP32 [out, in] without padding, what its operands are without."""
    padded, kept = call.padded_group_rows, call.group_rows
    rows = None if padded == kept else RowGroups(padded, kept)
    sums = group_sums(dy_means, call.num_tokens, call.recipe.mean_group)
    call.backend.gemm(GemmOperand(sums.t()), GemmOperand(x_means.t()), torch.float32, gradient, rows)
