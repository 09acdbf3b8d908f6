"""Gathering once a step, gathering beside computation, and one rank that gathers nothing compute the same."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import OptimizerConfig, ParallelConfig
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.parallel.data_parallel import Bucket, apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.validation import evaluate
from megatron_fp4.training.optimizer import build_optimizer, optimizer_parameters, optimizer_state
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from tests.models.builders import small_config
from tests.precision.reference import NVFP4
from tests.training.harness import ToyBatch, launch, overlapped, train_step

CONFIG = small_config(mamba_state_dim=16, hidden_dim=64, ffn_dim=64)


def batches(step: int) -> list[ToyBatch]:
    draws = torch.randint(0, CONFIG.vocab_size, (3, 2, 2, 16), generator=torch.Generator().manual_seed(step))
    return [ToyBatch(index, *pair) for index, pair in enumerate(draws)]


def build(mesh: ParallelMesh, apply: Callable[..., None], reshard: bool, step_state: StepState) -> HybridModel:
    """A model, built as in a run. The first block's linears are quantized, the others in BF16."""
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.bfloat16)
    settings: dict[str, Any] = {"units": [*model.blocks], "fp32_units": model.fp32_units()}
    settings["ends"] = [model.embedding]
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
    results = [train_step(model, optimizer, batches(s), mesh, step_state, step=s) for s in range(3)]
    return [(result.loss, result.grad_norm) for result in results], model


@pytest.mark.parametrize("reshard", [False, True])
def test_one_rank_computes_the_same_as_one_that_gathers_its_own_rows(mesh: ParallelMesh, reshard: bool) -> None:
    actual, model = train(mesh, apply_data_parallel, reshard)
    expected, sharded = train(mesh, overlapped, reshard)
    assert actual == expected
    assert model.state_dict().keys() == sharded.state_dict().keys()
    for (name, mine), theirs in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype == torch.float32
        assert torch.equal(local_part(mine), local_part(theirs)), name


def on_ranks(rank: int, parallel: ParallelConfig) -> list[tuple[list[Any], dict[str, tuple[Any, torch.Tensor]]]]:
    """Six steps of gathering and reducing once, then beside computation: with a probe, an evaluation, a step in BF16,
    and a frozen parameter. Returns losses and norms, and placements and rows of weights and moments, of both."""
    outcomes = []
    for reshard in (False, True):
        mesh, step_state, numbers = build_mesh(parallel, torch.device("cpu")), StepState(seed=3), list[Any]()
        model = build(mesh, apply_data_parallel, reshard, step_state)
        sharded: Any = model._gathered_model
        if not reshard:  # gloo's order of sums depends on the message
            units = [set(one.modules()) for one in (*model.blocks, model.embedding)]
            others = set(model.modules()).difference(*units)
            parts = ([p for p in sharded.parameters if p.module in unit] for unit in (*units, others))
            sharded._buckets = [Bucket(part, mesh) for part in parts]
        model.blocks[0].norm.weight.requires_grad_(False)
        contexts = {name: linear.context for name, linear in model.linears() if name.startswith("blocks.0")}
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        for step in range(6):
            if step:  # only the last step needs what the one before it gathered
                sharded.gather_ahead()
                sharded.ahead = step_state.weights_version
                sharded.gather_ahead = sharded.gather_ahead if step < 5 else None
            given = [*batches(7 * step), *batches(7 * step + 1), *batches(7 * step + 2)][: 2 * mesh.batch.size]
            given = given[mesh.batch.rank :: mesh.batch.size]
            for context in contexts.values():
                context.recipe = BF16 if step == 3 else NVFP4
            if step == 2:
                numbers.append(evaluate(model, {"held out": given[:1]}, mesh, step_state))
            if step == 4:  # an error leaves the shards and no gradients
                calls = itertools.count()
                hook = model.blocks[0].register_forward_pre_hook(
                    lambda *_, calls=calls: 1 // (1 - next(calls)) and None
                )
                with pytest.raises(ZeroDivisionError):
                    train_step(model, optimizer, given, mesh, step_state, step=step)
                hook.remove()
                assert {*optimizer_parameters(optimizer)} < {*model.parameters()}
            with Probe(once=True).attached(contexts if step == 1 else {}):
                result = train_step(model, optimizer, given, mesh, step_state, step=step)
            numbers.append((result.loss, result.grad_norm))
        tensors = {**dict(model.named_parameters()), **optimizer_state(model, optimizer)}
        placed = {n: (t._spec if isinstance(t, DTensor) else None, local_part(t)) for n, t in tensors.items()}
        outcomes.append((numbers, placed))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (3, ParallelConfig()),
        (4, ParallelConfig(tensor=2)),
        (4, ParallelConfig(replicate=2)),
        (4, ParallelConfig(reproducible=True, replicate=2)),
    ],
    ids=["shards", "tensor parallel", "replicas", "reproducible"],
)
def test_messages_beside_computation_change_no_bit(ranks: int, parallel: ParallelConfig) -> None:
    for (expected, sharded), (numbers, tensors) in launch(on_ranks, ranks, parallel):
        assert numbers == expected and len(numbers) == 7
        assert tensors.keys() == sharded.keys()
        for name, (spec, rows) in tensors.items():
            assert str(spec) == str(sharded[name][0]) and torch.equal(rows, sharded[name][1]), name
