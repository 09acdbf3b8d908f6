"""Ranks that gather once a step compute the same as with FSDP2. One rank: tests/models/test_hybrid.py."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import OptimizerConfig, ParallelConfig
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.parallel.data_parallel import apply_data_parallel
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
from tests.training.harness import ToyBatch, launch, shard_by_fsdp, train_step

CONFIG = small_config(mamba_state_dim=16, hidden_dim=64, ffn_dim=64)


def batches(step: int) -> list[ToyBatch]:
    draws = torch.randint(0, CONFIG.vocab_size, (3, 2, 2, 16), generator=torch.Generator().manual_seed(step))
    return [ToyBatch(index, *pair) for index, pair in enumerate(draws)]


def build(mesh: ParallelMesh, apply: Callable[..., None], step_state: StepState) -> HybridModel:
    """A model, built as in a run. The first block's linears are quantized, the others in BF16."""
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.bfloat16)
    settings: dict[str, Any] = {"units": [*model.blocks], "fp32_units": model.fp32_units()}
    settings["ends"] = [model.embedding]
    apply(model, mesh, compute_dtype=torch.bfloat16, reshard=False, **settings)
    model.to_empty(device="cpu")
    initialize(model, CONFIG, seed=0)
    for name, linear in model.linears():
        linear.context.step_state, linear.context.name = step_state, name
        linear.context.recipe = NVFP4 if name.startswith("blocks.0") else BF16
    return model


def on_ranks(rank: int, parallel: ParallelConfig) -> list[tuple[list[Any], dict[str, tuple[Any, torch.Tensor]]]]:
    """Six steps of gathering and reducing once, then by FSDP2: with a probe, an evaluation, a step in BF16, and a
    frozen parameter. Returns losses and norms, and placements and rows of weights and moments, of both."""
    outcomes = []
    for apply in (apply_data_parallel, shard_by_fsdp):
        mesh, step_state, numbers = build_mesh(parallel, torch.device("cpu")), StepState(seed=3), list[Any]()
        model = build(mesh, apply, step_state)
        if apply is apply_data_parallel:  # gloo's order of sums depends on the message
            sharded: Any = model._gathered_model
            units = [set(one.modules()) for one in (*model.blocks, model.embedding)]
            others = set(model.modules()).difference(*units)
            sharded._buckets = [[p for p in sharded.parameters if p.module in unit] for unit in (*units, others)]
        model.blocks[0].norm.weight.requires_grad_(False)
        contexts = {name: linear.context for name, linear in model.linears() if name.startswith("blocks.0")}
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        for step in range(6):
            if apply is apply_data_parallel and step:  # only the last step needs what the one before it gathered
                sharded.gather_ahead()
                sharded.ahead = step_state.weights_version
                sharded.gather_ahead = sharded.gather_ahead if step < 5 else None
            given = [*batches(7 * step), *batches(7 * step + 1), *batches(7 * step + 2)][: 2 * mesh.batch.size]
            given = given[mesh.batch.rank :: mesh.batch.size]
            for context in contexts.values():
                context.recipe = BF16 if step == 3 else NVFP4
            if step == 2:
                numbers.append(evaluate(model, {"held out": given[:1]}, mesh, step_state))
            if apply is apply_data_parallel and step == 4:  # an error leaves the shards and no gradients
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
def test_gathering_and_reducing_once_has_the_bits_of_fsdp(ranks: int, parallel: ParallelConfig) -> None:
    for (numbers, tensors), (expected, sharded) in launch(on_ranks, ranks, parallel):
        assert numbers == expected and len(numbers) == 7
        assert tensors.keys() == sharded.keys()
        for name, (spec, rows) in tensors.items():
            assert str(spec) == str(sharded[name][0]) and torch.equal(rows, sharded[name][1]), name
