"""What linears and loss allocate on a GPU, counted by hand from the kernels' operands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.config.compose import compose_config
from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.planning.ledger import Ledger
from megatron_fp4.planning.stand_ins import shapes_only
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.linear_call import LinearContext
from megatron_fp4.precision.recipe import Operand, Recipe, recipe_from_config
from tests.recipes import changed
from tests.training.harness import alone

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS, IN, OUT = 1024, 512, 2048
X, Y, W = TOKENS * IN, TOKENS * OUT, OUT * IN  # elements
SMALL = 64 * 1024  # maxima, hashes of rows and columns, tensor scales: everything that is no matrix


def recipe(name: str, **changes: object) -> Recipe:
    return changed(recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision), **changes)


def power_of_two() -> Recipe:
    operands = recipe("fp8_block").operands.items()
    return recipe("fp8_block", **{place.name: replace(op, power_of_two_scales=True) for place, op in operands})


FOUR_OVER_SIX = Operand("nvfp4", (16, 16), four_over_six=True)
# Name -> recipe, bytes of the weight's operands, bytes of x that wait for wgrad, bytes of x as wgrad's operand.
CASES = {
    "bf16": (recipe("bf16"), 0, 0, 0),
    # One code of W in BF16 for both passes; of x half a byte an element and an E4M3 scale for 16.
    "nvfp4": (recipe("nvfp4"), 2 * W, X // 2 + X // 16, 2 * X),
    "nvfp4_all_the_way": (recipe("nvfp4_all_the_way"), 4 * W, X // 2 + X // 16, 2 * X),
    # Weights by PyTorch, everything else by the kernels.
    "four_over_six": (
        recipe("nvfp4", fprop_weight=FOUR_OVER_SIX, dgrad_weight=FOUR_OVER_SIX), 2 * W, X // 2 + X // 16, 2 * X
    ),
    "mxfp4": (recipe("mxfp4"), 4 * W, X // 2 + X // 32, 2 * X),
    # The two weights in BF16; of x one byte, and a scale for 32.
    "mxfp8": (recipe("mxfp8"), 4 * W, X + X // 32, 2 * X),
    # E4M3 codes as BF16 with FP32 scales; of x one byte, and a scale for 128.
    "fp8": (recipe("fp8_block"), 2 * W + W // 4096, X + X // 32, 2 * X),
    "fp8_power_of_two": (power_of_two(), 2 * W, 2 * X, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_linear(name: str) -> None:
    recipe, weights, kept, wgrad_operand = CASES[name]
    context = LinearContext(name="linear", recipe=recipe, clock=RunClock(seed=0))
    with FakeTensorMode(), Ledger(lambda: 0) as ledger, shapes_only():
        x = torch.empty(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
        weight = nn.Parameter(torch.empty(OUT, IN, dtype=torch.bfloat16))
        before = ledger.live_bytes
        y = quantized_linear(x, weight, context)
        assert ledger.live_bytes - before == pytest.approx(2 * Y + weights + kept, abs=SMALL)

        dy = torch.empty_like(y)
        ledger.restart_peak()
        before = ledger.live_bytes
        y.backward(dy)
        # dx beside dy for dgrad; then dx and dW beside dy for wgrad and x for wgrad: dy is made twice, in turns.
        quantized = 2 * Y if recipe.quantized else 0
        most = max(quantized + 2 * X, 2 * X + quantized + wgrad_operand + 4 * W)
        assert ledger.peak_bytes - before == pytest.approx(most, abs=SMALL)
        assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss(fused: bool) -> None:
    vocab, hidden, tokens = 4096, 64, 512
    with alone() as mesh, FakeTensorMode(), Ledger(lambda: 0) as ledger, shapes_only():
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = nn.Parameter(torch.empty(vocab, hidden, dtype=torch.bfloat16))
        targets = torch.empty(tokens, dtype=torch.int64)
        before = ledger.live_bytes
        loss = head_cross_entropy(x, weight, targets, 0, mesh, fused=fused, chunk_tokens=tokens)
        # dx and dW wait in FP32, as on CUDA; in between the logits, in FP32 once more without the kernel.
        gradients = 4 * tokens * hidden + 4 * vocab * hidden
        assert ledger.live_bytes - before == pytest.approx(gradients, abs=SMALL)
        logits = tokens * vocab * (2 if fused else 6)
        most = max(gradients + 2 * tokens * vocab, 4 * tokens * hidden + logits)
        assert ledger.peak_bytes - before == pytest.approx(most, abs=SMALL)
        loss.backward()
        assert x.grad is not None and weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_one_chunk_of_logits_at_a_time(fused: bool) -> None:
    vocab, hidden, tokens, chunk = 4096, 64, 512, 128
    with alone() as mesh, FakeTensorMode(), Ledger(lambda: 0) as ledger, shapes_only():
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = nn.Parameter(torch.empty(vocab, hidden, dtype=torch.bfloat16))
        targets = torch.empty(tokens, dtype=torch.int64)
        before = ledger.live_bytes
        head_cross_entropy(x, weight, targets, 0, mesh, fused=fused, chunk_tokens=chunk)
        most = 4 * tokens * hidden + 4 * vocab * hidden + chunk * vocab * (2 if fused else 6)
        assert ledger.peak_bytes - before == pytest.approx(most, abs=SMALL)


def test_nothing_is_left_replaced() -> None:
    device = torch.cuda.device
    with FakeTensorMode(), shapes_only():
        assert torch.empty(1).is_cuda
    assert not torch.empty(1).is_cuda
    assert torch.empty(1).data_ptr() != 0
    assert torch.cuda.device is device
