"""Stopping on request: a signal to any rank ends the run on all ranks after the same step.

SIGTERM and SIGUSR1 (schedulers send one of them before they take the machine away) and the first SIGINT only set a
flag. Each step's all-reduce carries it (train_step's `requests`), so nobody stops alone; the
loop then saves and leaves. A second SIGINT is the usual KeyboardInterrupt.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from megatron_fp4.parallel.mesh import ParallelMesh

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """`with StopRequest() as stop:` listens for signals to this process; leaving restores the previous handlers.

    received: the first signal that came, or None. Must be entered in the main thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop; others may not know yet."""
        return self.received is not None

    def agreed(self, mesh: ParallelMesh) -> bool:
        """Whether any rank was asked to stop. A collective: for places without a training step, as evaluation."""
        flag = torch.tensor(float(self.requested), device=mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None or number == signal.SIGINT:
            self.received = signal.Signals(number)
