"""The device mesh: which rank holds and computes what.

    replicate x dp x tp        (the replicate axis only with hybrid sharding)

Ranks along `tp` hold slices of the same layers and compute the same tokens. Ranks along `dp` hold FSDP shards of the
same slice and compute different micro-batches. Ranks along `replicate` hold the same shards and also compute different
micro-batches. `tp` is innermost, so a tensor-parallel group has neighbouring ranks of one host.
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
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from megatron_fp4.config.schema import ParallelConfig


@dataclass(frozen=True)
class ParallelMesh:
    """A device mesh and the local device. sequence_parallel: activations between layers are sharded over tokens.
    reduce_each: gradients are reduced over shards after every micro-batch, not only after a step's last one.
    reproducible: gradients, loss and norm do not depend on the data-parallel size (reproducible.py).

    Properties are cached, because slicing a DeviceMesh takes 0.4 ms and every layer needs its axis in every call.
    """

    device_mesh: DeviceMesh
    device: torch.device
    sequence_parallel: bool = False
    reduce_each: bool = False
    reproducible: bool = False

    @cached_property
    def tp(self) -> DeviceMesh:
        return self.device_mesh["tp"]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The axis that FSDP2 shards over, after the replicate axis if FSDP2 also sums over replicas."""
        if self.num_replicas > 1 and not self.reproducible:
            return self.device_mesh["replicate", "dp"]
        return self.device_mesh["dp"]

    @cached_property
    def num_replicas(self) -> int:
        """Size of the replicate axis."""
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh["replicate"].size() if "replicate" in names else 1

    @cached_property
    def tp_size(self) -> int:
        return self.tp.size()

    @cached_property
    def tp_rank(self) -> int:
        return self.tp.get_local_rank()

    @cached_property
    def tp_group(self) -> dist.ProcessGroup:
        return self.tp.get_group()

    @cached_property
    def dp_size(self) -> int:
        """Number of data-parallel ranks (those that compute different micro-batches), replicas included."""
        return self.device_mesh.size() // self.tp_size

    @cached_property
    def dp_rank(self) -> int:
        """This rank's index among the data-parallel ranks, replicas included."""
        return dist.get_rank() // self.tp_size

    @cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """The process group of all data-parallel ranks, replicas included."""
        *names, _ = self.device_mesh.mesh_dim_names or ()
        axes = self.device_mesh[tuple(names)]
        return axes.get_group() if len(names) == 1 else axes._flatten("data").get_group()

    @property
    def consecutive(self) -> bool:
        """Whether a rank computes consecutive micro-batches of a global batch, instead of every `dp_size`-th one."""
        return self.reproducible and not self.reduce_each

    @property
    def world_size(self) -> int:
        return self.device_mesh.size()

    @property
    def rank(self) -> int:
        return dist.get_rank()


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
    """The mesh of the initialized process group."""
    world, shard = dist.get_world_size(), config.shards(dist.get_world_size())
    assert world == shard * math.prod(config.sizes.values()), "config/checks.py rejects other sizes"
    axes = {"replicate": config.replicate} if config.replicate > 1 else {}
    axes |= {"dp": shard, "tp": config.tensor}
    device_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    sequence_parallel = config.tensor > 1 and config.sequence is not False
    reduce_each = config.reduce_gradients == "each"
    return ParallelMesh(device_mesh, device, sequence_parallel, reduce_each, config.reproducible)
