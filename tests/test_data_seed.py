"""`data.seed`: the order of the data apart from everything else that `run.seed` decides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from data import provider as data
from data.indexed import write_dataset
from megatron_fp4.config.compose import compose_config
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import CONFIGS

Built = tuple[torch.Tensor, torch.Tensor]
SMALL = [
    "model=tiny", "model.pattern=M-", "model.hidden_dim=32", "model.ffn_dim=32", "model.mamba_num_heads=2",
    "model.mamba_head_dim=16", "model.mamba_state_dim=16", "precision.bf16_blocks.last=0", "train.steps=2",
    "train.sequence_length=32", "train.global_batch_size=4", "train.micro_batch_size=4", "data=indexed",
    "data.num_workers=0", "data.phases=[{name: main, blend: tokens}]", "logging.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, mesh: ParallelMesh) -> Callable[..., Built]:
    """An initial weight, and the tokens of the first step, of the run that overrides make."""
    folder = tmp_path_factory.mktemp("data_seed")
    write_dataset(folder / "text", np.arange(3200).reshape(64, 50), np.uint16)

    def build(*overrides: str) -> Built:
        arguments = [*SMALL, f"data.sources={{text: {folder}/text}}", f"run.dir={folder}/run", *overrides]
        run = Trainer(compose_config(arguments, CONFIGS), models, data, [], mesh)
        [batch] = next(iter(run.data.loader.steps(0, 1)))
        return local_part(next(iter(run.model.parameters()))).detach(), batch.tokens

    return build


def test_one_seed_varies_without_the_other(build: Callable[..., Built]) -> None:
    weight, tokens = build("run.seed=1")
    other_data = build("run.seed=1", "data.seed=2")
    assert torch.equal(other_data[0], weight) and not torch.equal(other_data[1], tokens)
    other_weights = build("run.seed=2", "data.seed=1")
    assert not torch.equal(other_weights[0], weight) and torch.equal(other_weights[1], tokens)
