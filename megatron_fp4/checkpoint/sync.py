"""Run an action on ranks, learn whether any rank failed, and raise the same error on all ranks.

Rank 0 collects the results and sends a verdict, so only rank 0's messages grow with the number of ranks. The group is a
separate one on the CPU, because a save in the background must not mix with the collectives of training.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import connect_ahead

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks."""


class RefusedError(CheckpointError, ConfigError):
    """The user has to decide something; the message has the remedies. If an action raises it, all ranks do."""


class DamageError(CheckpointError):
    """A checkpoint could not be read because it has changed since it was written; raised on all ranks.

    reasons: what each rank found. files: those whose content has changed; none if the content was never a checkpoint.
    unreadable: the disk reported an error for one of them.
    """

    def __init__(self, message: str, reasons: str, damages: Sequence[DamagedCheckpointError]) -> None:
        super().__init__(message)
        self.reasons = reasons
        self.files = {error.file for error in damages} - {""}
        self.unreadable = any(error.unreadable for error in damages)


class RankSync:
    """A process group for checkpoints under `root`. The constructor and all methods are collectives.

    timeout: how long a rank waits for another one.
    """

    def __init__(self, root: Path, timeout: datetime.timedelta) -> None:
        self.root = root
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
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
        results = self._to_rank0(result)
        self._agree(what, error)
        return results  # type: ignore[return-value]

    def on_rank0(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; returns its result on all ranks, or raises CheckpointError on all."""
        outcome: list[Any] = [_attempt(action) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            self._fail(what, [(0, error)])
        return result  # type: ignore[no-any-return]

    def scatter(self, items: list[T]) -> T:
        """Send each rank one of rank 0's `items`, and return it."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, items if self.rank == 0 else None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def _to_rank0(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(item, items or None, dst=0, group=self.group)
        return items

    def _agree(self, what: str, error: Exception | None) -> None:
        """If any rank has an error, raise on all ranks; the message says which ranks failed at `what`, and why."""
        errors = self._to_rank0(error)
        # If several ranks have the same error, such as a full disk, the message names the lowest one.
        first = {str(one): (rank, one) for rank, one in reversed([*enumerate(errors)]) if one is not None}
        verdict: list[Any] = [sorted(first.values(), key=lambda failure: failure[0])]
        dist.broadcast_object_list(verdict, src=0, group=self.group)
        if verdict[0]:
            self._fail(what, verdict[0])

    def _fail(self, what: str, failures: list[tuple[int, Exception]]) -> None:
        if refusal := next((error for _, error in failures if isinstance(error, RefusedError)), None):
            raise refusal
        reasons = " | ".join(f"rank {rank}: {error}" for rank, error in failures)
        message = f"checkpoint under {self.root}: could not {what}: {reasons}"
        damages = [error for _, error in failures if isinstance(error, DamagedCheckpointError)]
        if not damages:
            raise CheckpointError(message)
        raise DamageError(message, reasons, damages)


class OneProcess(RankSync):
    """For a program that reads checkpoints in a single process. Errors other than damage are raised unchanged."""

    def __init__(self, root: Path) -> None:
        self.root, self.rank, self.world_size = root, 0, 1

    def on_rank0(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except DamagedCheckpointError as error:
            raise DamageError(str(error), str(error), [error]) from error

    on_all = on_rank0


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result or the error. Catches any error, because if one rank raised it alone, others would wait."""
    try:
        return action(), None
    except DamagedCheckpointError as error:
        return None, DamagedCheckpointError(f"{error} (on {socket.gethostname()})", error.file, error.unreadable)
    except RefusedError as error:
        return None, error
    except (OSError, ValueError, CheckpointError) as error:
        return None, CheckpointError(str(error))
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")
