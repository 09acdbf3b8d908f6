"""The device mesh: which rank holds and computes what.

    replicate x dp x ep x tp   (`replicate` only with hybrid sharding, `ep` only with expert parallelism)

Ranks along `tp` hold slices of the same layers and compute the same tokens. Ranks along `dp` hold other rows of the
same slice and compute different micro-batches. So do ranks along `ep`, but of the experts they hold others instead of
other rows. Ranks along `replicate` hold the same shards and also compute different micro-batches. Code outside this
package asks for a group by its purpose, not for an axis.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import math
import os
import resource
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from megatron_fp4.config.axes import AXES, ROWS
from megatron_fp4.config.schema import ParallelConfig


class Ranks(NamedTuple):
    """The ranks along some axes, this one among them: their number, this one's index, and their group."""

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class ParallelMesh:
    """A device mesh, whose axes are rows of config/axes.py, and the local device. A group has a purpose:

    batch: ranks that compute other micro-batches, and sum loss and gradients. model: those that compute the same
    micro-batch together, and have the same loss. tensor: of these, those that share a layer. replica: those that
    compute other micro-batches with the same shards (hybrid sharding); None: there are none. experts: those that divide
    the experts of a layer; None: every rank has all. Who holds copies of a parameter: `copy_axes` in parameters.py.

    sequence_parallel: activations between layers are sharded over tokens. reduce_each: gradients are reduced over
    shards after every micro-batch, not only after a step's last one. reproducible: gradients, loss and norm do not
    depend on the data-parallel size (reproducible.py).

    Properties are cached, because slicing a DeviceMesh takes 0.4 ms.
    """

    device_mesh: DeviceMesh
    device: torch.device
    batch: Ranks
    model: Ranks
    tensor: Ranks
    replica: Ranks | None
    sequence_parallel: bool = False
    reduce_each: bool = False
    reproducible: bool = False
    experts: Ranks | None = None

    @cached_property
    def shards(self) -> DeviceMesh:
        """The ranks that hold other rows of every parameter but those of experts, as one axis."""
        axes = self.device_mesh[tuple(axes_of(self.device_mesh, "rows"))]
        return axes if axes.ndim == 1 else axes._flatten(ROWS)

    @cached_property
    def expert_shards(self) -> DeviceMesh:
        """The ranks that hold other rows of the experts of this one, as one axis."""
        (axis,) = axes_of(self.device_mesh, "rows", without="experts")
        return self.device_mesh[axis]

    def axes_in(self, name: str) -> list[str]:
        """The axes that a dimension of a parameter's mesh consists of: one, or all of `shards`."""
        return axes_of(self.device_mesh, "rows") if (name,) == self.shards.mesh_dim_names else [name]

    def joined(self, *names: str) -> DeviceMesh:
        """The mesh of some axes, `shards` among them or not."""
        if names == self.device_mesh.mesh_dim_names:
            return self.device_mesh
        if self.sizes.keys() >= set(names):
            return self.device_mesh[names]
        axes = [self.device_mesh[name] if name in self.sizes else self.shards for name in names]
        return DeviceMesh._concatenate(axes)

    @cached_property
    def layers(self) -> DeviceMesh:
        """The axis that parameters are made on, as DTensors."""
        return self.device_mesh[tuple(axes_of(self.device_mesh, "layers"))]

    @cached_property
    def partial_axes(self) -> list[str]:
        """The axes whose ranks compute other tokens of a micro-batch, so each has a part of the gradient of copies."""
        inside_layers = [] if self.sequence_parallel else axes_of(self.device_mesh, "layers")
        return [name for name in axes_of(self.device_mesh, "tokens") if name not in inside_layers]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by name, the outermost first."""
        return dict(zip(self.device_mesh.mesh_dim_names or (), self.device_mesh.shape, strict=True))

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's index along each axis, by name."""
        return {name: self.device_mesh.get_local_rank(name) for name in self.sizes}

    @property
    def consecutive(self) -> bool:
        """Whether a rank computes consecutive micro-batches of a global batch, instead of every `batch.size`-th one."""
        return self.reproducible and not self.reduce_each

    @property
    def world_size(self) -> int:
        return self.device_mesh.size()

    @property
    def rank(self) -> int:
        return dist.get_rank()


