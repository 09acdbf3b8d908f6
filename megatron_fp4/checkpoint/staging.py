"""Copy the tensors of one instant to the host while training continues.

On a GPU the copies run on their own stream, into page-locked memory that is allocated once for the whole run. Weights
and moments do not change before the next update, so the next forward and backward passes run beside the copies, and
only the optimizer waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_fp4.checkpoint.shards import OwnPiece

logger = logging.getLogger(__name__)
_ALIGNMENT = 4096


class Staging:
    """Host memory for the pieces of one rank, and the copies into it.

    pieces: all pieces of the rank; `copy` takes some or all of them, with the same sizes and types. device: of the
    pieces.
    """

    def __init__(self, pieces: Sequence[OwnPiece], device: torch.device) -> None:
        self._device = device
        sizes = [-(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces]
        *starts, size = [0, *itertools.accumulate(sizes)]
        # Shared memory, because loader processes are forked from this one, and the pages that a device writes to must
        # not be copied by the fork.
        self._memory = mmap.mmap(-1, max(size, 1))
        self._staged = {
            (piece.tensor, piece.offsets): torch.frombuffer(
                self._memory, dtype=piece.values.dtype, count=piece.values.numel(), offset=start
            ).view(piece.values.shape)
            for piece, start in zip(pieces, starts, strict=True)
        }
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._stream is not None and size > 0:
            self._lock_pages(size)

    def _lock_pages(self, size: int) -> None:
        """Page-lock the memory, so that copies are asynchronous and run at full speed."""
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        whole.zero_()  # allocates all pages here, instead of one by one in the driver
        result = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0)
        if int(result) != 0:
            logger.warning("host memory for checkpoints could not be page-locked (%s); copies will be slow", result)
            # CUDA reports the error again at the next call, which would be the launch of some kernel. Clear it here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)

    def copy(self, pieces: Sequence[OwnPiece]) -> list[OwnPiece]:
        """Start to copy; returns the pieces with tensors on the host, which have the values after `wait`."""
        staged = [piece._replace(values=self._staged[piece.tensor, piece.offsets]) for piece in pieces]
        if self._stream is not None:
            self._waits.clear()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # does nothing if the stream is None
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
