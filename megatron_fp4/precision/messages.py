"""Collectives of ranks that hold slices of a tensor; they can overlap with GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch 2.13 renamed these functions, and warns if the names of 2.11 are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that was started; call `wait` once for its result. work: None if it was not asynchronous.

    On a GPU an asynchronous collective runs on a stream of its own, beside kernels that are launched after it. Until
    `wait`, this object holds the tensors that it reads and writes, so that the allocator does not reuse their memory.
    """

    def __init__(self, work: dist.Work | None, sent: Tensor, received: Tensor) -> None:
        self._pending: tuple[dist.Work | None, Tensor, Tensor] | None = (work, sent, received)

    def wait(self) -> Tensor:
        """The received tensor; on a GPU the current stream waits, not the host."""
        assert self._pending is not None, "wait was called twice"
        work, _, received = self._pending
        if work is not None:
            work.wait()
        self._pending = None
        return received


def start_all_gather(x: Tensor, group: ProcessGroup, async_op: bool = True) -> Pending:
    """[n, ...] of each rank -> [ranks n, ...], ranks in order; any dtype, sent as bytes.

    async_op: whether anything runs between this call and `wait`; if not, False is cheaper.
    """
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # Flattened first, because a dimension of size 1 may have any stride.
    sent, received = (part.view(-1).view(torch.uint8) for part in (x, out))
    work = _all_gather(received, sent, group=group, async_op=async_op)
    return Pending(work, x, out)


def start_reduce_scatter(y: Tensor, group: ProcessGroup, async_op: bool = True, out: Tensor | None = None) -> Pending:
    """[ranks n, ...] partial sums -> [n, ...], this rank's slice of the sums, in y's dtype; contiguous `out`, if given.
    async_op: as above."""
    y = y.contiguous()
    out = y.new_empty((y.shape[0] // group.size(), *y.shape[1:])) if out is None else out
    return Pending(_reduce_scatter(out, y, group=group, async_op=async_op), y, out)


def start_exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Pending:
    """[rows, columns] -> the rows that the ranks of `group` send to this one, ranks in order; any dtype, sent as bytes.

    sent, received: how many rows this rank sends to each rank and gets from each.
    """
    x = x.contiguous()
    out = x.new_empty((sum(received), x.shape[1]))
    work = dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), received, sent, group, async_op=True)
    return Pending(work, x, out)
