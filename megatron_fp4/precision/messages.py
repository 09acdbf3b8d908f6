"""Messages among tensor-parallel ranks that hold slices of the tokens, under way while GEMMs run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pending:
    """A message under way; `wait` gives its result, once. work: None if it has been waited for already.

    On a GPU a message that was started runs on a stream of its own beside what is launched after it. This holds
    what it reads and writes until then: the allocator must not give it away.
    """

    def __init__(self, work: dist.Work | None, sent: Tensor, received: Tensor) -> None:
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = (work, sent, received)

    def wait(self) -> Tensor:
        """What was received; on a GPU the current stream waits, not the host."""
        assert self._under_way is not None, "a message is waited for once"
        work, _, received = self._under_way
        if work is not None:
            work.wait()
        self._under_way = None
        return received


def start_all_gather(x: Tensor, group: ProcessGroup, beside: bool = True) -> Pending:
    """[n, ...] of each rank -> [ranks n, ...], ranks in order; of any dtype, sent as bytes.

    beside: whether anything is to run meanwhile; else it is waited for at once, which is cheaper.
    """
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # Flat, because a dimension of size 1 may have any stride.
    sent, received = (part.view(-1).view(torch.uint8) for part in (x, out))
    work = dist.all_gather_into_tensor(received, sent, group=group, async_op=beside)
    return Pending(work, x, out)


def start_reduce_scatter(y: Tensor, group: ProcessGroup, beside: bool = True) -> Pending:
    """[ranks n, ...] partial sums -> [n, ...] sums in y's dtype, of this rank's slice. beside: as above."""
    y = y.contiguous()
    out = y.new_empty((y.shape[0] // group.size(), *y.shape[1:]))
    return Pending(dist.reduce_scatter_tensor(out, y, group=group, async_op=beside), y, out)
