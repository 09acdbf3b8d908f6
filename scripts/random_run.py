"""Training steps on random tokens, as pretrain.py takes them: what the scripts share that measure steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assembly import (
    backend_of,
    configure,
    device_type_of,
    execution_of,
    initialized_model,
    open_graphs,
    set_determinism,
)
from data.cache import default_cache_dir
from megatron_fp4.config.compose import ConfigError
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController
from megatron_fp4.training.autotuning import KernelChoices, rehearsal
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.step import StepResult, train_step
from models.hybrid import HybridModel


@dataclass(frozen=True)
class RandomMicroBatch:
    """As the loader's: tokens and targets [micro_batch_size, sequence_length], and where documents are masked the
    document of each token and their number; num_targets: how many count, if not all."""

    index: int
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    num_documents: int | None
    num_targets: int | None


def random_micro_batches(config: Config, mesh: ParallelMesh, step: int) -> list[RandomMicroBatch]:
    """This rank's share of a step of random tokens, in pinned memory as the loader's on a GPU; where documents are
    masked, each row is one."""
    train, masked = config.train, config.data.documents == "masked"
    num_documents = train.micro_batch_size if masked else None
    num_targets = None if config.data.boundary_loss else train.micro_batch_size * train.sequence_length
    batches = []
    for index in range(mesh.dp_rank, train.global_batch_size // train.micro_batch_size, mesh.dp_size):
        generator = torch.Generator().manual_seed(1000 * step + index)
        shape = (train.micro_batch_size, train.sequence_length + 1)
        text = torch.randint(config.model.vocab_size, shape, generator=generator)
        parts = [text[:, :-1].contiguous(), text[:, 1:].contiguous()]
        parts += [torch.zeros(parts[0].shape, dtype=torch.int32)] if masked else []
        tokens, targets, *documents = (t.pin_memory() if mesh.device.type == "cuda" else t for t in parts)
        batches.append(
            RandomMicroBatch(index, tokens, targets, next(iter(documents), None), num_documents, num_targets)
        )
    return batches


def pin_kernels(model: HybridModel, config: Config, device: torch.device) -> list[str]:
    """Choose the model's tuned kernels as a run does; what it says of it."""
    if mixers := model.autotuned_mixers():
        rehearse = rehearsal(mixers, config, [config.train.sequence_length], device)
        return KernelChoices().pin(rehearse, default_cache_dir() / "autotuning", resumed=False)
    return []


@dataclass
class RandomRun:
    """Model, optimizer and mesh of a configuration, ready to take steps.

    graphs: of its micro-batches, where there are any. said: lines about the choice of kernels, on a GPU.
    """

    config: Config
    mesh: ParallelMesh
    clock: StepState
    model: HybridModel
    controller: PrecisionController
    optimizer: torch.optim.Optimizer
    graphs: MicroBatchGraphs | None
    said: Sequence[str]

    @classmethod
    def open(cls, overrides: list[str], only_on_gpu: str = "", with_graphs: bool = True) -> RandomRun:
        """Build what pretrain.py would of `overrides`, with pinned kernels and CUDA graphs where it has them.

        only_on_gpu: what needs a GPU, for the ConfigError where there is none. Collective.
        """
        config = configure(overrides)
        device_type = device_type_of(config)
        if only_on_gpu and device_type != "cuda":
            raise ConfigError(f"{only_on_gpu} needs a GPU, and this machine has none (or run.device=cpu)")
        device = init_distributed(device_type, config.parallel.timeout_seconds)
        set_determinism(config.run.deterministic)
        mesh, clock = build_mesh(config.parallel, device), StepState(seed=config.run.seed)
        model, controller = initialized_model(config, mesh, clock, execution_of(config), backend_of(config))
        optimizer = build_optimizer(model, config.optimizer).optimizer
        graphs = open_graphs(config, mesh, model, controller, print) if with_graphs else None
        said = pin_kernels(model, config, device)
        return cls(config, mesh, clock, model, controller, optimizer, graphs, said)

    def step(self, number: int, batches: Sequence[RandomMicroBatch]) -> StepResult:
        """Step `number`, from 0."""
        config = self.config
        return train_step(
            self.model, self.optimizer, batches, self.mesh, self.clock,
            step=number, lr=config.optimizer.lr, clip_norm=config.optimizer.clip_norm, reshard=config.parallel.reshard,
            graphs=self.graphs,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.config.train.global_batch_size * self.config.train.sequence_length
