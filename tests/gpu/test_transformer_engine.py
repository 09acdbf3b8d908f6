"""This project's linear against Transformer Engine's, on one GPU of compute capability 9.0 or 10.x.

    FP8 blocks       the backend transformer_engine against `te.Linear` under `Float8BlockScaling`, with power-of-two
                     scales and (9.0 only) FP32 scales: y, dx and dW (rounded to BF16) bit for bit; experts against
                     `te.GroupedLinear`, and with any numbers of tokens against the emulation
    NVFP4            the backend emulated against `te.Linear` under `CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory)`,
                     which is Transformer Engine's own reference (it rounds to nearest, so dy does here too): codes,
                     block scales and maxima of all operands bit for bit, products to the order of accumulation

The two Hadamard transforms add 16 products in different orders. If the sum is not exact in FP32, they may round to
different BF16 numbers. These must be neighbours, or, if the products nearly cancel, no farther apart than two FP32 sums
of them can be; and fewer than one element in 10^4 may differ. Codes of transformed tensors are compared on the *same*
transformed tensor, Transformer Engine's.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import verify
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import grouped_linear
from megatron_fp4.precision.operands import LinearCall, LinearContext
from megatron_fp4.precision.recipe import BF16, SLOTS_OF, Gemm, Operand, Recipe, rounded_to_nearest
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.precision.verify import operand_fault
from megatron_fp4.quantization import quantize_nvfp4, random_hadamard_transform
from megatron_fp4.quantization.rounding import WHOLE
from megatron_fp4.quantization.segments import Segments
from tests.gpu.test_linear_cuda import relative
from tests.precision.reference import NVFP4, run

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (9, 0), reason="needs compute capability 9.0 or more"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
SHAPES = [(256, 128, 384), (1024, 512, 2048), (8192, 2048, 1024)]


def fp8(power_of_two: bool) -> Recipe:
    x, w = (Operand("fp8", block, power_of_two_scales=power_of_two) for block in ((1, 128), (128, 128)))
    return Recipe(f"fp8{', powers of two' if power_of_two else ''}", Gemm(x, w), Gemm(x, w), Gemm(x, x))


def tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return verify.sample_tensors(verify.Case(*shape, 1, BF16), torch.device("cuda", 0))  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def backend() -> TransformerEngineBackend:
    return TransformerEngineBackend()


def ours(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, **settings: Any) -> dict[str, Tensor]:
    """y, dx and dW of this project's linear on BF16 tensors, in BF16."""
    made = run(x, w, dy, LinearContext("compared", recipe, StepState(seed=0), **settings))
    return {name: product.to(torch.bfloat16) for name, product in zip(("y", "dx", "dW"), made, strict=True)}


def theirs(x: Tensor, w: Tensor, dy: Tensor, recipe: Any) -> dict[str, Tensor]:
    """The same of `te.Linear` with one of its recipes."""
    import transformer_engine.pytorch as te

    linear = te.Linear(w.shape[1], w.shape[0], bias=False, params_dtype=torch.bfloat16, device=x.device)
    with torch.no_grad():
        linear.weight.copy_(w)
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=True, recipe=recipe):
        y = linear(x)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dW": linear.weight.grad}


def fp8_of_te(power_of_two: bool) -> Any:
    """Its recipe of `fp8`; skips the test on a chip that has none."""
    if unsupported("transformer_engine", fp8(power_of_two), CAPABILITY):
        pytest.skip("not on this chip")
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    class Fp32Scales(Float8BlockScaling):
        fp8_quant_fwd_inp = QParams(power_2_scale=False, amax_epsilon=0.0)
        fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.0)
        fp8_quant_bwd_grad = QParams(power_2_scale=False, amax_epsilon=0.0)

    return Float8BlockScaling() if power_of_two else Fp32Scales()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "FP32 scales"])
def test_fp8_blocks_have_the_bits_of_te_linear(backend, shape, power_of_two) -> None:
    given, peer_recipe = tensors(*shape), fp8_of_te(power_of_two)
    mine = ours(*given, fp8(power_of_two), backend=backend)
    peer = theirs(*given, peer_recipe)
    assert all(torch.equal(mine[name], peer[name].to(torch.bfloat16)) for name in mine)


@pytest.mark.parametrize("counts", [[384, 0, 128, 512], [37, 0, 16, 971]], ids=["whole blocks", "any"])
@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "FP32 scales"])
def test_fp8_experts_have_the_bits_of_te_grouped_linear(backend, power_of_two, counts) -> None:
    import transformer_engine.pytorch as te

    peer_recipe, (x, w, dy) = fp8_of_te(power_of_two), tensors(1024, 512, 2048)
    w, counted = torch.stack([w * 2.0**-expert for expert in range(4)]), torch.tensor(counts)
    segments = Segments.of_experts(counted.to(x.device), torch.arange(1024, device=x.device))
    results = []
    for by in (backend, EMULATED):
        inputs, weight = x.detach().requires_grad_(), w.detach().float().requires_grad_()
        y = grouped_linear(inputs, weight, LinearContext("experts", fp8(power_of_two), backend=by), segments)
        y.backward(dy, retain_graph=True)
        assert inputs.grad is not None and weight.grad is not None
        results.append([y.detach().cpu(), inputs.grad.cpu(), weight.grad.cpu()])
        y.backward(dy)
        results[-1].append(weight.grad.cpu())
    assert all(relative(*pair) < 4e-3 for pair in zip(*results, strict=True)) and not results[0][-1][1].any()
    if not any(count % 128 for count in counts):
        linear = te.GroupedLinear(4, 512, 2048, bias=False, params_dtype=torch.bfloat16, device=x.device)
        for parameter, of_expert in zip(linear.parameters(), w, strict=True):
            parameter.data.copy_(of_expert)
        inputs = x.detach().requires_grad_()
        with te.autocast(enabled=True, recipe=peer_recipe):
            y = linear(inputs, counted)
        y.backward(dy)
        peers = y, inputs.grad, torch.stack([parameter.grad for parameter in linear.parameters()])
        for mine, peer in zip(results[0], peers, strict=False):
            assert peer is not None and torch.equal(mine.bfloat16(), peer.cpu())


