"""Expert parallelism: a rank has some of the experts, and computes the rows that the ranks of its group send them.

    rows by expert, token    all-to-all    rows by source, expert, token    reordered    rows by expert, source, token

The rows of one source for one expert are a segment (quantization/segments.py), so no result depends on how many ranks
share the experts. Results take the way back. Each rank sends the numbers of its rows first, and the host waits for
these, because it must know how many rows it receives. All ranks of a group run the same forward and backward passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_fp4.parallel.mesh import Ranks
from megatron_fp4.precision.messages import exchange_rows


class Exchange:
    """The rows that the ranks of a group send each other for one block.

    counts: int64 [experts of this rank, sources], the rows that this rank receives. tokens: int64 [rows], the token of
    each, by expert, source and token.
    """

    def __init__(self, ranks: Ranks, counts_e: Tensor, token_n: Tensor) -> None:
        """A collective. counts_e: int64 [experts], rows of this rank for each expert. token_n: int64 [rows], the number
        of the token of each row, which are sorted by expert; all ranks' numbers differ."""
        self.ranks = ranks
        counts_re, ones = counts_e.view(ranks.size, -1), [1] * ranks.size
        counts_se = exchange_rows(counts_re, ones, ones, ranks.group)
        self.counts = counts_se.t().contiguous()
        self.sent, self.received = self.rows_on_host(torch.stack((counts_re.sum(1), counts_se.sum(1))), len(token_n))
        self._source = _by_expert(counts_se, sum(self.received))
        self._place = torch.empty_like(self._source)
        self._place.scatter_(0, self._source, torch.arange(len(self._source), device=token_n.device))
        self.tokens = self._sent(token_n[:, None])[:, 0]

    def rows_on_host(self, rows: Tensor, num_rows: int) -> list[list[int]]:
        """`rows` [2, ranks] as numbers: those for each rank, and those from each. num_rows: of this rank."""
        return rows.tolist()  # type: ignore[no-any-return]

    def to_experts(self, x_nd: Tensor) -> Tensor:
        """This rank's rows, sorted by expert, go to the experts; the rows that this rank's experts get."""
        return _Exchanged.apply(x_nd, self, False)  # type: ignore[return-value]

    def from_experts(self, y_nd: Tensor) -> Tensor:
        """The inverse of `to_experts`."""
        return _Exchanged.apply(y_nd, self, True)  # type: ignore[return-value]

    def _sent(self, x_nd: Tensor) -> Tensor:
        return exchange_rows(x_nd, self.sent, self.received, self.ranks.group)[self._source]

    def _returned(self, y_nd: Tensor) -> Tensor:
        return exchange_rows(y_nd[self._place], self.received, self.sent, self.ranks.group)


class _Exchanged(Function):
    """Each row goes to one place, so its gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, exchange: Exchange, back: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return exchange._returned(x_nd) if back else exchange._sent(x_nd)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        return (exchange._sent if ctx.back else exchange._returned)(grad_outputs[0]), None, None


def _by_expert(counts_se: Tensor, rows: int) -> Tensor:
    """Of rows sorted by source, expert and token, those in the order of expert, source and token. counts_se: int64
    [sources, experts]. int64 [rows]."""
    ends_se = counts_se.flatten().cumsum(0).view_as(counts_se)
    counts_es, first_es = counts_se.t().flatten(), (ends_se - counts_se).t().flatten()
    ends_es, row = counts_es.cumsum(0), torch.arange(rows, device=counts_se.device)
    segment = torch.searchsorted(ends_es, row, right=True)
    return first_es[segment] + row - (ends_es - counts_es)[segment]
