"""Codes of quantized weights are gathered once per step, and a run has the same bits as without gathered codes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import OptimizerConfig
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.parallel.gathered_codes import WeightCodes
from megatron_fp4.precision import torch_scaled_mm
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EmulatedBackend, codes_of
from megatron_fp4.precision.operands import LinearCall, LinearContext
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.training.callbacks.validation import evaluate
from megatron_fp4.training.optimizer import build_optimizer
from tests.distributed.hybrid import NVFP4, Layout, controlled_model, micro_batches, whole
from tests.precision import te_stand_in
from tests.precision.reference import MXFP4_2D
from tests.quantization import cublas
from tests.training.harness import launch, train_step

pytestmark = pytest.mark.slow

# out_proj has 32 rows, a group of in_proj 50. On three ranks shards are smaller than a block and end inside of one. The
# backend `torch` also gathers codes of tokens, over tensor-parallel ranks.
CASES: dict[str, tuple[Layout, torch.dtype, Callable[[], Backend]]] = {
    "dp3": (Layout(3, num_micro_batches=6), torch.float32, EmulatedBackend),
    "hsdp2_dp2": (Layout(4, replicate=2, reshard=True, num_micro_batches=8), torch.bfloat16, EmulatedBackend),
    "torch, tp2_dp2": (Layout(4, tensor=2, reshard=True), torch.bfloat16, TorchBackend),
    "transformer_engine, tp2_dp2": (Layout(4, tensor=2, reshard=True), torch.bfloat16, TransformerEngineBackend),
}
STEPS = 6
BF16_STEP, PROBED_STEP, EVALUATED_STEP = 3, 1, 2


@dataclass
class Outcome:
    """losses, weights: of the run. gathers: how often each step gathered codes of a weight. as_codes: for each
    step, a number for each forward pass of a linear: 1 if its weight was codes, else 0."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gathers: list[float] = field(default_factory=list)
    as_codes: list[list[int]] = field(default_factory=list)


def run(rank: int, layout: Layout, dtype: torch.dtype, make_backend: Callable[[], Backend]) -> list[Outcome]:
    """A run with gathered codes, then one without."""
    with mock.patch.object(torch_scaled_mm, "scaled_mm", cublas.scaled_mm), te_stand_in.installed():
        backend = make_backend()
        with_codes = train(layout, dtype, backend)
        # Transformer Engine draws other random numbers for slices of the tokens than for all.
        sends_values = mock.patch.object(LinearCall, "sends_operands", lambda *_: False)
        values = sends_values if make_backend is TorchBackend else nullcontext()
        with mock.patch.object(LinearContext, "gathers_codes", False), values:
            return [with_codes, train(layout, dtype, backend)]


def train(layout: Layout, dtype: torch.dtype, backend: Backend) -> Outcome:
    mesh, step_state, outcome = layout.mesh(), StepState(seed=11), Outcome()
    model, controller = controlled_model(mesh, NVFP4, step_state, dtype=dtype, reshard=layout.reshard)
    contexts = controller.linears
    for context in contexts.values():
        context.backend = backend
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, eps=1e-5))
    # The format of the codes changes after the step in BF16, and between two steps.
    other = MXFP4_2D if type(backend) is EmulatedBackend else NVFP4
    recipes, count = [*[NVFP4] * BF16_STEP, BF16, other, NVFP4], 0

    def counted(codes: WeightCodes) -> Any:
        nonlocal count
        count += 1
        return quantized_rows(codes)

    quantized_rows = WeightCodes.quantized_rows
    for _, linear in model.linears():
        linear.register_forward_pre_hook(lambda module, _: record_form(module.weight, outcome.as_codes[-1]))
    with mock.patch.object(WeightCodes, "quantized_rows", counted):
        for step in range(STEPS):
            count = 0
            outcome.as_codes.append([])
            for context in contexts.values():
                context.recipe = recipes[step]
            batches = micro_batches(step, mesh, layout.num_micro_batches)
            if step == EVALUATED_STEP:
                outcome.losses.append(evaluate(model, {"held out": batches[:1]}, mesh, step_state)["held out"])
            with Probe(once=True).attached(contexts if step == PROBED_STEP else {}):
                done = train_step(model, optimizer, batches, mesh, step_state, step=step)
            outcome.losses.append(done.loss)
            outcome.gathers.append(count / len(contexts))
    outcome.weights = [whole(parameter) for parameter in model.parameters()]
    return outcome


def record_form(weight: Tensor, as_codes: list[int]) -> None:
    """Append to `as_codes` whether the gathered `weight` is codes."""
    codes = codes_of(weight)
    as_codes.append(int(codes is not None))
    local = weight._local_tensor  # type: ignore[attr-defined]
    # A weight gathered as codes has only NaN as values.
    assert bool(local.isnan().all()) == (codes is not None)
    assert codes is None or codes.codes.shape == (local.shape[0], local.shape[1] // 2)


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_gathered_codes_has_the_bits_of_one_without(name: str) -> None:
    layout, *settings = CASES[name]
    for codes, plain in launch(run, layout.world, layout, *settings):
        assert codes.losses == plain.losses
        assert all(torch.equal(one, other) for one, other in zip(codes.weights, plain.weights, strict=True))
        # Once per step, for any number of micro-batches, and once for the evaluation; never if the weight is read.
        assert codes.gathers == [1, 0, 2, 0, 1, 1]
        assert not any(plain.gathers)
        for step, as_codes in enumerate(codes.as_codes):
            assert set(as_codes) == {0 if step in (BF16_STEP, PROBED_STEP) else 1}