@contextmanager
def recorded_references() -> Iterator[list[dict[str, Tensor]]]:
    """The results of Transformer Engine's reference quantizer inside: for the input, the weight and the gradient."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    seen: list[dict[str, Tensor]] = []
    quantize, transform = NVFP4QuantizerRef.quantize, NVFP4QuantizerRef._apply_rht
    names = ("data", "scale", "global_amax_row", "data_t", "scale_t", "global_amax_col")
    last: list[Tensor] = []

    def quantizing(self: Any, tensor: Tensor, **kwargs: Any) -> Any:
        last.clear()
        made = quantize(self, tensor, **kwargs)
        seen.append({name: getattr(made, name) for name in names})
        seen[-1]["transformed"] = last[0] if last else tensor.t().contiguous()
        return made

    def transforming(self: Any, x: Tensor) -> Tensor:
        last.append(transform(self, x))
        return last[-1]

    with mock.patch.multiple(NVFP4QuantizerRef, quantize=quantizing, _apply_rht=transforming):
        yield seen


def ordinal(t: Tensor) -> Tensor:
    """Consecutive integers for consecutive BF16 numbers."""
    bits = t.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def check_transform(x: Tensor, other: Tensor) -> None:
    """Compare this project's transform of x [n, k] with `other`, Transformer Engine's."""
    transformed = random_hadamard_transform(x, 16)
    steps = (ordinal(transformed) - ordinal(other)).abs()
    # The largest difference between two FP32 sums of the 16 products in an element's transform.
    magnitudes = x.float().abs().unflatten(-1, (-1, 16)).sum(-1) / 4
    limit = (magnitudes * 15 * 2.0**-23).repeat_interleave(16, dim=-1)
    excess = (transformed.float() - other.float()).abs() - other.float().abs() * 2.0**-7  # above one BF16 step
    assert not ((steps > 1) & (excess > limit)).any()
    assert (steps > 0).double().mean() <= 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_emulation_has_the_bits_of_te_nvfp4_reference(shape) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory

    recipe, (x, w, dy) = rounded_to_nearest(NVFP4), tensors(*shape)
    mine = ours(x, w, dy, recipe)
    with recorded_references() as seen:
        peer = theirs(x, w, dy, CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory))
    assert len(seen) == 3, f"the reference quantized {len(seen)} tensors, not x, W and dy"
    call = LinearCall(LinearContext("compared", recipe, StepState(seed=0)), w, x)
    given = {"activation": x, "weight": w, "gradient": dy}
    for (name, tensor), reference in zip(given.items(), seen, strict=True):
        columns, rows = SLOTS_OF[name]
        if recipe.gemms[rows.gemm].rht:
            check_transform(tensor.t().contiguous(), reference["transformed"])
        makers = call.operand_makers(tensor, columns, rows)
        for source, transformed, suffix, amax, make, slot in (
            (tensor, tensor, "", "global_amax_row", makers[0], columns),
            (tensor.t(), reference["transformed"], "_t", "global_amax_col", makers[1], rows),
        ):
            made = quantize_nvfp4(transformed, recipe[slot].block)
            assert make is not None
            assert operand_fault(make(), source, WHOLE, call.request(slot)) == ""
            parts = (made.codes, f"data{suffix}"), (made.scales, f"scale{suffix}"), (made.amax.view(1), amax)
            for actual, part in parts:
                expected = reference[part].view(1) if part == amax else reference[part]
                assert verify.difference(f"{slot.name} {part}", actual, expected.view(actual.dtype)) == ""
    # Products differ in the order of accumulation, and BF16 results are rounded to 2^-9.
    for (name, product), bound in zip(peer.items(), (2e-3, 2e-3, 3e-3), strict=True):
        expected = product.double()
        assert (mine[name].double() - expected).norm() <= bound * expected.norm(), name


@pytest.mark.parametrize("recipe", [fp8(True), fp8(False), NVFP4], ids=lambda recipe: recipe.name)
def test_native_kernels_pass_the_self_test(backend, recipe) -> None:
    if reason := unsupported("transformer_engine", recipe, CAPABILITY):
        pytest.skip(reason)
    for shape, experts in ((SHAPES[0], False), (SHAPES[1], False), (SHAPES[1], True)):
        case = verify.Case(*shape, 1, recipe, experts=experts)
        assert [str(f) for f in verify.check(backend, case, torch.device("cuda", 0)) if f.fault] == []
