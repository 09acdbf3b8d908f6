"""Counts what a job allocates and sends while it runs on fake tensors: bytes alive, their peak, and collectives.

A `Ledger` is a dispatch mode: it sees every operation, keeps a list of the storages that are alive (views share one)
and adds up the messages of `torch.distributed`. Under `FakeTensorMode` nothing is computed or allocated, so this works
for models of any size on any machine; the sizes and lifetimes are those of the program itself. Memory is counted as
PyTorch's CUDA allocator counts it (`torch.cuda.max_memory_allocated`): in units of 512 bytes, without the allocator's
own reserve, the CUDA context, the buffers of NCCL and the workspaces of cuBLAS (the dry run adds these).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.overlapped import Pending

_ALLOCATION_UNIT = 512


@dataclass(frozen=True)
class Message:
    """One kind of collective: operation, the group's name and number of ranks, and the bytes of the whole tensor (the
    gathered one, the one before scattering, the reduced one). is_async: whether other work is asked for before it is
    waited for.
    """

    operation: str
    group: str
    ranks: int
    num_bytes: int
    is_async: bool = False

    @property
    def sent_bytes(self) -> float:
        """What each rank sends if the collective goes round a ring."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.num_bytes * (self.ranks - 1) / self.ranks


@dataclass
class _Storage:
    number: int
    num_bytes: int = 0


class Ledger(TorchDispatchMode):
    """Use it as a context manager inside `FakeTensorMode`.

    now: in which part of the step a message is sent, the key of `messages`. order: all messages as they were sent.
    live_bytes, peak_bytes: of all storages seen; `restart_peak` forgets the peak so far.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self.messages: dict[int, Counter[Message]] = {}
        self.order: list[Message] = []
        self.live_bytes = self.peak_bytes = 0
        self._now = now
        self._operations = 0
        self._storages: dict[int, _Storage] = {}  # by address, which others take when a storage is gone
        self._count = 0

    def __enter__(self) -> Ledger:
        # FSDP2 frees and allocates gathered parameters by resizing storages, which is no operation.
        self._resize = torch.UntypedStorage.resize_
        ledger, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in ledger._storages:
                ledger._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._wait = Pending.wait
        wait = self._wait

        def waited(pending: Pending) -> Tensor:
            ledger._waited()
            return wait(pending)

        Pending.wait = waited  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        Pending.wait = self._wait  # type: ignore[method-assign]
        super().__exit__(kind, value, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, on local tensors
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # fake tensors have no values; a loss and a norm of one let the step go its usual way
        self._operations += 1
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._send(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf)
        return result

    def _waited(self) -> None:
        """A message is waited for: if nothing was asked for since it was sent, it ran beside nothing."""
        last = self.order[-1]
        if last.is_async and self._operations == self._sent_at:
            self.order[-1] = replace(last, is_async=False)
            counted = self.messages[self._now()]
            counted[last] -= 1
            counted[self.order[-1]] += 1
            if not counted[last]:
                del counted[last]

    def storages(self) -> dict[int, int]:
        """Bytes of every storage that is alive, by a number of its own."""
        return {storage.number: storage.num_bytes for storage in self._storages.values() if storage.num_bytes}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the tensors' storages (of the local parts of DTensors), as in `storages`."""
        return {self._storages[local_part(t).untyped_storage()._cdata].number for t in tensors}

    def restart_peak(self) -> None:
        """From here on."""
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._count += 1
            self._storages[storage._cdata] = _Storage(self._count)
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._forget, storage._cdata)

    def _set(self, address: int, num_bytes: int) -> None:
        storage, num_bytes = self._storages[address], -(-num_bytes // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
        self.live_bytes += num_bytes - storage.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        storage.num_bytes = num_bytes

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._storages.pop(address).num_bytes

    def _send(self, func: Any, args: Any) -> None:
        name = func.name().removeprefix("c10d::").split(".")[0]
        known = {
            "_allgather_base_": ("all-gather", 0),
            "_reduce_scatter_base_": ("reduce-scatter", 1),
            "allreduce_": ("all-reduce", 0),
        }
        assert name in known, f"a collective that the ledger does not know: {name}"
        operation, which = known[name]
        tensors = args[which] if isinstance(args[which], (list, tuple)) else [args[which]]
        scripted = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(scripted)
        size = sum(t.numel() * t.element_size() for t in tensors)
        asynchronous = next((arg for arg in args if isinstance(arg, bool)), True)  # the operations' own default
        message = Message(operation, group.group_name, group.size(), size, asynchronous)
        self.order.append(message)
        self._sent_at = self._operations
        self.messages.setdefault(self._now(), Counter())[message] += 1
