"""`data.seed` decides the order of the data, `run.seed` everything else."""

from pathlib import Path

import torch

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import CONFIGS
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL


def test_each_seed_can_vary_without_the_other(mesh: ParallelMesh, tmp_path: Path) -> None:
    common = [*SMALL, *FAST, *small_corpus(tmp_path), f"run.dir={tmp_path}/run"]

    def build(*seeds: str) -> tuple[torch.Tensor, torch.Tensor]:
        """An initial weight and the tokens of the first step."""
        run = Trainer(compose_config([*common, *seeds], CONFIGS), models, data, [], mesh)
        run.initialize()
        batches = next(iter(run.data.loader.steps(0, 1)))
        return local_part(next(iter(run.model.parameters()))).detach(), torch.cat([batch.tokens for batch in batches])

    weight, tokens = build("run.seed=1")
    other_data = build("run.seed=1", "data.seed=2")
    assert torch.equal(other_data[0], weight) and not torch.equal(other_data[1], tokens)
    other_weights = build("run.seed=2", "data.seed=1")
    assert not torch.equal(other_weights[0], weight) and torch.equal(other_weights[1], tokens)
