"""Gradients summed in an order that does not depend on the number of ranks (`parallel.reproducible`).

A sum of floating-point numbers depends on its order, and a ring's order on the ranks in it. Here the gradient of a
global batch is summed by one binary tree over its micro-batches, which neighbours join first:

    (((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)))        micro-batches of a global batch, by index

Cut at any level it is a tree of R equal subtrees, so a power of two of ranks computes the same tree: with
`reduce_gradients=once` a rank has consecutive micro-batches, sums its subtree by a binary counter and the ranks sum the
rest; with `each` ranks take micro-batches in turn, sum those of a round, and the counter sums the rounds. If the number
of micro-batches is no power of two, its odd factor is the number of consecutive ones that are summed one after another
at the leaves, for which `once` is needed.

Between ranks an all-to-all brings each rank its shard of all gradients, as many bytes as a ring sends, and they are
added here. FSDP2 calls this in the place of its reduce-scatter, and of its all-reduce over replicas: there the model is
sharded over the shards alone, and each reduced shard is then summed over replicas.

The counter holds as many further FP32 gradients as a rank's tree has levels: whole ones with `once`, shards with
`each`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.parallel.fsdp_private import before_reduction, parameters_of, reduction_streams
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part


def leaf_size(num_micro_batches: int) -> int:
    """How many consecutive micro-batches of a global batch are summed one after another: the odd factor."""
    return num_micro_batches // (num_micro_batches & -num_micro_batches)


def tree_sum(parts: Tensor) -> Tensor:
    """The sum of parts [n, ...] over n, a power of two; neighbours are added first."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


class TreeReduceScatter:
    """In the place of FSDP2's reduce-scatter (`set_custom_reduce_scatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """output_tensor [m] becomes the sum over ranks of their input_tensor [ranks, m], flat, at this rank."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor`, flat, over the ranks of `group`, in place."""
    ranks = group.size()
    padded = torch.nn.functional.pad(tensor, (0, -len(tensor) % ranks))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    dist.all_gather_into_tensor(padded, tree_sum(received.view(ranks, -1)), group=group)
    tensor.copy_(padded[: len(tensor)])


class GradientTree:
    """The part of the tree that one rank sums, between the micro-batches of `accumulate`.

    model: sharded by FSDP2, or of one data-parallel rank alone.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._groups: list[Callable[[], list[nn.Parameter]]] = []  # of parameters that hold gradients together
        self._reduced_beside: FSDPModule | None = None  # the model, where FSDP2 reduces after every micro-batch
        if mesh.dp_size == 1:
            # Looked up in the first step: initialization puts others in their places.
            self._groups.append(cache(lambda: [one for one in model.parameters() if one.requires_grad]))
        else:
            assert isinstance(model, FSDPModule)
            if mesh.reduce_each and mesh.device.type == "cuda":
                self._reduced_beside = model
            for module in model.modules():
                if isinstance(module, FSDPModule) and parameters_of(module):
                    self._add_group(module, mesh.reduce_each)
        self.begin()

    def _add_group(self, module: FSDPModule, reduce_each: bool) -> None:
        parameters, index = parameters_of(module), len(self._groups)
        self._groups.append(lambda: [one.sharded if reduce_each else one.gathered for one in parameters])
        if not reduce_each:
            before_reduction(module, lambda: self._finish(index))

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        # Of each group: the number of leaves, falling powers of 2, and the sums of their gradients.
        self._sums: list[list[tuple[int, list[Tensor]]]] = [[] for _ in self._groups]

    def keep(self, copied: bool = False) -> None:
        """After each leaf but this rank's last: take its gradients. copied: out of the memory of a CUDA graph, which
        the next leaf writes."""
        self._wait_for_reductions()
        for group, sums in zip(self._groups, self._sums, strict=True):
            parameters, leaves = group(), 1
            gradients = _gradients(parameters)
            if copied:
                in_graph, gradients = gradients, [torch.empty_like(gradient) for gradient in gradients]
                torch._foreach_copy_(gradients, in_graph)
            for parameter in parameters:
                parameter.grad = None
            while sums and sums[-1][0] == leaves:
                torch._foreach_add_(gradients, sums.pop()[1])  # type: ignore[attr-defined]
                leaves *= 2
            sums.append((leaves, gradients))

    def finish(self) -> None:
        """After the last leaf: `.grad` becomes the sum. With FSDP2 and `once` it was, before the reduction."""
        self._wait_for_reductions()
        for index in range(len(self._groups)):
            self._finish(index)

    def _finish(self, index: int) -> None:
        sums = self._sums[index]
        gradients = _gradients(self._groups[index]()) if sums else []
        while sums:
            torch._foreach_add_(gradients, sums.pop()[1])  # type: ignore[attr-defined]

    def _wait_for_reductions(self) -> None:
        if self._reduced_beside is not None:
            for stream in reduction_streams(self._reduced_beside):
                torch.cuda.current_stream().wait_stream(stream)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters), "without one, sums would be of gradients of different parameters"
    return gradients
