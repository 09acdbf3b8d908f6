"""Weights as they were trained: the codes of training's own forward pass, with activations as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference.generation import lower_weights, weights_as_trained
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import Plan, PrecisionController, build_plan
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from models.hybrid import HybridModel
from models.pattern import linear_shapes
from tests.distributed.hybrid import MXFP8, NVFP4, watched_gemms
from tests.models.builders import build, small_config

CONFIG = small_config(pattern="M-*-", hidden_dim=64, ffn_dim=64, mamba_state_dim=8, init_std=0.2)
ONE_ROW = replace(NVFP4, fprop=Gemm(NVFP4.fprop.left, Operand("nvfp4", (1, 16))))
RECIPES = {"nvfp4": NVFP4, "1x16 weights": ONE_ROW, "mxfp8": MXFP8, "transformed": replace(
    ONE_ROW, fprop=replace(ONE_ROW.fprop, rht=16)
)}  # fmt: skip


def plan_of(recipe: Recipe) -> Plan:
    return build_plan(linear_shapes(CONFIG), recipe, Bf16BlocksConfig(last=1), CONFIG.num_blocks)


def linears(model: HybridModel) -> dict[str, object]:
    return {name: module.context for name, module in model.linears()}


def operands_of_weights(model: HybridModel) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Of the GEMMs of a forward pass with quantized weights, in order."""
    seen = []

    def watch(a: object, b: object) -> None:
        if b.quantized:
            seen.append((b.values.clone(), None if b.scale is None else b.scale.clone()))

    with torch.no_grad(), watched_gemms(watch):
        model(torch.arange(32).view(2, 16))
    return seen


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_those_of_training(mesh: ParallelMesh, name: str, dtype: torch.dtype) -> None:
    """The run computed in BF16, so it quantized masters that were rounded to BF16."""
    plan = plan_of(RECIPES[name])
    run = build(CONFIG, mesh, torch.bfloat16)
    PrecisionController(linears(run), plan, StepState(seed=0))
    trained = operands_of_weights(run)
    assert len(trained) == 6  # of 8 linears: the last block is in BF16

    model = build(CONFIG, mesh, dtype)
    assert weights_as_trained(model, plan, torch.bfloat16, shards=1) == 6
    lower_weights(model, dtype)
    for (values, scale), (expected, expected_scale) in zip(operands_of_weights(model), trained, strict=True):
        assert torch.equal(values, expected)
        assert scale is expected_scale is None or torch.equal(scale, expected_scale)


def test_activations_are_not_quantized(mesh: ParallelMesh) -> None:
    """A linear written out: the decoded weight, the activation as it is."""
    model = build(CONFIG, mesh)
    masters = dict(model.linears())["blocks.1.mixer.up_proj"].weight.detach().to_local().clone()
    weights_as_trained(model, plan_of(NVFP4), torch.bfloat16, shards=1)
    linear = dict(model.linears())["blocks.1.mixer.up_proj"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    encoded = Operand("nvfp4", (16, 16)).encode(masters.bfloat16().float())
    weight = encoded.block_values().double() * encoded.decode_scale().double()
    with torch.no_grad():
        y = linear(x)
    torch.testing.assert_close(y, (x.double() @ weight.t()).float(), rtol=1e-5, atol=1e-5)
    assert (y - x @ masters.t()).abs().max() > 1e-2
    # One token, or with others: the same.
    with torch.no_grad():
        torch.testing.assert_close(linear(torch.cat((100 * x, x)))[5:], y, rtol=1e-5, atol=1e-5)


STOCHASTIC = Operand("nvfp4", (1, 16), "stochastic")


@pytest.mark.parametrize(
    ("recipe", "shards", "trained_in", "wrong"),
    [
        (replace(NVFP4, fprop=Gemm(Operand(), STOCHASTIC)), 1, torch.bfloat16, "rounded stochastically"),
        (replace(RECIPES["transformed"], rht_signs="fresh"), 1, torch.bfloat16, "signs of a step"),
        (replace(NVFP4, amax="shard"), 2, torch.bfloat16, "each of 2 shards"),
        (NVFP4, 1, torch.float32, "compute in FP32"),
    ],
)
def test_codes_that_no_checkpoint_has_are_refused(
    mesh: ParallelMesh, recipe: Recipe, shards: int, trained_in: torch.dtype, wrong: str
) -> None:
    model = build(CONFIG, mesh, torch.bfloat16)
    with pytest.raises(ValueError, match=wrong):
        weights_as_trained(model, plan_of(recipe), trained_in, shards)
    assert all(context.recipe == BF16 for context in linears(model).values())


def test_lower_weights_compute_what_a_run_computes(mesh: ParallelMesh) -> None:
    """FSDP's forward pass sees all weights rounded but A_log, D and dt_bias; those stay, and texts are the same."""
    model, run = build(CONFIG, mesh, torch.bfloat16), build(CONFIG, mesh, torch.bfloat16)
    kept = {name for name, _ in model.named_parameters() if ".ssm." in name}
    with torch.no_grad():
        for name, parameter in run.named_parameters():
            if name not in kept:
                parameter.to_local().copy_(parameter.to_local().bfloat16())
    lower_weights(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == kept and len(kept) == 3
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(tokens), run(tokens))
    same = build(CONFIG, mesh)
    before = list(same.parameters())
    lower_weights(same, torch.float32)
    assert all(a is b for a, b in zip(before, same.parameters(), strict=True))
