"""Runs a function on several gloo ranks, and provides a small sharded model to train there.

Processes come from a fork server that has imported torch (tests/programs.py), so a launch takes less than a second.
"""

import contextlib
import faulthandler
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from megatron_fp4.config.schema import OptimizerConfig, ParallelConfig
from megatron_fp4.parallel.data_parallel import OverlappedModel, apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.parallel.parameters import local_parameter as local
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.providers import MicroBatch as ToyBatch
from megatron_fp4.training.step import StepResult, accumulate, update
from tests.programs import fork_server

VOCAB_SIZE = 32
LENGTH = 8


class RankFailedError(RuntimeError):
    """A rank of `launch` failed."""


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    exit_codes: list[int] | None = None,
    seconds: float = 300.0,
) -> list[Any]:
    """Call function(rank, *args) on every rank of a gloo group; returns what the ranks returned.

    exit_codes: if given, receives the exit codes of the ranks. Then failing ranks are no error, and return None.
    seconds: after these, ranks that still run are killed.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_enter, args=(function, rank, world_size, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _join(processes, seconds)
        results = []
        for rank, process in enumerate(processes):
            outcome = Path(folder, f"result_{rank}")
            results.append(torch.load(outcome, weights_only=False) if outcome.exists() else None)
            if exit_codes is not None:
                exit_codes.append(process.exitcode or 0)
            elif process.exitcode != 0:
                errors = [path.read_text() for path in sorted(Path(folder).glob("error_*"))]
                raise RankFailedError(f"rank {rank} exited with {process.exitcode}\n" + "\n".join(errors))
    return results


def _join(processes: list[Any], seconds: float, grace: float = 3.0) -> None:
    """Wait for all processes. After one has failed, or after `seconds`, kill the others, which may wait forever."""
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.01)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _enter(function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/error_{rank}", "w") as errors:
        faulthandler.enable(errors)  # writes a traceback if libc aborts the process
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = FileStore(f"{folder}/store", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            result = function(rank, *args)
            torch.save(result, f"{folder}/result_{rank}")
            dist.destroy_process_group()
        except BaseException:
            errors.write(f"rank {rank}: {traceback.format_exc()}")
            raise


@contextlib.contextmanager
def alone() -> Iterator[ParallelMesh]:
    """A mesh of one rank in this process, which may already have a process group."""
    if dist.is_initialized():
        yield toy_mesh()
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield toy_mesh()
    finally:
        dist.destroy_process_group()


def toy_mesh(tp_size: int = 1, sequence_parallel: bool = False) -> ParallelMesh:
    """A mesh of all ranks as (dp, tp)."""
    return build_mesh(ParallelConfig(tensor=tp_size, sequence=sequence_parallel), torch.device("cpu"))


def toy_batches(
    step: int,
    mesh: ParallelMesh,
    num_global: int = 4,
    rows: int = 2,
    vocab_size: int = VOCAB_SIZE,
    length: int = LENGTH,
) -> list[ToyBatch]:
    """This rank's micro-batches of a step, assigned in turn; the global batch is the same on any mesh."""
    batches = []
    for index in range(mesh.batch.rank, num_global, mesh.batch.size):
        generator = torch.Generator().manual_seed(1000 * step + index)
        text = torch.randint(vocab_size, (rows, length + 1), generator=generator)
        batches.append(ToyBatch(index, text[:, :-1], text[:, 1:]))
    return batches


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x_norm = F.layer_norm(x, x.shape[-1:], local(self.norm.weight), local(self.norm.bias))
        hidden = torch.relu(F.linear(x_norm, local(self.up.weight), local(self.up.bias)))
        return x + F.linear(hidden, local(self.down.weight))


class ToyModel(nn.Module):
    """Embedding, two blocks and head. Returns the mean NLL."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, dim)
        self.blocks = nn.ModuleList([_Block(dim) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(dim))
        self.head = nn.Linear(dim, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, local(self.embedding.weight))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x * local(self.scale), local(self.head.weight))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def toy(mesh: ParallelMesh, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A sharded toy model and its optimizer."""
    random.seed(seed + mesh.rank)
    np.random.seed(seed + mesh.rank)
    torch.manual_seed(seed)
    model = ToyModel().to(mesh.device)
    apply_data_parallel(model, mesh, units=list(model.blocks), fp32_units=[], compute_dtype=dtype, reshard=False)
    torch.manual_seed(seed + 100 + mesh.rank)
    return model, build_optimizer(model, OptimizerConfig(lr=1e-2))


def overlapped(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: Any,
    fp32_units: Any,
    compute_dtype: Any,
    reshard: bool,
    ends: Any = (),
) -> None:
    """`apply_data_parallel` with messages beside computation, also for one rank and without resharding."""
    gathered = OverlappedModel(model, mesh, fp32_units, compute_dtype, units, ends, reshard)
    model._gathered_model = gathered  # type: ignore[assignment]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[ToyBatch],
    mesh: ParallelMesh,
    step_state: StepState,
    *,
    step: int,
    graphs: MicroBatchGraphs | None = None,
    lr: float = 1e-3,
    clip_norm: float = 1.0,
    **settings: Any,
) -> StepResult:
    """One step as in the Trainer, without callbacks."""
    step_state.step = step
    loss = accumulate(model, micro_batches, mesh, step_state, graphs=graphs)
    return update(optimizer, loss, mesh, step_state, lr=lr, clip_norm=clip_norm, **settings)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank. A collective."""
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()
