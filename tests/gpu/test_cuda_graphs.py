"""CUDA graphs of micro-batches: the bits of eager steps, through a switch of precision, a validation and a load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.build import initialized_model, set_determinism
from megatron_fp4.training.cuda_graphs import EAGER_STEPS, MicroBatchGraphs
from megatron_fp4.training.optimizer import build_optimizer
from models import provider as models
from pretrain import configure
from tests.training.harness import ToyBatch, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS, MICRO_BATCHES = 9, 3
SMALL = [
    *("model.pattern=-*-*", "train.micro_batch_size=2", "train.sequence_length=128", "train.global_batch_size=6"),
    *("model.nvfp4_bf16_blocks.last=1", "train.steps=9", "precision.switch.when=6"),
]


@pytest.fixture(scope="module")
def mesh(alone: None) -> Iterator[ParallelMesh]:
    set_determinism(True)  # mamba-ssm's kernels are tuned from the disk, if they have ever been
    yield build_mesh(configure([]).parallel, torch.device("cuda", 0))
    torch.use_deterministic_algorithms(False)


def batches(config: Config, step: int) -> list[ToyBatch]:
    shape = (MICRO_BATCHES, 2, config.train.micro_batch_size, config.train.sequence_length)
    draws = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
    return [ToyBatch(index, *pair) for index, pair in enumerate(draws)]


def trained(mesh: ParallelMesh, graphs: bool, overrides: list[str]) -> tuple[list[Any], list[Tensor], list[bool]]:
    """Losses and norms by step, the last weights, and which steps were replayed."""
    config = configure([*SMALL, *overrides])
    step_state = StepState(seed=1)
    model, controller = initialized_model(config, models, mesh, step_state)
    optimizer = build_optimizer(model, config.optimizer)
    captured = None
    if graphs:
        captured = MicroBatchGraphs(model, mesh, controller.linears, required=True, warn=print)
    found, replayed = [], []
    for step in range(STEPS):
        controller.before_step(step, lambda: 0.0)
        result = train_step(
            *(model, optimizer, batches(config, step), mesh, step_state),
            **{"step": step, "lr": 1e-2, "clip_norm": 1.0, "graphs": captured},
        )
        replayed.append(captured is not None and captured.captured)
        found.append((result.loss, result.grad_norm))
        if step == 3:  # a validation, which makes codes of its own
            with torch.no_grad():
                (batch, *_) = batches(config, 100)
                found.append(model(batch.tokens.cuda(), batch.targets.cuda()).item())
        if step == 4:  # weights are loaded, into the same memory
            with torch.no_grad():
                for parameter in model.parameters():
                    local_part(parameter).mul_(0.5)
            step_state.weights_version += 1
    return found, [local_part(parameter).clone() for parameter in model.parameters()], replayed


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=nvfp4"],
        ["precision=mxfp4", "parallel.reshard=true", "train.activation_checkpointing=selective"],
        ["precision=nvfp4", "model.pattern=M-*M"],
    ],
    ids=["nvfp4", "mxfp4, reshard, selective", "Mamba-2"],
)
def test_graphs_give_the_bits_of_eager_steps(mesh: ParallelMesh, overrides: list[str]) -> None:
    expected, weights, _ = trained(mesh, False, overrides)
    found, same, replayed = trained(mesh, True, overrides)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    eager = {first + step for first in (0, 6) for step in range(EAGER_STEPS)}  # 6: the switch
    assert replayed == [step not in eager for step in range(STEPS)]
