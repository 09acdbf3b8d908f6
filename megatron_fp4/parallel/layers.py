"""Tensor-parallel layers on token-major activations [tokens, dim].

The plan gives linears their recipe. No layer has a bias. With sequence parallelism `quantized_linear` gathers and
scatters tokens while its GEMMs run (precision/linear.py). All other collectives are in the forward passes below.

Between layers a rank holds all tokens, or with sequence parallelism a contiguous slice of them. Sums are in the
tensor's dtype (BF16 in training, as in the paper).

Row order: if a projection packs several outputs (query, key and value heads; Mamba-2's z, x, B, C, dt), its rows are
ordered by *group*: first all rows of KV head or state group 0, then those of 1, and so on. So an even split of the rows
gives each rank whole groups, a checkpoint has the same meaning at every tensor-parallel size, and a packed weight is
still one quantized tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import lookup, new_parameter
from megatron_fp4.precision.linear import grouped_linear, quantized_linear, split_linear
from megatron_fp4.precision.messages import start_all_gather, start_reduce_scatter
from megatron_fp4.precision.operands import LinearContext, Sections, Sharding
from megatron_fp4.quantization.rounding import Span
from megatron_fp4.quantization.segments import Segments

Collective = Callable[[Tensor, ParallelMesh], Tensor]


class QuantizedLinear(nn.Module):
    """The base of linears: a weight and its context, which precision/plan.py fills in."""

    context: LinearContext

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, shard_dim: int | None, *experts: int
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.mesh = in_features, out_features, mesh
        self.weight = new_parameter((*experts, out_features, in_features), mesh, shard_dim, of_experts=bool(experts))

    def extra_repr(self) -> str:
        recipes = [context.recipe.name for context in self.context.parts or (self.context,)]
        return f"in={self.in_features}, out={self.out_features}, recipe={', '.join(recipes)}"


class _ColumnParallel(QuantizedLinear):
    """y = x W^T with W's rows sharded.

    num_groups: number of equal groups of output rows (KV heads, state groups), which are never split; a multiple of the
    tensor-parallel size. With one group, rows are split at multiples of 16.
    keep_padding: return each group with the padding that it has for the GEMM.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, num_groups: int = 1, keep_padding: bool = False
    ) -> None:
        super().__init__(in_features, out_features, mesh, shard_dim=0)
        tp = mesh.tensor.size
        group = mesh.tensor.group if tp > 1 else None
        if num_groups == 1:
            num_groups = tp  # each rank's slice is one group of whole blocks, so the padding is that of one rank
        assert num_groups % tp == 0, (num_groups, tp)
        self.context = LinearContext(
            sharding=Sharding(
                outputs=Span(mesh.tensor.rank * (out_features // tp), group),
                num_groups=num_groups // tp,
                keep_padding=keep_padding,
                in_tokens=group if mesh.sequence_parallel else None,
            )
        )

    def _enter(self, x_td: Tensor) -> Tensor:
        return x_td if self.mesh.sequence_parallel else enter_tensor_parallel(x_td, self.mesh)


class ColumnParallelLinear(_ColumnParallel):
    """As its base, with a tensor for a result."""

    def forward(self, x_td: Tensor) -> Tensor:
        """[tokens (local with sequence parallelism), in] -> [tokens, out / tp (with `keep_padding`: and padding)]."""
        return quantized_linear(self._enter(x_td), self.weight, self.context)


Layout = tuple[Sections, ...]
"""The sections of each tensor of a packed result, in order."""


class PackedLinear(_ColumnParallel):
    """A column-parallel linear whose outputs are sections, such as q, k and v; in each group, one after the other.

    sections: (name, rows in each group). The plan may give them several recipes; then each part is a linear of its own.
    """

    def __init__(
        self, in_features: int, sections: Sections, mesh: ParallelMesh, num_groups: int, keep_padding: bool = False
    ) -> None:
        out_features = num_groups * sum(rows for _, rows in sections)
        super().__init__(in_features, out_features, mesh, num_groups, keep_padding)
        self.sections = sections

    @property
    def layout(self) -> Layout:
        """What `forward` returns, for `sections_of`."""
        parts = [part.sharding.section for part in self.context.parts]
        sizes = dict(self.sections)
        return tuple(tuple((name, sizes[name]) for name in part.names) for part in parts if part) or (self.sections,)

    def forward(self, x_td: Tensor) -> tuple[Tensor, ...]:
        """As `ColumnParallelLinear`, but a tensor for each part of the plan, with its own padding; one if there are no
        parts."""
        x_td = self._enter(x_td)
        if self.context.parts:
            return split_linear(x_td, self.weight, self.context)
        return (quantized_linear(x_td, self.weight, self.context),)


def sections_of(
    parts: Sequence[Tensor], layout: Layout, groups: int, *names: str | tuple[str, ...]
) -> tuple[Tensor, ...]:
    """Sections [..., groups, rows in a group] of a packed result; several names: sections that follow each other.

    parts, layout: of a `PackedLinear`, [..., features of `groups` groups with their padding]. Results are views, except
    several sections that are not in one part.
    """
    grouped = [part.unflatten(-1, (groups, -1)) for part in parts]
    found: dict[str, tuple[int, int, int]] = {}  # section: its part, its rows there from first to end
    for number, sections in enumerate(layout):
        end = 0
        for name, rows in sections:
            found[name] = number, end, (end := end + rows)

    def one(wanted: tuple[str, ...]) -> Tensor:
        places = [found[name] for name in wanted]
        (part, first, _), (_, _, end) = places[0], places[-1]
        if all(place[0] == part for place in places) and end - first == sum(place[2] - place[1] for place in places):
            return grouped[part][..., first:end]
        return torch.cat([grouped[part][..., first:end] for part, first, end in places], -1)

    return tuple(one((name,) if isinstance(name, str) else name) for name in names)


class RowParallelLinear(QuantizedLinear):
    """y = x W^T with W's columns sharded, and therefore the features of x."""

    def __init__(self, in_features: int, out_features: int, mesh: ParallelMesh) -> None:
        super().__init__(in_features, out_features, mesh, shard_dim=1)
        group = mesh.tensor.group if mesh.tensor.size > 1 else None
        out_tokens = group if mesh.sequence_parallel else None
        inputs = Span(mesh.tensor.rank * (in_features // mesh.tensor.size), group)
        self.context = LinearContext(sharding=Sharding(inputs=inputs, out_tokens=out_tokens))

    def forward(self, x_td: Tensor) -> Tensor:
        """[tokens, in / tp] -> [tokens (local with sequence parallelism), out]."""
        y_td = quantized_linear(x_td, self.weight, self.context)
        return y_td if self.mesh.sequence_parallel else leave_tensor_parallel(y_td, self.mesh)


class GroupedLinear(QuantizedLinear):
    """y = x W^T of the experts of this rank, each with its own W. Expert-parallel ranks divide the experts, then
    tensor-parallel ranks those. The recipe's blocks must divide both widths; the configuration check refuses others.

    num_experts: of all ranks. num_held: of this rank.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, mesh: ParallelMesh) -> None:
        super().__init__(in_features, out_features, mesh, 0, num_experts)
        ranks, tensor = mesh.experts, mesh.tensor
        of_rank = num_experts if ranks is None else num_experts // ranks.size
        self.num_held = of_rank // tensor.size
        first_expert = (0 if ranks is None else ranks.rank * of_rank) + tensor.rank * self.num_held
        outputs = Span(first_expert * out_features)
        self.context = LinearContext(num_experts=num_experts, sharding=Sharding(outputs=outputs))

    def forward(self, x_td: Tensor, segments: Segments) -> Tensor:
        """[tokens, in] -> [tokens, out]; tokens are in `segments`, those of each expert (`Segments.of_experts`)."""
        return grouped_linear(x_td, self.weight, self.context, segments)


class VocabParallelEmbedding(nn.Module):
    """A [vocab, dim] table. Each rank looks up the tokens whose rows it holds, and ranks sum the results."""

    def __init__(self, vocab_size: int, dim: int, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh, self.dtype = mesh, dtype
        self.weight = new_parameter((vocab_size, dim), mesh, shard_dim=0)
        self.first = mesh.tensor.rank * (vocab_size // mesh.tensor.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> [tokens (local with sequence parallelism), dim]."""
        index = tokens.flatten() - self.first
        if self.mesh.tensor.size == 1:
            return lookup(self.weight, index).to(self.dtype)
        rows_here = self.weight.shape[0] // self.mesh.tensor.size
        held = (index >= 0) & (index < rows_here)
        rows = lookup(self.weight, index.clamp(0, rows_here - 1)).to(self.dtype)
        # For each row one rank has the values and the others zeros, so the sum is exact in any dtype.
        return leave_tensor_parallel(rows * held[:, None], self.mesh)


class OutputHead(nn.Module):
    """Logits over this rank's slice of the vocabulary; in BF16 (paper, section 4.1) unless the plan says otherwise."""

    def __init__(self, dim: int, vocab_size: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = new_parameter((vocab_size, dim), mesh, shard_dim=0)
        self.first = mesh.tensor.rank * (vocab_size // mesh.tensor.size)
        outputs = Span(self.first, mesh.tensor.group if mesh.tensor.size > 1 else None)
        self.context = LinearContext(name="head", sharding=Sharding(outputs=outputs), keeps_rounded=False)

    def forward(
        self, x_td: Tensor, only: Tensor | None = None, loss: Callable[[Tensor, Tensor | None], Tensor] | None = None
    ) -> Tensor:
        """[tokens (local with sequence parallelism), dim] -> [tokens, vocab / tp].

        only: int64, indices of the tokens that get logits; None: all. loss: its result is returned instead of logits.
        It is called with all tokens [tokens, dim] and the weight, gathered maybe only during this forward pass; or,
        if the head is quantized, with the logits and None.
        """
        x_td = enter_tensor_parallel(x_td, self.mesh)
        if loss is not None and not self.context.recipe.quantized:
            return loss(x_td, self.weight)
        logits = quantized_linear(x_td if only is None else x_td[only], self.weight, self.context)
        return logits if loss is None else loss(logits, None)


def enter_tensor_parallel(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """Before a column-parallel layer: all tokens on every rank.

    With sequence parallelism: all-gather over tokens, and reduce-scatter of the gradient. Without it: the tensor
    itself, and all-reduce of the gradient.
    """
    if mesh.tensor.size == 1:
        return x_td
    pair = (all_gather_tokens, _reduce_scatter_tokens) if mesh.sequence_parallel else (_identity, _all_reduce)
    return _Collective.apply(x_td, mesh, *pair)  # type: ignore[return-value]


def leave_tensor_parallel(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """After a row-parallel layer: the sum of the partial results of all ranks.

    With sequence parallelism: reduce-scatter over tokens, and all-gather of the gradient. Without it: all-reduce, and
    the gradient itself.
    """
    if mesh.tensor.size == 1:
        return y_td
    pair = (_reduce_scatter_tokens, all_gather_tokens) if mesh.sequence_parallel else (_all_reduce, _identity)
    return _Collective.apply(y_td, mesh, *pair)  # type: ignore[return-value]


def gather_features(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """[tokens, dim / tp] -> [tokens, dim], ranks in order; gradients are summed over ranks."""
    if mesh.tensor.size == 1:
        return x_td
    return _Collective.apply(x_td, mesh, _all_gather_features, _reduce_scatter_features)  # type: ignore[return-value]


def scatter_features(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """[tokens, dim] -> [tokens, dim / tp], this rank's features of the sum over ranks."""
    if mesh.tensor.size == 1:
        return y_td
    return _Collective.apply(y_td, mesh, _reduce_scatter_features, _all_gather_features)  # type: ignore[return-value]


def all_gather_tokens(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """[tokens / tp, dim] -> [tokens, dim], ranks in order."""
    return start_all_gather(x_td, mesh.tensor.group, async_op=False).wait()


def _reduce_scatter_tokens(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    return start_reduce_scatter(y_td, mesh.tensor.group, async_op=False).wait()


def _all_gather_features(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    return all_gather_tokens(x_td.t(), mesh).t().contiguous()


def _reduce_scatter_features(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    return _reduce_scatter_tokens(y_td.t(), mesh).t().contiguous()


def _all_reduce(x: Tensor, mesh: ParallelMesh) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=mesh.tensor.group)
    return out


def _identity(x: Tensor, mesh: ParallelMesh) -> Tensor:
    return x.view_as(x)


class _Collective(torch.autograd.Function):
    """A collective in the forward pass, and its conjugate in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: ParallelMesh, forward: Collective, backward: Collective) -> Tensor:
        ctx.mesh, ctx.backward_collective = mesh, backward
        return forward(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(grad_outputs[0], ctx.mesh), None, None, None
