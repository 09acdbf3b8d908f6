"""In a run, every N steps: one linear computed again by the reference.

    recheck = Recheck(interval, linears, device)
    with recheck.watching(step):
        result = train_step(...)
    rechecked = recheck.collect()           # None unless the step was due

The self-test before the first step meets random tensors on a fresh machine. This meets the run's own, on a machine
that may have begun to compute wrongly. In the due step a watcher stands between the linear and its backend. Of the
step's first micro-batch it compares every operand as the linear really used it (values or codes, scales, maxima) with
the reference quantizer's (operand_check.py), and rows of the three products with FP64 (comparison.py). It changes
nothing: it draws from no generator and writes no tensor of the run, so losses and weights keep their bits.

The linears take turns in the plan's order: which one is due is a function of the step alone, the same on all ranks and
after a resume. Each data-parallel rank checks it on its own micro-batch, each tensor-parallel rank on its own shard; a
fault on one rank is known to all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import Backend, OperandRequest, RowGroups
from megatron_fp4.precision.comparison import product_errors
from megatron_fp4.precision.operand_check import operand_fault
from megatron_fp4.precision.selftest import SelfTestError
from megatron_fp4.precision.token_messages import Gather

if TYPE_CHECKING:
    from megatron_fp4.precision.linear_context import LinearContext

# Of each product, other ones at each of a linear's turns.
_PRODUCT_ROWS = 64


class RecheckError(SelfTestError):
    """A linear of a running run computed something else than the reference; the message is the same on all ranks."""


@dataclass(frozen=True)
class Rechecked:
    """One linear in one step (from 0). comparisons: on this rank. faults: of all ranks, the same on all."""

    linear: str
    step: int
    comparisons: int
    faults: list[str]

    def __str__(self) -> str:
        what = f"{self.linear} in step {self.step + 1}"
        if not self.faults:
            return f"recheck of {what}: {self.comparisons} comparisons with the reference, no difference"
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"recheck of {what}: {self.faults[0]}{more}"


class Recheck:
    """Rechecks `linears` (name -> context, in the plan's order, the same on all ranks) every `interval` steps; 0:
    never. device: of this rank."""

    def __init__(self, interval: int, linears: Mapping[str, LinearContext], device: torch.device) -> None:
        self.interval, self.device = interval, device
        self._linears = dict(linears)
        self._watcher: _Watcher | None = None

    def due(self, step: int) -> tuple[str, int] | None:
        """The linear to recheck in `step` (from 0) and how many turns it had before; None if none is due."""
        names = [name for name, context in self._linears.items() if context.recipe.quantized]
        if not self.interval or step % self.interval or not names:
            return None
        turn, index = divmod(step // self.interval, len(names))
        return names[index], turn

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the training step `step`, in which a linear is watched if one is due."""
        due = self.due(step)
        if due is None:
            yield
            return
        context, turn = self._linears[due[0]], due[1]
        backend = context.backend
        # Codes that were kept from before would not be seen being made; made again they are the same.
        context.weight_cache = None
        self._watcher = _Watcher(backend, context, step, turn)
        context.backend = cast(Backend, self._watcher)
        try:
            yield
        finally:
            context.backend = backend

    def collect(self) -> Rechecked | None:
        """What the step found, over all ranks; None if none was due. A collective after a due step."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return None
        assert watcher.comparisons, f"nothing of {watcher.context.name} was seen"
        count = torch.tensor(len(watcher.faults), device=self.device)
        dist.all_reduce(count)
        faults: list[str] = []
        if count.item():
            mine = [f"rank {dist.get_rank()}: {fault}" for fault in watcher.faults]
            of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_ranks, mine)
            faults = [fault for found in of_ranks for fault in found]
        return Rechecked(watcher.context.name, watcher.step, watcher.comparisons, faults)


@dataclass
class _Watcher:
    """A linear's backend for one step: does what the backend does, and looks at the first operand of each name."""

    backend: Backend
    context: LinearContext
    step: int
    turn: int
    faults: list[str] = field(default_factory=list)
    comparisons: int = 0
    _seen: set[str] = field(default_factory=set)
    _left_sides: list[tuple[Any, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None, **settings: Any
    ) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """The backend's operands, compared when they are made."""
        makers = self.backend.operands(x, columns, rows, **settings)

        def watched(maker: Callable[[], Any], request: OperandRequest) -> Any:
            made, place = maker(), request.place
            assert place is not None
            if place.side == "left":
                self._left_sides.append((made, f"{place.gemm} product"))
            # Later micro-batches come by too, and recomputed blocks twice.
            if made.quantized and place.name not in self._seen:
                rounded = x.to(settings["dtype"])
                source = rounded.t() if place.transposed else rounded
                self._note(place.name, operand_fault(made, source, request, settings.get("amax_group")))
            return made

        return (
            None if makers[0] is None or columns is None else functools.partial(watched, makers[0], columns),
            None if makers[1] is None or rows is None else functools.partial(watched, makers[1], rows),
        )

    def gathered(self, operand: Any, gather: Gather, *, transposed: bool) -> Callable[[], Any]:
        """The backend's; the operand of all tokens is that of the same GEMM."""
        name = next((name for made, name in self._left_sides if made is operand), None)
        self._left_sides = [(made, name) for made, name in self._left_sides if made is not operand]
        wait = self.backend.gathered(operand, gather, transposed=transposed)

        def joined() -> Any:
            whole = wait()
            if name is not None:
                self._left_sides.append((whole, name))
            return whole

        return joined

    def packs_shards(self, request: OperandRequest) -> bool:
        """The weight is to be seen."""
        return False

    def packed_weight(self, w: Tensor, request: OperandRequest, **settings: Any) -> Any:
        """The backend's, compared: of BF16, like every linear's weight that is packed."""
        made = self.backend.packed_weight(w, request, **settings)
        if made is not None:
            group_rows, padded = settings["rows"]
            groups = w.to(torch.bfloat16).unflatten(0, (-1, group_rows))
            source = torch.nn.functional.pad(groups, (0, 0, 0, padded - group_rows)).flatten(0, 1)
            assert request.place is not None
            self._note(request.place.name, operand_fault(made, source, request, settings["amax_group"]))
        return made

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, rows: RowGroups | None = None
    ) -> Tensor:
        """The backend's product, compared; which GEMM it is, the left side knows."""
        product = self.backend.gemm(a, b, out_dtype, total, rows)
        name = next((name for made, name in self._left_sides if made is a), None)
        self._left_sides = [(made, name) for made, name in self._left_sides if made is not a]
        if total is None and name is not None and name not in self._seen and (a.quantized or b.quantized):
            size, count = product.shape[0], min(_PRODUCT_ROWS, product.shape[0])
            chosen = (torch.arange(count, device=product.device) * size // count + self.turn) % size
            of_left = chosen if rows is None else rows.padded_indices(chosen)
            self._note(name, product_errors(product, a, b, chosen, left_rows=of_left, cancelling=True).fault)
        return product

    def _note(self, what: str, fault: str) -> None:
        self._seen.add(what)
        self.comparisons += 1
        if fault:
            self.faults.append(f"{what}: {fault}")
