"""The held-out loss is the same on every mesh, also where ranks have unequal shares."""

from __future__ import annotations

import pytest

from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.evaluate import evaluate
from tests.distributed.hybrid import LAYOUTS, ONE, RECIPES, Layout, micro_batches, sharded_model
from tests.training.harness import launch

pytestmark = pytest.mark.slow


def run(rank: int, layout: Layout) -> dict[str, float]:
    mesh, clock = layout.mesh(), StepState(seed=0)
    model = sharded_model(layout, mesh, RECIPES["nvfp4"], clock)
    mine = micro_batches(0, mesh)
    return evaluate(model, {"all": mine, "three": [batch for batch in mine if batch.index < 3]}, mesh, clock)


@pytest.mark.parametrize("name", ["tp2", "dp2", "hsdp2_dp2", "tp2_hsdp2"])
def test_every_mesh_finds_the_loss_of_one_process(name):
    (one,) = launch(run, 1, ONE)
    layout = LAYOUTS[name]
    assert one["all"] != one["three"]
    for losses in launch(run, layout.world, layout):
        assert losses == pytest.approx(one, rel=1e-3 if layout.tensor > 1 else 1e-6)
