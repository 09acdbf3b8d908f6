"""One data-parallel rank without FSDP2 computes the same as with FSDP2; and so do ranks without FSDP2's hooks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.config.schema import OptimizerConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel, shard, without_fsdp_hooks
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training import step as training_step
from megatron_fp4.training.optimizer import build_optimizer
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from tests.models.builders import small_config
from tests.precision.reference import NVFP4
from tests.training.harness import ToyBatch, launch, toy_mesh, train_step, whole

CONFIG = small_config(mamba_state_dim=16, hidden_dim=64, ffn_dim=64)


def batches(step: int) -> list[ToyBatch]:
    draws = torch.randint(0, CONFIG.vocab_size, (3, 2, 2, 16), generator=torch.Generator().manual_seed(step))
    return [ToyBatch(index, *pair) for index, pair in enumerate(draws)]


def build(mesh: ParallelMesh, apply: Callable[..., None], reshard: bool, step_state: StepState) -> HybridModel:
    """A model, built as in a run. The first block's linears are quantized, the others in BF16."""
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.bfloat16)
    settings: dict[str, Any] = {"units": list(model.blocks), "fp32_units": model.fp32_units()}
    apply(model, mesh, compute_dtype=torch.bfloat16, reshard=reshard, **settings)
    model.to_empty(device="cpu")
    initialize(model, CONFIG, seed=0)
    for name, linear in model.linears():
        linear.context.step_state, linear.context.name = step_state, name
        linear.context.recipe = NVFP4 if name.startswith("blocks.0") else BF16
    return model


def train(mesh: ParallelMesh, apply: Callable[..., None], reshard: bool) -> tuple[list[Any], HybridModel]:
    """Train three steps; returns their losses and norms, and the model."""
    step_state = StepState(seed=3)
    model = build(mesh, apply, reshard, step_state)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    results = [train_step(model, optimizer, batches(s), mesh, step_state, step=s, reshard=reshard) for s in range(3)]
    return [(result.loss, result.grad_norm) for result in results], model


@pytest.mark.parametrize("reshard", [False, True])
def test_one_rank_without_fsdp_computes_the_same_as_with_fsdp(mesh: ParallelMesh, reshard: bool) -> None:
    actual, model = train(mesh, apply_data_parallel, reshard)
    expected, sharded = train(mesh, shard, reshard)
    assert actual == expected
    assert any(isinstance(module, FSDPModule) for module in sharded.modules())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert model.state_dict().keys() == sharded.state_dict().keys()
    for (name, mine), theirs in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype == torch.float32
        assert torch.equal(local_part(mine), local_part(theirs)), name


def test_rounded_weights_are_kept_until_the_weights_change(mesh: ParallelMesh) -> None:
    step_state, (batch, *_) = StepState(seed=0), batches(0)
    for reshard in (False, True):
        model = build(mesh, apply_data_parallel, reshard, step_state)
        contexts = {name: linear.context for name, linear in model.linears()}
        quantized = {name for name in contexts if name.startswith("blocks.0")}
        model(batch.tokens, batch.targets)
        kept = {name: context.weight_cache for name, context in contexts.items() if context.weight_cache}
        assert set(kept) == (quantized if reshard else set(contexts))
        model(batch.tokens, batch.targets)
        assert all(contexts[name].weight_cache is cache for name, cache in kept.items())
        step_state.weights_version += 1
        model(batch.tokens, batch.targets)
        assert not any(contexts[name].weight_cache is cache for name, cache in kept.items())


def train_without_and_with_hooks(rank: int) -> list[tuple[list[Any], list[torch.Tensor]]]:
    """Train two steps of five micro-batches without FSDP2's hooks in the middle ones, then with them. Returns losses
    and norms, and weights, of both."""
    outcomes = []
    for context in (without_fsdp_hooks, lambda _: nullcontext()):
        mesh, step_state, forwards = toy_mesh(), StepState(seed=3), []
        model = build(mesh, apply_data_parallel, False, step_state)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        model.blocks[0].register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(1))
        with mock.patch.object(training_step, "without_fsdp_hooks", side_effect=context) as without_hooks:
            given = [[*batches(2 * s + rank), *batches(9 + 2 * s + rank)][:5] for s in range(2)]
            results = [train_step(model, optimizer, given[s], mesh, step_state, step=s) for s in range(2)]
        assert without_hooks.call_count == 2 * 3 and len(forwards) == 2 * 5
        weights = [whole(parameter) for parameter in model.parameters()]
        # An error in the second micro-batch of a step restores the hooks.
        model.blocks[0].register_forward_pre_hook(lambda *_, forwards=forwards: 1 / (len(forwards) - 12) and None)
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        with pytest.raises(ZeroDivisionError):
            train_step(model, optimizer, given[0], mesh, step_state, step=2)
        assert hooks == [len(module._forward_pre_hooks) for module in model.modules()] and len(forwards) == 12
        outcomes.append(([(result.loss, result.grad_norm) for result in results], weights))
    return outcomes


@pytest.mark.slow
def test_middle_micro_batches_of_a_step_need_no_fsdp_hooks() -> None:
    for without, with_hooks in launch(train_without_and_with_hooks, 2):
        assert without[0] == with_hooks[0]
        assert all(torch.equal(a, b) for a, b in zip(without[1], with_hooks[1], strict=True))
