"""Diagnostics, gradient noise, replays and rechecks during training steps of a real model on several ranks."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig, OptimizerConfig
from megatron_fp4.measure.diagnostics import Probe, ResidualStream, diagnostics_record, diagnostics_scalars
from megatron_fp4.measure.gradient_noise import bf16_backward, gradient_noise
from megatron_fp4.measure.replay import replay
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.verify import Recheck
from megatron_fp4.training.optimizer import build_optimizer
from tests.distributed.hybrid import controlled_model
from tests.precision.reference import ALL_THE_WAY, NVFP4
from tests.training.harness import ToyBatch, launch, toy_batches, toy_mesh, train_step, whole

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    pattern="*-", vocab_size=64, hidden_dim=64, ffn_dim=128, num_query_heads=4, num_kv_heads=2, head_dim=16
)
LINEARS = [f"blocks.{name}_proj" for name in ("0.mixer.qkv", "0.mixer.out", "1.mixer.up", "1.mixer.down")]


class Run:
    """A small model and the state of its training."""

    def __init__(self, mesh: ParallelMesh, recipe: Recipe, reshard: bool = False, config: ModelConfig = CONFIG) -> None:
        self.mesh, self.step_state = mesh, StepState(seed=7)
        parts = mesh, recipe, self.step_state, config, torch.bfloat16, reshard
        self.model, self.controller = controlled_model(*parts)
        self.linears = self.controller.linears
        self.optimizer = build_optimizer(self.model, OptimizerConfig(lr=1e-2))

    def batches(self, step: int) -> list[ToyBatch]:
        return toy_batches(step, self.mesh, vocab_size=CONFIG.vocab_size, length=32)

    def step(self, step: int) -> tuple[float, float]:
        parts = self.model, self.optimizer, self.batches(step), self.mesh, self.step_state
        result = train_step(*parts, step=step)
        return result.loss, result.grad_norm

    def noise(self, step: int) -> Any:
        self.step_state.step = step
        return gradient_noise(self.model, self.batches(step), self.mesh, self.controller)

    def weights(self) -> list[Tensor]:
        return [whole(parameter) for parameter in self.model.parameters()]


def test_the_residual_stream_is_measured_after_each_block(mesh: ParallelMesh) -> None:
    run, stream, expected = Run(mesh, NVFP4), ResidualStream(), []
    tokens = run.batches(0)[0].tokens
    h = run.model.embedding(tokens)
    for block in run.model.blocks:
        h = block(h, tokens.shape[1])
        expected.append(h.double().square().mean().sqrt().item())
    with stream.attached(run.model.blocks):
        run.step(0)
    run.step(1)
    found = stream.collect()
    assert list(found.values()) == pytest.approx(expected, rel=1e-5) and found["blocks.1"] > found["blocks.0"] > 0


def _on_and_off(rank: int, tp_size: int, recipe: Recipe, reshard: bool) -> tuple[list[Any], list[float], list[Any]]:
    """Train two models, one of which is measured, replayed and rechecked; assert that both stay equal and that replays
    and rechecks find no difference. Returns diagnostics, gradient norms and gradient noise of every second step."""
    mesh = toy_mesh(tp_size, sequence_parallel=tp_size > 1)
    off, on = Run(mesh, recipe, reshard), Run(mesh, recipe, reshard)
    generator, recheck, records, norms, noises = torch.get_rng_state(), Recheck(1, on.linears), [], [], []
    for step in range(3):
        probe, stream, due = Probe(), ResidualStream(), step % 2 == 0
        if due:
            recipes = {name: context.recipe for name, context in on.linears.items()}
            noises.append(on.noise(step))
            replayed = replay(on.model, on.batches(step), mesh, on.controller)
            assert replayed.differences == [] and replayed.checked > 60
            assert recipes == {name: context.recipe for name, context in on.linears.items()}
            assert all(parameter.grad is None for parameter in on.model.parameters())
        with (
            probe.attached(on.linears if due else {}),
            stream.attached(on.model.blocks if due else ()),
            recheck.watching(step),
        ):
            result = on.step(step)
        rechecked = recheck.collect()
        assert rechecked is not None and rechecked.linear == LINEARS[step]
        assert rechecked.faults == []
        assert result == off.step(step) and on.step_state == off.step_state
        assert torch.equal(generator, torch.get_rng_state())
        assert all(context.probe is None for context in on.linears.values())
        if found := probe.collect(list(on.linears)):
            records.append(diagnostics_record(found) | {"residual_rms": stream.collect()})
            norms.append(result[1])
    assert all(torch.equal(x, y) for x, y in zip(on.weights(), off.weights(), strict=True))
    return records, norms, noises


@pytest.mark.parametrize(
    ("world", "tp_size", "recipe", "reshard"),
    [(1, 1, NVFP4, False), (2, 1, ALL_THE_WAY, True), (2, 2, NVFP4, False)],
    ids=["alone", "data parallel", "tensor parallel"],
)
def test_measurements_do_not_change_the_run(world: int, tp_size: int, recipe: Recipe, reshard: bool) -> None:
    outcomes = launch(_on_and_off, world, tp_size, recipe, reshard)
    assert all(outcome == outcomes[0] for outcome in outcomes)  # the same numbers on all ranks
    records, norms, noises = outcomes[0]
    assert len(records) == len(noises) == 2
    for record in records:
        assert list(record["residual_rms"]) == ["blocks.0", "blocks.1"]
        assert list(record["linears"]) == LINEARS and list(record["blocks"]) == ["blocks.0", "blocks.1"]
        for linear in record["linears"].values():
            assert len(linear["operands"]) == 6
            assert all(8 < statistics["snr_db"] < 30 for statistics in linear["operands"].values())
            assert all(0.02 < error < 0.4 for error in linear["gemms"].values())
            assert linear["gradient_to_noise"] == pytest.approx(1 / linear["gemms"]["wgrad"])
        json.dumps(record, allow_nan=False)
        scalars = diagnostics_scalars(record)
        errors = sorted(linear["gemms"]["wgrad"] for linear in record["linears"].values())
        assert scalars["quantization_error/wgrad_worst"] == errors[-1] > scalars["quantization_error/wgrad_median"]
        ratios = [linear["operands"]["wgrad_gradient"]["snr_db"] for linear in record["linears"].values()]
        assert scalars["quantization_snr_db/wgrad_gradient_worst"] == min(ratios) > 8
        blocks = [block["gradient_to_noise"] for block in record["blocks"].values()]
        assert scalars["quantization_gradient_to_noise/blocks_worst"] == min(blocks) > 0
    for grad_norm, noise in zip(norms, noises, strict=True):
        assert 1 < noise.ratio < 20
        # The quantized gradient of the measurement is that of the step that followed.
        assert abs(grad_norm - noise.reference_norm) <= noise.noise_norm
        sigma_q = noise.as_record()["sigma_q"]
        assert sigma_q * math.sqrt(noise.num_coordinates) == pytest.approx(noise.noise_norm)
        assert noise.noise_norm == pytest.approx(math.hypot(*(n for _, n in noise.parameters.values())))


def test_gradient_noise_is_the_difference_to_the_gradient_in_bf16(mesh: ParallelMesh) -> None:
    run = Run(mesh, NVFP4)
    noise = run.noise(0)

    def gradients(recipe: Recipe) -> list[Tensor]:
        for context in run.linears.values():
            context.recipe, context.weight_cache = recipe, None
        run.step_state.step = 0
        for batch in run.batches(0):
            run.step_state.micro_batch = batch.index
            (run.model(batch.tokens, batch.targets) / 4).backward()
        found = [whole(p.grad) for p in run.model.parameters() if p.grad is not None]
        run.optimizer.zero_grad(set_to_none=True)
        return found

    quantized, reference = gradients(NVFP4), gradients(bf16_backward(NVFP4))
    expected = math.sqrt(sum((q - r).double().square().sum().item() for q, r in zip(quantized, reference, strict=True)))
    norm = math.sqrt(sum(r.double().square().sum().item() for r in reference))
    assert noise.noise_norm == pytest.approx(expected, rel=1e-4)
    assert noise.reference_norm == pytest.approx(norm, rel=1e-4)
    assert noise.ratio == pytest.approx(norm / expected, rel=1e-4)
    assert noise.num_coordinates == sum(r.numel() for r in reference)
