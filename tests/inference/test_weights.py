"""Weights as trained: the codes of the training's forward pass, with unquantized activations."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from inference.generation import lower_weights, weights_as_trained
from megatron_fp4.config.precision_schema import Bf16BlocksConfig, ExceptionConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import Plan, PrecisionController, build_plan
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from models.hybrid import HybridModel
from models.pattern import linear_shapes
from tests.distributed.hybrid import MXFP8, NVFP4, watched_gemms
from tests.models.builders import build, small_config
from tests.precision.test_plan import exception

CONFIG = small_config(pattern="M-*-", hidden_dim=64, ffn_dim=64, mamba_state_dim=8, init_std=0.2)
ONE_ROW = replace(NVFP4, fprop=Gemm(NVFP4.fprop.left, Operand("nvfp4", (1, 16))))
TRANSFORMED = replace(ONE_ROW, fprop=replace(ONE_ROW.fprop, rht=16))
RECIPES = {"nvfp4": NVFP4, "nvfp4, sections": NVFP4, "mxfp8": MXFP8, "transformed": TRANSFORMED}
SECTIONS = [exception(["*.in_proj"], "mxfp8", "", "x dt"), exception(["*"], "mxfp8", "", "k")]


def plan_of(recipe: Recipe, exceptions: Sequence[ExceptionConfig] = ()) -> Plan:
    return build_plan(linear_shapes(CONFIG), recipe, Bf16BlocksConfig(last=1), CONFIG.num_blocks, exceptions)


def operands_of_weights(model: HybridModel) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(values, tensor scale) of the quantized weights in the GEMMs of a forward pass, in order."""
    seen = []

    def watch(a: object, b: object) -> None:
        if b.quantized:
            seen.append((b.values.clone(), None if b.scale is None else b.scale.clone()))

    with torch.no_grad(), watched_gemms(watch):
        model(torch.arange(32).view(2, 16))
    return seen


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in RECIPES), ("nvfp4", torch.float32), ("nvfp4, sections", torch.float32)],
)
def test_weights_as_trained_equal_those_of_the_run(mesh: ParallelMesh, name: str, dtype: torch.dtype) -> None:
    """The run computed in BF16, so it quantized masters that were rounded to BF16. Activations are not quantized, so a
    token's result does not depend on the others."""
    plan = plan_of(RECIPES[name], SECTIONS if "sections" in name else ())
    run = build(CONFIG, mesh, torch.bfloat16)
    PrecisionController({n: module.context for n, module in run.linears()}, plan, StepState(seed=0))
    trained = operands_of_weights(run)
    count = 8 if "sections" in name else 6  # of 10 or 8 linears: the last block is in BF16
    assert len(trained) == count

    model = build(CONFIG, mesh, dtype)
    assert weights_as_trained(model, plan, torch.bfloat16, shards=1) == count
    lower_weights(model, dtype)
    stored = {(".ssm." in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert stored == {(True, torch.float32), (False, dtype)}
    for (values, scale), (expected, expected_scale) in zip(operands_of_weights(model), trained, strict=True):
        assert torch.equal(values, expected)
        assert scale is expected_scale is None or torch.equal(scale, expected_scale)
    linear, x = dict(model.linears())["blocks.1.mixer.up_proj"], torch.linspace(-2, 3, 5 * 64).view(5, 64).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(linear(torch.cat((100 * x, x)))[5:], linear(x), rtol=1e-5, atol=1e-5)


STOCHASTIC = replace(NVFP4, fprop=Gemm(Operand(), Operand("nvfp4", (1, 16), "stochastic")))


@pytest.mark.parametrize(
    ("recipe", "shards", "trained_in", "wrong"),
    [
        (STOCHASTIC, 1, torch.bfloat16, "stochastic rounding"),
        (replace(TRANSFORMED, rht_signs="fresh"), 1, torch.bfloat16, "signs of each step"),
        (replace(NVFP4, amax="shard"), 2, torch.bfloat16, "each of 2 shards"),
        (NVFP4, 1, torch.float32, "compute in FP32"),
    ],
)
def test_weights_that_a_checkpoint_does_not_determine_are_refused(
    mesh: ParallelMesh, recipe: Recipe, shards: int, trained_in: torch.dtype, wrong: str
) -> None:
    model = build(CONFIG, mesh, torch.bfloat16)
    with pytest.raises(ValueError, match=wrong):
        weights_as_trained(model, plan_of(recipe), trained_in, shards)
    assert all(module.context.recipe == BF16 for _, module in model.linears())
