"""Micro-batches prepared ahead of the rank: workers read them, a thread of the rank makes tensors of them.

Making tensors (widening, page-locked memory) is in a thread, so that the step finds them ready. At most `num_ahead`
wait there, and num_slots a worker in the memory shared with it: `shared_bytes` says how much that is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from data.micro_batches import RankMicroBatches, SlotContent
from data.workers import LoaderWorkers

T = TypeVar("T")


class DeliveryTimeout(TimeoutError):
    """Nothing was delivered for too long."""


class Prefetcher(Generic[T]):
    """Gives `make(number, content)` of the micro-batches 0, 1, 2, ..., prepared ahead by num_workers processes.

    make: called in another thread; must copy what it keeps of `content`. num_ahead: how many of its results may wait.
    To be made in a thread that outlives it, as the main thread does (see LoaderWorkers).
    """

    def __init__(
        self,
        micro_batches: RankMicroBatches,
        make: Callable[[int, SlotContent], T],
        num_workers: int,
        num_slots: int,
        num_ahead: int,
    ) -> None:
        self._workers = LoaderWorkers(micro_batches, num_workers, num_slots)
        self._made: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(num_ahead)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(len(micro_batches), make), name="loader", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids

    def next(self, timeout_seconds: float) -> T:
        """The next result, waited for up to timeout_seconds (0: for ever).

        Raises DeliveryTimeout, which says how the workers stand, WorkerDiedError, or what reading raised in a worker.
        """
        try:
            made = self._made.get(timeout=timeout_seconds or None)
        except queue.Empty:
            raise DeliveryTimeout(self._workers.in_words()) from None
        if isinstance(made, Exception):
            raise made
        self._room.release()
        return made

    def close(self) -> None:
        """End the workers and the thread."""
        self._closed = True
        self._room.release()
        self._workers.kill()
        self._thread.join()
        self._workers.close()

    def _run(self, count: int, make: Callable[[int, SlotContent], T]) -> None:
        try:
            for number in range(count):
                self._room.acquire()
                if self._closed:
                    return
                with self._workers.receive(number) as content:
                    made = make(number, content)
                self._made.put(made)
        except Exception as error:
            self._made.put(error)
