"""What all ranks do together around a checkpoint: run it, learn whether any failed, and fail alike.

Rank 0 hears of every rank and tells all the verdict, so that what is sent grows with the number of ranks on rank 0
alone. The group is one of its own, on the CPU: a save in the background must not mix with the collectives of training.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from megatron_fp4.checkpoint.files import DamagedCheckpointError, UnreadableError
from megatron_fp4.parallel.mesh import connect_ahead

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks."""


class DamageError(CheckpointError):
    """A checkpoint could not be read because it is not as it was written; raised on all ranks.

    reasons: which rank found what. files: those whose content is not as it was written; none where what they hold is no
    checkpoint. unreadable: the disk reported an error for one of them.
    """

    def __init__(self, message: str, reasons: str, files: frozenset[str], unreadable: bool) -> None:
        super().__init__(message)
        self.reasons, self.files, self.unreadable = reasons, files, unreadable


class _Failure(NamedTuple):
    """What went wrong on a rank. damage: its kind; file: which is damaged, or ""."""

    text: str
    damage: bool = False
    file: str = ""
    unreadable: bool = False


class RankSync:
    """A process group for checkpoints under `root`; making one is a collective, and so is every method.

    timeout: after which a rank that waits for another gives up.
    """

    def __init__(self, root: Path, timeout: datetime.timedelta) -> None:
        self.root = root
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        connect_ahead(self.group)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def on_all(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank; returns this rank's result, or raises CheckpointError on all if any failed."""
        result, error = _attempt(action)
        self._agree(what, error)
        return result  # type: ignore[return-value]

    def gather(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; returns the results of all on rank 0, an empty list elsewhere."""
        result, error = _attempt(action)
        results: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(None if error else result, results or None, dst=0, group=self.group)
        self._agree(what, error)
        return results

    def on_rank0(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; its result on all ranks, or CheckpointError on all."""
        outcome: list[Any] = [_attempt(action) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            self._fail(what, [(0, error)])
        return result  # type: ignore[no-any-return]

    def scatter(self, items: list[T]) -> T:
        """Give every rank its own of rank 0's `items`, one a rank."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, items if self.rank == 0 else None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def _agree(self, what: str, failure: _Failure | None) -> None:
        """Raise on all ranks, with who failed at `what` and why, if any has a failure."""
        failures: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(failure, failures, dst=0, group=self.group)
        # A full disk fails everywhere for the same reason, which is said of the lowest rank that has it.
        first = {of_rank: rank for rank, of_rank in reversed([*enumerate(failures or [])]) if of_rank is not None}
        verdict: list[Any] = [sorted((rank, of_rank) for of_rank, rank in first.items())]
        dist.broadcast_object_list(verdict, src=0, group=self.group)
        if verdict[0]:
            self._fail(what, verdict[0])

    def _fail(self, what: str, failures: list[tuple[int, _Failure]]) -> None:
        reasons = " | ".join(f"rank {rank}: {failure.text}" for rank, failure in failures)
        message = f"checkpoint under {self.root}: could not {what}: {reasons}"
        damages = [failure for _, failure in failures if failure.damage]
        if not damages:
            raise CheckpointError(message)
        damaged = frozenset(failure.file for failure in damages if failure.file)
        raise DamageError(message, reasons, damaged, any(failure.unreadable for failure in damages))


class OneProcess(RankSync):
    """For a program that looks at checkpoints alone, without ranks: errors that are no damage come as they are."""

    def __init__(self, root: Path) -> None:
        self.root, self.rank, self.world_size = root, 0, 1

    def on_rank0(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except DamagedCheckpointError as error:
            files = frozenset({error.file} - {""})
            raise DamageError(str(error), str(error), files, isinstance(error, UnreadableError)) from error

    on_all = on_rank0


def _attempt(action: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """The result, or what went wrong: anything, because a rank that leaves alone lets the others wait for ever."""
    try:
        return action(), None
    except DamagedCheckpointError as error:
        where = f" (on {socket.gethostname()})"
        return None, _Failure(f"{error}{where}", True, error.file, isinstance(error, UnreadableError))
    except (OSError, ValueError, CheckpointError) as error:
        return None, _Failure(str(error))
    except Exception as error:
        return None, _Failure(f"{type(error).__name__}: {error}")
