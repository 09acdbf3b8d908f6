"""Expert parallelism: a rank has some of the experts, and computes the rows that the ranks of its group send them.

    rows by expert, token    all-to-all    rows by source, expert, token

The rows of one source for one expert are a segment (quantization/segments.py), so no result depends on how many ranks
share the experts. Results take the way back. Each rank sends the numbers of its rows first, and the host waits for
these, because it must know how many rows it receives. All ranks of a group run the same forward and backward passes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_fp4.parallel.mesh import Ranks
from megatron_fp4.precision.messages import Pending, start_exchange


class Exchange:
    """The rows that the ranks of a group send each other for one block.

    A caller starts `to_experts` or `from_experts`, may launch other work, and calls `arrived` with what it got: on a
    GPU the messages run beside that work, and in the backward pass beside its backward pass.

    counts: int64 [sources, experts of this rank], the rows that this rank receives.
    """

    def __init__(self, ranks: Ranks, counts_e: Tensor, position_n: Tensor) -> None:
        """A collective, as are all methods.

        counts_e: int64 [experts], rows of this rank for each expert. position_n: int64 [rows], of each row, which are
        sorted by expert (`Segments.of_experts`).
        """
        self.ranks, self._position_n = ranks, position_n
        counts_re, ones = counts_e.view(ranks.size, -1), [1] * ranks.size
        self.counts = start_exchange(counts_re, ones, ones, ranks.group).wait()
        counts = torch.stack((counts_re, self.counts))
        self._on_host, self._copied = counts.to("cpu", non_blocking=True), None
        if counts.is_cuda:  # so that the host waits for the copy, not for what is launched after it
            self._copied = torch.cuda.current_stream(counts.device).record_event()
        self._pending: Pending | None = None

    @cached_property
    def sent_and_received(self) -> tuple[list[int], list[int]]:
        """Rows for each rank, and from each. The host waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        sent, received = self._on_host.sum(2).tolist()
        return sent, received

    @cached_property
    def positions(self) -> Tensor:
        """int64 [received rows], of each."""
        return start_exchange(self._position_n[:, None], *self.sent_and_received, self.ranks.group).wait()[:, 0]

    def to_experts(self, x_nd: Tensor) -> Tensor:
        """Start to send this rank's rows, sorted by expert, to the experts; returns what `arrived` takes."""
        return _Sent.apply(x_nd, self, False)  # type: ignore[return-value]

    def from_experts(self, y_nd: Tensor) -> Tensor:
        """Start to send the rows of this rank's experts back; returns what `arrived` takes."""
        return _Sent.apply(y_nd, self, True)  # type: ignore[return-value]

    def arrived(self, started: Tensor, back: bool = False) -> Tensor:
        """The rows that this rank gets. started: by `to_experts`, or if rows come back, by `from_experts`."""
        return _Arrived.apply(started, self, back)  # type: ignore[return-value]

    def start(self, x_nd: Tensor, back: bool) -> Tensor:
        """Start to send rows. No others may be under way. Returns an empty tensor."""
        assert self._pending is None
        sent, received = self.sent_and_received
        self._pending = start_exchange(x_nd, *((received, sent) if back else (sent, received)), self.ranks.group)
        return x_nd.new_empty(0)

    def finish(self) -> Tensor:
        """The rows of `start`, when they are there."""
        assert self._pending is not None
        rows, self._pending = self._pending.wait(), None
        return rows


class NoExchange:
    """Instead of an `Exchange`, if this rank has all experts."""

    def __init__(self, counts_e: Tensor, position_n: Tensor) -> None:
        self.counts, self.positions = counts_e, position_n

    def to_experts(self, x_nd: Tensor) -> Tensor:
        return x_nd

    from_experts = to_experts

    def arrived(self, started: Tensor, back: bool = False) -> Tensor:
        return started


class _Sent(Function):
    """Each row goes to one place, so its gradient takes the way back: `_Arrived` starts it, and `_Sent` gets it. The
    empty tensor between them only says which comes first."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, exchange: Exchange, back: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return exchange.start(x_nd, back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.finish(), None, None


class _Arrived(Function):
    """See `_Sent`."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: Exchange, back: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.start(grad_outputs[0], not ctx.back), None, None
