"""Gradients summed in an order that does not depend on the number of ranks, and their norm (`parallel.reproducible`).

A sum of floating-point numbers depends on its order, and the order in a ring depends on its ranks. Here one binary tree
over the micro-batches of a global batch sums its gradient, neighbours first:

    (((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)))        indices of micro-batches in the global batch

At each level the tree has equal subtrees, so any power-of-two number of ranks can compute the same tree. With
`reduce_gradients=once` a rank has consecutive micro-batches: it sums its subtree, and the ranks sum the rest. With
`each` the ranks sum each round of one micro-batch per rank, and then a rank sums the rounds. A rank sums like a binary
counter: two sums of equally many leaves become one. If the number of micro-batches is not a power of two, a leaf is a
group of consecutive micro-batches, summed one after another; the size of the group is the odd factor of that number.
This needs `once`.

Between ranks, an all-to-all gives each rank its shard of all gradients (as many bytes as a ring sends), and the rank
adds them. Then each reduced shard is summed over replicas in the same way.

The binary counter keeps as many FP32 gradients as its tree has levels: complete ones with `once`, shards with `each`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.messages import start_all_gather


def leaf_size(num_micro_batches: int) -> int:
    """How many consecutive micro-batches of a global batch make a leaf of the tree: the odd factor of their number."""
    return num_micro_batches // (num_micro_batches & -num_micro_batches)


def tree_sum(parts: Tensor) -> Tensor:
    """The sum of parts [n, ...] over n, a power of two; neighbours are added first."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def tree_reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks m] of each rank, flat -> [m], the sum over ranks of this rank's slice."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return tree_sum(received.view(group.size(), -1))


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` [n] over the ranks of `group`, in place."""
    part = tree_reduce_scatter(pad(tensor, (0, -len(tensor) % group.size())), group)
    tensor.copy_(start_all_gather(part, group, async_op=False).wait()[: len(tensor)])


class GradientTree:
    """The part of the tree that one rank sums, between the micro-batches of `accumulate`.

    groups: functions that return the parameters whose gradients are reduced together. wait: called before gradients are
    read; it finishes what writes them.
    """

    def __init__(self, groups: Sequence[Callable[[], list[nn.Parameter]]], wait: Callable[[], None] = lambda: None):
        self._groups, self._wait = groups, wait
        self.begin()

    def begin(self) -> None:
        """Called before the first micro-batch of a step."""
        # The counter of each group: numbers of leaves (falling powers of 2), and the sums of their gradients.
        self._sums: list[list[tuple[int, list[Tensor]]]] = [[] for _ in self._groups]

    def keep(self, copied: bool = False) -> None:
        """Called after each leaf of this rank except the last: move its gradients from `.grad` into the sums. copied:
        copy them, because they are in the memory of a CUDA graph, which the next leaf overwrites."""
        self._wait()
        for group, sums in zip(self._groups, self._sums, strict=True):
            parameters, leaves = group(), 1
            total = _gradients(parameters)
            for parameter in parameters:
                parameter.grad = None
            while sums and sums[-1][0] == leaves:
                older = sums.pop()[1]
                torch._foreach_add_(older, total)  # type: ignore[attr-defined]
                total, leaves = older, 2 * leaves
            if copied and leaves == 1:
                in_graph, total = total, [torch.empty_like(gradient) for gradient in total]
                torch._foreach_copy_(total, in_graph)
            sums.append((leaves, total))

    def finish(self) -> None:
        """Called after the last leaf: add the sums to `.grad`, unless `finish_group` has."""
        self._wait()
        for index in range(len(self._groups)):
            self.finish_group(index)

    def finish_group(self, index: int) -> None:
        """Add a group's sums to `.grad`, and drop them."""
        sums, self._sums[index] = self._sums[index], []
        gradients = _gradients(self._groups[index]()) if sums else []
        for _, older in reversed(sums):
            torch._foreach_add_(gradients, older)  # type: ignore[attr-defined]


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [local_part(parameter.grad) for parameter in trained if parameter.grad is not None]
    assert len(gradients) == len(trained), "if one were missing, gradients of different parameters would be added"
    return gradients


# The norm of all gradients


@torch.no_grad()
def exact_norm_share(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """This rank's share of the squared L2 norm of all ranks' `gradients`, rounded so that a sum of shares is exact:
    0-dim FP64 on `device`, not finite if an element is not. A collective. The same bits on any number of ranks.

    Parameters are sharded by rows, so one rank has all elements of a row. It adds up their squares in an order that
    depends only on the number of columns. The sum over rows is exact, so its order does not matter.

    As in reproducible summation (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013): a sum of
    FP64 integers below 2^53 is exact in any order. All ranks first compute the sum approximately. Rows are scaled by
    the power of two that brings this sum below 2^51, and rounded to integers. The last bits of the approximate sum
    depend on the mesh; the scale depends on it only if they cross a power of two, estimated once in 10^13 steps.
    """
    rows = row_squares(gradients, device)
    rough = rows.sum()
    dist.all_reduce(rough)
    power = (50 - torch.frexp(rough).exponent.to(torch.int64)).clamp(-1022, 1023)
    scale = ((power + 1023) << 52).view(torch.float64)  # 2^power; torch.ldexp may compute it in FP32
    return torch.where(rough.isfinite(), (rows * scale).round().sum() / scale, rough)


def row_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of every row of every gradient [rows, ...], FP64. Each element of a vector is a row."""
    empty = torch.zeros(0, device=device)
    of_vectors = torch.cat([empty, *(gradient.flatten() for gradient in gradients if gradient.ndim < 2)])
    matrices = [gradient.flatten(1) for gradient in gradients if gradient.ndim > 1]
    if device.type == "cuda":
        from megatron_fp4.parallel.exact_norm_triton import sum_row_squares

        of_matrices = [sum_row_squares(matrix) for matrix in matrices if matrix.numel()]
    else:
        of_matrices = [_sum_columns(matrix.double().square()) for matrix in matrices if matrix.numel()]
    return torch.cat([of_vectors.double().square(), *of_matrices])


def _sum_columns(squares: Tensor) -> Tensor:
    """[rows, columns] -> [rows], as a tree. The order of `Tensor.sum` depends on the number of rows."""
    columns = squares.shape[1]
    return tree_sum(pad(squares, (0, (1 << (columns - 1).bit_length()) - columns)).T)