def axes_of(device_mesh: DeviceMesh, divides: str, without: str = "") -> list[str]:
    """The names of the axes of `device_mesh` that divide this, and do not divide `without`, the outermost first."""
    names = device_mesh.mesh_dim_names or ()
    rows = [axis for axis in AXES if axis.name in names]
    return [axis.name for axis in rows if divides in axis.divides and without not in axis.divides]


_OPEN_FILES = 65_536
# Up to this number of ranks, gloo connects all pairs when a group is made; else a pair at its first message.
_FULL_MESH_RANKS = 64


def init_distributed(device_type: str, timeout_seconds: int) -> torch.device:
    """Join the process group that torchrun describes (NCCL on CUDA, gloo on CPU) and return the local device.

    Without torchrun's environment the process forms a group of its own.

    On CUDA too, Python objects and the messages of checkpoints go through gloo. Each of its groups (all ranks, mesh
    axes, checkpoints) would connect all pairs of ranks: of 4,096 ranks each would hold 9,000 connections. If gloo
    connects on demand, a rank holds two for a ring and log2(ranks) for a tree; only the first one, which gathers, all.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if int(os.environ.get("WORLD_SIZE", 1)) > _FULL_MESH_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # For the first rank's connections: 1,000 ranks need more open files than the usual limit of 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if soft == resource.RLIM_INFINITY else max(soft, enough), hard))
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if restarts > 0 and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun's store still has the addresses of the previous processes (torch 2.11 to 2.13), and all ranks would
        # wait for these. On several nodes the restart counts may differ; docs/operations.md has the remedy.
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = dist.PrefixStore(f"restart_{restarts}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    connect_ahead()
    return device


def connect_ahead(group: dist.ProcessGroup | None = None) -> None:
    """If gloo connects on demand, make the connections that a run's collectives need: of a ring, a tree and the first
    rank. A connection needs torchrun's store, which may be gone when the run saves.

    group: None for all ranks. A collective.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.all_reduce(torch.zeros(1), group=group)
        dist.broadcast_object_list([None], src=0, group=group)
        dist.gather_object(None, everyone, dst=0, group=group)


# Time limit of `leave_distributed`.
EXIT_SECONDS = 120.0


def leave_distributed() -> None:
    """Destroy the process group, if there is one.

    If this hangs for `EXIT_SECONDS`, the process writes the stacks of its threads to stderr and ends with exit code 1,
    so that it does not block the machines.
    """
    if dist.is_initialized():
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__ or 2)
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def end_process(exit_code: int) -> NoReturn:
    """End a program that has saved and closed everything, without the interpreter's shutdown.

    During that shutdown, threads of a group that a DeviceMesh still holds may try to lock an object and abort the
    process ("terminate called without an active exception", exit code -6), so a finished run would count as failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, SystemExit):  # if the reader is gone, the exit code still counts
            stream.flush()
    os._exit(exit_code)


def build_mesh(config: ParallelConfig, device: torch.device) -> ParallelMesh:
    """The mesh of the initialized process group. A collective.

    Axes of one rank are left out, except those that every parameter lies on.
    """
    sizes = config.axis_sizes(dist.get_world_size())
    assert math.prod(sizes.values()) == dist.get_world_size(), "config/checks.py rejects other sizes"
    shape = {
        axis.name: size for axis, size in sizes.items() if size > 1 or axis.key is None or "layers" in axis.divides
    }
    device_mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))

    def along(names: list[str]) -> Ranks:
        axes = device_mesh[tuple(names)]
        axes = axes if len(names) == 1 else axes._flatten()
        return Ranks(axes.size(), axes.get_local_rank(), axes.get_group())

    batch, replicas = axes_of(device_mesh, "batch"), axes_of(device_mesh, "batch", without="rows")
    experts = axes_of(device_mesh, "experts")
    return ParallelMesh(
        device_mesh,
        device,
        batch=along(batch),
        model=along([name for name in shape if name not in batch]),
        tensor=along(axes_of(device_mesh, "layers")),
        replica=along(replicas) if replicas else None,
        sequence_parallel=config.tensor > 1 and config.sequence is not False,
        reduce_each=config.reduce_gradients == "each",
        reproducible=config.reproducible,
        experts=along(experts) if experts else None,
    )
