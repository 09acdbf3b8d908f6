"""Experts divided among ranks, and multi-token prediction, compute what one rank computes."""

import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import OptimizerConfig
from megatron_fp4.measure.diagnostics import LinearMeasurement, Probe
from megatron_fp4.precision.emulated import GemmOperand
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer
from models.execution import Execution
from tests.distributed.hybrid import (
    MODEL,
    ONE,
    RECIPES,
    Layout,
    controlled_model,
    launch_each,
    masked_micro_batches,
    operand,
    watched_gemms,
)  # fmt: skip
from tests.models.builders import local, relative_error
from tests.training.harness import train_step, whole

pytestmark = pytest.mark.slow(seconds=10)

CONFIG = replace(MODEL, pattern="ME", moe_num_experts=4, moe_top_k=2, moe_ffn_dim=32, moe_shared_ffn_dim=32,
                 moe_aux_loss=0.1, moe_latent_dim=32)  # fmt: skip
MIXED = Layout(4, expert=2)
LAYOUTS = [Layout(2, expert=2), MIXED, Layout(4, expert=4), Layout(4, expert=2, replicate=2)]
TENSOR = [Layout(2, tensor=2), Layout(4, tensor=2, expert=2), Layout(4, tensor=2, sequence=False, reshard=True)]
MTP = {"pattern": "ME/E/E", "mtp_use_repeated_layer": True}
# Recipe, changes of the configuration, recomputation.
VARIANTS = {
    "nvfp4": ("nvfp4", MTP, "none"),
    "fp32": ("fp32", {**MTP, "moe_weight": "before_down", "moe_activation": "swiglu"}, "block"),
    "quartet2": ("quartet2", {"moe_ffn_dim": 128, "moe_latent_dim": 128}, "selective"),
    # So few sums differ with tensor parallelism that no code does.
    "nvfp4_short": ("nvfp4", {"pattern": "-E", "moe_latent_dim": 0}, "none"),
}
Result = tuple[list[float], list[float], dict[str, Tensor], Counter[str], dict[str, LinearMeasurement]]


def trained(rank: int, layout: Layout, variant: str) -> Result:
    """Losses and norms of two steps; gradients of the first one, and weights; digests of the operands of all quantized
    GEMMs of this rank in the first one; and what a probe measures in the second."""
    (recipe, changes, recompute), mesh, step_state = VARIANTS[variant], layout.mesh(), StepState(seed=11)
    config, execution = replace(CONFIG, **changes), Execution(recompute=recompute)
    model, controller = controlled_model(mesh, RECIPES[recipe], step_state, config, execution=execution)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, eps=1e-5))
    gradients, codes = dict[str, Tensor](), Counter[str]()

    def keep_gradients(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(f"gradient of {name}", whole(parameter.grad))

    def keep_codes(*operands: GemmOperand) -> None:
        if step_state.step == 0 and operands[0].quantized:
            tensors = [t for one in operands for t in operand(one) if t is not None]
            codes[hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in tensors)).hexdigest()] += 1

    optimizer.register_step_pre_hook(keep_gradients)
    with watched_gemms(keep_codes):
        steps = [train_step(model, optimizer, masked_micro_batches(0, mesh), mesh, step_state, step=0)]
        model.blocks[1].mixer.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))  # no token for two of four experts
        with Probe(once=False).attached(controller.linears) as probe:
            steps.append(train_step(model, optimizer, masked_micro_batches(1, mesh), mesh, step_state, step=1))
    found = probe.collect(list(controller.linears))
    experts = local(model.blocks[1].mixer.experts_up.weight)
    assert len(experts) <= CONFIG.moe_num_experts // (layout.expert * layout.tensor)
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return [s.loss for s in steps], [s.grad_norm for s in steps], gradients | weights, codes, found


@pytest.fixture(scope="module")
def runs() -> dict[tuple[Layout, str], list[Result]]:
    """(layout, variant) -> the results of each rank."""
    of_all = [(layout, variant) for layout in (ONE, MIXED) for variant in VARIANTS]
    of_tensor = [(layout, variant) for layout in TENSOR for variant in ("fp32", "nvfp4_short")]
    return launch_each(trained, *of_all, *of_tensor, *((layout, "nvfp4") for layout in LAYOUTS if layout != MIXED))


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_on_several_ranks_train_like_those_on_one(runs, variant: str) -> None:
    """Ranks together have just the codes of one: of expert, micro-batch and GEMM."""
    [(losses, norms, tensors, codes, measured)] = runs[ONE, variant]
    assert bool(codes) == (variant != "fp32")
    for of_ranks in (runs[layout, variant] for layout in (LAYOUTS if variant == "nvfp4" else [MIXED])):
        assert sum((rank[3] for rank in of_ranks), Counter()) == codes
        for other_losses, other_norms, other_tensors, _, found in of_ranks:
            for linear, of in measured.items():
                for slot, statistics in of.operands.items():
                    assert found[linear].operands[slot] == pytest.approx(statistics, rel=0.01, abs=0.01), linear
                assert found[linear].products.keys() == of.products.keys()
            assert other_losses[0] == pytest.approx(losses[0], rel=1e-12)
            assert other_losses == pytest.approx(losses, rel=1e-5)
            assert other_norms == pytest.approx(norms, rel=1e-5)
            for name, tensor in tensors.items():
                assert relative_error(other_tensors[name], tensor) < 1e-5, name


@pytest.mark.parametrize("variant", ["fp32", "nvfp4_short"])
def test_tensor_parallel_ranks_divide_the_experts(runs, variant: str) -> None:
    """In the second step, one of two ranks has no token. One other code would change a gradient by 1e-4 or more."""
    [(losses, norms, tensors, _, _)] = runs[ONE, variant]
    for of_ranks in (runs[layout, variant] for layout in TENSOR):
        for other_losses, other_norms, other_tensors, _, _ in of_ranks:
            assert other_losses == pytest.approx(losses, rel=1e-6)
            assert other_norms == pytest.approx(norms, rel=1e-5)
            for name, tensor in tensors.items():
                limit = 1e-5 if name.startswith("gradient") else 1e-4  # Adam's steps are as large for small gradients
                assert relative_error(other_tensors[name], tensor) < limit, name
