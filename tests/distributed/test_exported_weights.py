"""What tensor-parallel ranks multiplied with, put together, is what one process exports from the whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from exchange.nvfp4 import trained_weight
from megatron_fp4.precision.plan import PlannedLinear
from megatron_fp4.precision.rng import StepState
from models.pattern import linear_shapes
from tests.distributed.hybrid import LAYOUTS, MODEL, NVFP4, micro_batches, operand, sharded_model, watched_gemms, whole
from tests.exchange.decoding import block_values
from tests.training.harness import launch

pytestmark = pytest.mark.slow


def weights_given(rank: int, name: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """This rank's place along `tp`, what its fprop GEMMs were given as weights, and the whole masters."""
    mesh = LAYOUTS[name].mesh()
    model = sharded_model(LAYOUTS[name], mesh, NVFP4, StepState(seed=11))
    given: list[Any] = []
    with watched_gemms(lambda _, right: given.append(operand(right))), torch.no_grad():
        model(micro_batches(0, mesh)[0].tokens)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the masters; what was gathered is codes
    names = [name for name, _ in model.linears()]
    return mesh.tp_rank, dict(zip(names, given, strict=False)), {n: whole(m.weight) for n, m in model.linears()}


@pytest.mark.parametrize("layout", ["tp2_dp2"])
def test_ranks_together_multiplied_what_is_exported(layout):
    ranks = {tp: (given, masters) for tp, given, masters in launch(weights_given, LAYOUTS[layout].world, layout)}
    assert len(ranks) == 2
    masters = ranks[0][1]
    for shape in linear_shapes(MODEL):
        made = trained_weight(masters[shape.name], PlannedLinear(shape, NVFP4, ""), torch.float32)
        parts = [ranks[tp][0][shape.name] for tp in (0, 1)]
        values = torch.cat([values.float() for values, _ in parts], 1 if shape.input_sharded else 0)
        # Eight or four groups of heads, each padded to whole blocks by itself.
        groups = 4 if shape.name.endswith(("qkv_proj", "in_proj")) else 1
        kept = values.unflatten(0, (groups, -1))[:, : shape.out_features // groups].flatten(0, 1)
        assert torch.equal(block_values(made.codes, made.scales), kept), shape.name
        assert all(torch.equal(scale, made.decode_scale()) for _, scale in parts), shape.name
        if shape.name.endswith("in_proj"):
            assert len(kept) < len(values)
