"""Copy the tensors of one instant to the host while training continues.

On a GPU the copies run on their own stream, into memory that is allocated once for the whole run. Weights and moments
do not change before the next update, so the next forward and backward passes run beside the copies.

For this the memory has to be page-locked, which takes long (46 s for 144 GB on one host). A thread locks it piece by
piece, beside training. A save that comes before the end copies into what is not locked at a lower speed.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_fp4.checkpoint.shards import OwnPiece

logger = logging.getLogger(__name__)
_ALIGNMENT = 4096
_LOCKED_AT_ONCE = 64 * 2**20  # bytes
_PAUSE = 0.01  # seconds, in which a save and the launches of kernels have their turn


class Staging:
    """Host memory for the pieces of one rank, and the copies into it.

    pieces: all pieces of the rank; `copy` takes some or all of them, of the same sizes. device: of the pieces.
    """

    def __init__(self, pieces: Sequence[OwnPiece], device: torch.device) -> None:
        self._device = device
        sizes = [-(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces]
        *starts, size = [0, *itertools.accumulate(sizes)]
        # Shared memory, because loader processes are forked from this one and a device writes to these pages.
        self._memory = mmap.mmap(-1, max(size, 1))
        self._staged = {
            (piece.tensor, piece.offsets): torch.frombuffer(
                self._memory, dtype=piece.values.dtype, count=piece.values.numel(), offset=start
            ).view(piece.values.shape)
            for piece, start in zip(pieces, starts, strict=True)
        }
        self._ends = sorted({*starts[1:], size} - {0})  # of tensors, in bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._locking = threading.Lock()  # held while pages are locked, and while copies are launched
        self._locker: threading.Thread | None = None
        self._stopped = self._used = False

    def lock_pages(self) -> None:
        """Begin to page-lock the memory in a thread, if it has not begun."""
        if self._stream is not None and self._locker is None:
            self._locker = threading.Thread(target=self._lock_pages, name="memory for saves", daemon=True)
            self._locker.start()

    def stop_locking(self) -> None:
        """Lock no more pages; what is locked stays locked."""
        self._stopped = True

    def _lock_pages(self) -> None:
        memory, first = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        with torch.cuda.device(self._device):  # a new thread is on the first GPU
            for end in self._ends:
                # Complete tensors, because a copy must not be partly into locked memory.
                if end - first < _LOCKED_AT_ONCE and end < self._ends[-1]:
                    continue
                part, first = memory[first:end], end
                with self._locking:
                    if self._stopped:
                        return
                    if not self._used:  # allocate the pages here, instead of one by one in the driver
                        part[::_ALIGNMENT].zero_()
                    result = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), len(part), 0)
                if int(result) != 0:
                    logger.warning("host memory for checkpoints is not page-locked (%s); copies are slow", result)
                    return
                time.sleep(_PAUSE)

    def copy(self, pieces: Sequence[OwnPiece]) -> list[OwnPiece]:
        """Start to copy; returns the pieces with tensors on the host, which have the values after `wait`."""
        staged = [piece._replace(values=self._staged[piece.tensor, piece.offsets]) for piece in pieces]
        if self._stream is not None:
            self._waits.clear()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._locking, torch.cuda.stream(self._stream):  # the second does nothing if the stream is None
            self._used = True
            for target, piece in zip(staged, pieces, strict=True):
                target.values.copy_(piece.values, non_blocking=True)
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record()
        return staged

    def before_update(self) -> None:
        """Make the device wait for the copies before it changes the copied tensors."""
        if self._copied is None or self._copied.query():
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._waits.append((before, after))

    def wait(self) -> None:
        """Wait, from any thread, until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()

    def waited(self) -> float:
        """Seconds that the device waited for the last copies."""
        waited = 0.0
        for before, after in self._waits:
            after.synchronize()
            waited += before.elapsed_time(after) / 1e3
        return waited


def host_memory_error(num_bytes: int) -> str | None:
    """Why this machine cannot hold `num_bytes` more; None if it can, or if its free memory is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return None
    if num_bytes <= available:
        return None
    return (
        f"checkpoint.asynchronous=true keeps a copy of weights and moments in host memory: {num_bytes / 1e9:.1f} GB on "
        f"{socket.gethostname()}, which has {available / 1e9:.1f} GB left; set checkpoint.asynchronous=false, or use "
        "more nodes"
    )
