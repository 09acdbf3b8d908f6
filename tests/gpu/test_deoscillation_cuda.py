"""On a GPU the same weights are reset to the same values as on a CPU."""

from __future__ import annotations

import pytest
import torch

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.forward_weight import forward_weight, has_values
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from tests.gpu.test_cuda_graphs import mesh, pytestmark
from tests.training.test_deoscillation import RECIPES, Moves, Trained, moved

__all__ = ["mesh", "pytestmark"]  # the fixture and the marks are the same


def on_cpu() -> ParallelMesh:
    return build_mesh(ParallelConfig(), torch.device("cpu"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_values(recipe: str, mesh: ParallelMesh) -> None:
    runs = [Trained(on, recipe=RECIPES[recipe], optimizer=Moves) for on in (on_cpu(), mesh)]
    for one, other in zip(*(run.linears.values() for run in runs), strict=True):
        if has_values(one.context.recipe):
            expected, found = (forward_weight(linear, torch.bfloat16) for linear in (one, other))
            assert torch.equal(found.real().cpu(), expected.real())


@pytest.mark.parametrize("recipe", ["16x16", "1x16 4/6"])
def test_resets(recipe: str, mesh: ParallelMesh) -> None:
    (resets, weights), (on_gpu, weights_on_gpu) = moved(on_cpu(), recipe), moved(mesh, recipe)
    assert resets is not None and resets == on_gpu and resets.num_reset > 0
    assert all(torch.equal(weights[name], weights_on_gpu[name].cpu()) for name in weights)
