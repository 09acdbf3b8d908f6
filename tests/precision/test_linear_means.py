"""Linears whose operands are without their means over groups of tokens: what that changes, and what it must not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT, Gemm, Operand, Recipe
from tests.precision import reference as ref
from tests.quantization import oracle
from tests.recipes import changed, without_means

GROUPED = replace(ref.MEANS, mean_group=32)


def offset(tokens: int = 128, inputs: int = 64, outputs: int = 48, size: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of which x and dy have means some times as large as their spread."""
    x, w, dy = ref.tensors(tokens, inputs, outputs)
    generator = torch.Generator().manual_seed(1)
    x = x + size * torch.randn(inputs, generator=generator)
    return x, w, dy + 1e-4 * size * torch.randn(outputs, generator=generator)


def errors(recipe: Recipe, tensors: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    exact = ref.linear(*(ref.double(t) for t in tensors), BF16)
    found = ref.run(*tensors, ref.context_of(recipe))
    return [float(np.linalg.norm(ref.double(a) - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]


def test_what_tokens_have_in_common_costs_nothing():
    """Larger means, the same error beside them in absolute terms; kept, the error grows with them."""
    small, large = offset(size=0.0), offset(size=16.0)
    only_x = changed(GROUPED, dgrad_gradient=ref.DY, wgrad_gradient=ref.DY)
    # W's own error is the same with either: take it out.
    plain, removed = (
        changed(recipe, fprop_weight=Operand(), dgrad_weight=Operand()) for recipe in (ref.NVFP4, GROUPED)
    )
    of_large = np.array(errors(removed, large)) / errors(plain, large)
    assert (of_large < 0.15).all()
    of_small = np.array(errors(removed, small)) / errors(plain, small)
    assert (of_small > 0.9).all() and (of_small < 1.1).all()
    assert errors(only_x, large)[2] < 0.5 * errors(ref.NVFP4, large)[2]


def test_tokens_that_are_all_alike_have_no_error_but_the_weights():
    x = torch.randn(64, generator=torch.Generator().manual_seed(2)).expand(64, 64)
    w, dy = ref.tensors(64, 64, 64)[1], torch.full((64, 64), 1e-4)
    y, dx, dw = ref.run(x, w, dy, ref.context_of(GROUPED))
    w_quantized = torch.from_numpy(ref.decoded(ref.double(w), GROUPED[FPROP_WEIGHT])).float()
    torch.testing.assert_close(y, x @ w_quantized.t())
    torch.testing.assert_close(dx, dy @ w_quantized)
    torch.testing.assert_close(dw, dy.t() @ x)


def test_a_single_token_is_its_own_mean():
    x, w, _ = offset(1)
    w_quantized = torch.from_numpy(ref.decoded(ref.double(w), GROUPED[FPROP_WEIGHT])).float()
    y = quantized_linear(x, w, ref.context_of(GROUPED))
    torch.testing.assert_close(y, x @ w_quantized.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "x alone", "again from codes", "codes of fprop", "in wgrad alone"])
def test_an_input_that_is_kept_gives_the_same_bits(name, dtype):
    again = replace(ref.X_REST, source="forward")
    recipe = {
        "all": GROUPED,
        "x alone": changed(GROUPED, dgrad_gradient=ref.DY, wgrad_gradient=ref.DY),
        "again from codes": changed(GROUPED, wgrad_activation=again),
        "codes of fprop": changed(GROUPED, wgrad_activation=replace(ref.X_REST, reuse_fprop=True), wgrad_rht=0),
        "in wgrad alone": changed(GROUPED, fprop_activation=ref.X, dgrad_gradient=ref.DY),
    }[name]
    x, w, dy = (t.to(dtype) for t in offset(72))
    kept, made = (ref.run(x, w, dy, ref.context_of(recipe, keeps_input=keeps)) for keeps in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))


def test_gradients_of_micro_batches_add_up():
    """Of groups of output features that are padded, as the 12B's in_proj has them."""
    x, w, dy = offset(outputs=3 * 20)
    w = w.requires_grad_()
    context = ref.context_of(GROUPED, num_groups=3)
    parts = [ref.run(x[i : i + 64], w, dy[i : i + 64], context)[2] for i in (0, 64)]
    for i in (0, 64):
        quantized_linear(x[i : i + 64], w, context).backward(dy[i : i + 64])
    assert w.grad is not None
    torch.testing.assert_close(w.grad, parts[0] + parts[1])


def test_codes_do_not_depend_on_the_sequences_beside():
    """But for the tensor's maximum: MXFP4 has none."""
    recipe = without_means(ref.nearest(ref.MXFP4), mean_group=64)
    x, w, dy = offset(128, 64, 64)
    y, dx, _ = ref.run(x, w, dy, ref.context_of(recipe))
    for i in (0, 64):
        alone = ref.run(x[i : i + 64], w, dy[i : i + 64], ref.context_of(recipe))
        torch.testing.assert_close(y[i : i + 64], alone[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dx[i : i + 64], alone[1], rtol=1e-6, atol=1e-10)


def test_gradients_without_their_means_are_unbiased():
    """The mean of dx and dW over steps approaches the exact products."""
    x, w, dy = offset(64, 32, 32)
    recipe = Recipe("dy", dgrad=Gemm(ref.DY_REST), wgrad=Gemm(ref.DY_REST, rht=16), mean_group=32)
    exact = dy @ w, dy.t() @ x
    steps = []
    for step in range(96):
        context = ref.context_of(recipe)
        context.clock.step = step
        steps.append(ref.run(x, w, dy, context)[1:])
    for which in range(2):
        one, mean = steps[0][which], torch.stack([step[which] for step in steps]).mean(0)
        of_one, of_mean = ((found - exact[which]).norm() / exact[which].norm() for found in (one, mean))
        assert of_mean < 0.2 * of_one


def test_the_signal_to_noise_of_gaussians_is_no_worse():
    x, w, dy = ref.tensors(256, 128, 128)
    exact = ref.linear(*(ref.double(t) for t in (x, w, dy)), BF16)
    removed, kept = (ref.run(x, w, dy, ref.context_of(recipe)) for recipe in (ref.MEANS, ref.NVFP4))
    for mine, theirs, full in zip(removed, kept, exact, strict=True):
        assert oracle.snr_db(full, ref.double(mine)) > oracle.snr_db(full, ref.double(theirs)) - 0.1
