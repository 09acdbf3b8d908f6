"""What all ranks do together around a checkpoint: run it, learn whether any failed, and fail alike.

Rank 0 hears of every rank and tells all the verdict, so that what is sent grows with the number of ranks on rank 0
alone. The group is one of its own, on the CPU: a save in the background must not mix with the collectives of training.
"""

from __future__ import annotations

import datetime
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.parallel.mesh import connect_ahead

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks."""


class DamageError(CheckpointError):
    """A checkpoint could not be read because it is not as it was written; raised on all ranks.

    reasons: which rank found what.
    """

    def __init__(self, message: str, reasons: str) -> None:
        super().__init__(message)
        self.reasons = reasons


class _Failure(NamedTuple):
    text: str
    damage: bool


class Together:
    """A process group for checkpoints under `root`; making one is a collective, and so is every method.

    timeout: after which a rank that waits for another gives up.
    """

    def __init__(self, root: Path, timeout: datetime.timedelta) -> None:
        self.root = root
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        connect_ahead(self.group)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def each(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank; returns this rank's result, or raises CheckpointError on all if any failed."""
        result, error = _attempt(action)
        self._agree(what, error)
        return result  # type: ignore[return-value]

    def collect(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; returns the results of all on rank 0, an empty list elsewhere."""
        result, error = _attempt(action)
        results: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(None if error else result, results or None, dst=0, group=self.group)
        self._agree(what, error)
        return results

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; its result on all ranks, or CheckpointError on all."""
        result, error = _attempt(action) if self.rank == 0 else (None, None)
        outcome: list[Any] = [(result, error)]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            raise self._error(what, f"rank 0: {error.text}", error.damage)
        return result  # type: ignore[return-value]

    def scatter(self, items: list[T]) -> T:
        """Give every rank its own of rank 0's `items`, one a rank."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, items if self.rank == 0 else None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def _agree(self, what: str, failure: _Failure | None) -> None:
        """Raise on all ranks, with who failed at `what` and why, if any has a failure."""
        failures: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(failure, failures, dst=0, group=self.group)
        verdict: list[tuple[str, bool] | None] = [None]
        failed = [(rank, of_rank) for rank, of_rank in enumerate(failures or []) if of_rank is not None]
        if failed:
            # A full disk fails everywhere for the same reason: said once, with the lowest rank that has it.
            reasons = {of_rank.text: rank for rank, of_rank in reversed(failed)}
            text = " | ".join(f"rank {rank}: {reason}" for reason, rank in sorted(reasons.items(), key=lambda x: x[1]))
            verdict[0] = text, any(of_rank.damage for _, of_rank in failed)
        dist.broadcast_object_list(verdict, src=0, group=self.group)
        if verdict[0] is not None:
            raise self._error(what, *verdict[0])

    def _error(self, what: str, reasons: str, damage: bool) -> CheckpointError:
        message = f"checkpoint under {self.root}: could not {what}: {reasons}"
        return DamageError(message, reasons) if damage else CheckpointError(message)


def _attempt(action: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """The result, or what went wrong: anything, because a rank that leaves alone lets the others wait for ever."""
    try:
        return action(), None
    except (OSError, ValueError, DamagedCheckpointError, CheckpointError) as error:
        unreadable = isinstance(error, OSError) and error.errno == errno.EIO  # the disk's own word for it
        return None, _Failure(str(error), unreadable or isinstance(error, DamagedCheckpointError))
    except Exception as error:
        return None, _Failure(f"{type(error).__name__}: {error}", damage=False)
