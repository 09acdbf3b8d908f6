"""The axes of the device mesh, a row each. What has to know the axes reads this table: the mesh and its groups, sums of
loss and gradients, the comparison of replicas, checks, the plan."""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """name: in the mesh, in records and in the plan. key: of its size in ParallelConfig; None: it gets the ranks that
    the other axes leave. rank: what one of its ranks is, for tables. divides: what its ranks divide among them:

        batch     the micro-batches of a global batch; loss and gradients are summed over the axis
        rows      the rows of every parameter, which are gathered for computation
        experts   the experts of a layer, by the model, instead of the rows of their weights, which are not gathered
        layers    a layer, by the model: all ranks have the same loss
        tokens    a micro-batch, by the model: all ranks have the same loss, and each a part of the gradient of what
                  they hold in copies; the step sums it

    Of what else an axis divides, the model says what it is (`divided_counts` in models/pattern.py). The checks of
    the configuration refuse an axis of which it says nothing.
    """

    name: str
    key: str | None
    rank: str
    divides: tuple[str, ...]


# The outermost first. The last one has neighbouring ranks, so it gets the fastest links.
AXES = (
    Axis("replicate", "replicate", "replica", ("batch",)),
    Axis("dp", None, "shard", ("batch", "rows")),
    Axis("ep", "expert", "expert-parallel rank", ("batch", "rows", "experts")),
    Axis("tp", "tensor", "tensor-parallel rank", ("layers", "tokens")),  # tokens: with parallel.sequence
)

# The name of the axes of rows as one axis, if there are several.
ROWS = "_".join(axis.name for axis in AXES if "rows" in axis.divides)
