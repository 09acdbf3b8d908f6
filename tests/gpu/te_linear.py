"""Our linear against Transformer Engine's own, on one GPU of compute capability 9.0 or 10.x.

    FP8 blocks       the backend transformer_engine against `te.Linear` under `Float8BlockScaling`, with power-of-two
                     scales and (9.0 only) FP32 scales: y, dx and dW (rounded to BF16) bit for bit
    NVFP4            the backend emulated against `te.Linear` under `CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory)`,
                     which is Transformer Engine's own reference (it rounds to nearest, so dy does here too): codes,
                     block scales and maxima of all operands bit for bit, products to the order of accumulation

The two Hadamard transforms add up 16 products in different orders, and where the sum is no FP32 number they may round
to BF16 differently. Such elements are counted; they must be one BF16 number apart, or where the 16 nearly cancel no
farther than FP32 sums of them can be, and fewer than one in 10^4. Codes of the transformed tensors are compared on the
*same* transform, Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearCall, LinearContext, quantized_linear
from megatron_fp4.precision.recipe import SLOTS_OF, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.precision.verify import difference, operand_fault
from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.hadamard import random_hadamard_transform

_X, _W = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16))
NVFP4 = Recipe("nvfp4, to nearest", Gemm(_X, _W), Gemm(_X, _W), Gemm(_X, _X, 16))


def _fp8(power_of_two: bool) -> Recipe:
    x, w = (Operand("fp8", block, power_of_two_scales=power_of_two) for block in ((1, 128), (128, 128)))
    return Recipe(f"fp8{', powers of two' if power_of_two else ''}", Gemm(x, w), Gemm(x, w), Gemm(x, x))


FP8, FP8_FP32_SCALES = _fp8(True), _fp8(False)
# Largest relative error of products that differ in the order of accumulation: BF16 results are rounded to 2^-9.
ACCUMULATION = {"y": 2e-3, "dx": 2e-3, "dW": 3e-3}


@dataclass
class Comparison:
    """One linear against one peer. differences: what should be equal and is not; errors: of products, relative;
    transformed, moved: elements that were transformed, and those of them that rounded to a neighbour."""

    differences: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    transformed: int = 0
    moved: int = 0

    def note(self, what: str, fault: str) -> None:
        """Keep a difference, if there is one."""
        if fault:
            self.differences[what] = fault

    @property
    def agrees(self) -> bool:
        """Nothing differs that should not."""
        accurate = all(error <= ACCUMULATION[name] for name, error in self.errors.items())
        return not self.differences and accurate and self.moved <= 1e-4 * self.transformed


def ours(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, backend: Backend) -> dict[str, Tensor]:
    """y, dx and dW (FP32) of our linear on BF16 x [tokens, in], W [out, in], dy [tokens, out]."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = quantized_linear(x, w, LinearContext("compared", recipe, StepState(seed=0), backend))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dW": w.grad}


def theirs(x: Tensor, w: Tensor, dy: Tensor, recipe: Any) -> dict[str, Tensor]:
    """The same of `te.Linear` under one of its recipes; dW is BF16."""
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


def compare_fp8(x: Tensor, w: Tensor, dy: Tensor, *, power_of_two: bool = True) -> Comparison:
    """The backend transformer_engine against `Float8BlockScaling`; sizes must be multiples of 128."""
    found = Comparison()
    mine = ours(x, w, dy, FP8 if power_of_two else FP8_FP32_SCALES, TransformerEngineBackend())
    peer = theirs(x, w, dy, _block_scaling(power_of_two))
    for name in mine:
        found.note(name, difference(mine[name].to(torch.bfloat16), peer[name].to(torch.bfloat16)))
    return found


def _block_scaling(power_of_two: bool) -> Any:
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    class Fp32Scales(Float8BlockScaling):
        fp8_quant_fwd_inp = QParams(power_2_scale=False, amax_epsilon=0.0)
        fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.0)
        fp8_quant_bwd_grad = QParams(power_2_scale=False, amax_epsilon=0.0)

    return Float8BlockScaling() if power_of_two else Fp32Scales()


@contextmanager
def recorded_references() -> Iterator[list[dict[str, Tensor]]]:
    """What Transformer Engine's reference quantizer returns inside: of the input, the weight and the gradient."""
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


def compare_nvfp4(x: Tensor, w: Tensor, dy: Tensor) -> Comparison:
    """The emulated backend against Transformer Engine's NVFP4 reference; sizes must be multiples of 32."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory

    found = Comparison()
    mine = ours(x, w, dy, NVFP4, EMULATED)
    with recorded_references() as seen:
        peer = theirs(x, w, dy, CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory))
    assert len(seen) == 3, f"the reference quantized {len(seen)} tensors, not x, W and dy"
    call = LinearCall(LinearContext("compared", NVFP4, StepState(seed=0)), w, x)
    tensors = {"x": (x, "activation"), "W": (w, "weight"), "dy": (dy, "gradient")}
    for (name, (tensor, role)), reference in zip(tensors.items(), seen, strict=True):
        columns, rows = SLOTS_OF[role]
        turned = tensor.t().contiguous()
        if NVFP4.gemms[rows.gemm].rht:
            turned = random_hadamard_transform(turned, 16)
            steps = (_ordinal(turned) - _ordinal(reference["transformed"])).abs()
            found.transformed += steps.numel()
            found.moved += int((steps > 0).sum())
            other = reference["transformed"].float()
            apart = (turned.float() - other).abs() - other.abs() * 2.0**-7  # beyond one BF16 number
            if (far := (steps > 1) & (apart > _sum_error(tensor.t()))).any():
                found.differences[f"{name} transformed"] = f"is {int(steps[far].amax())} BF16 numbers away"
        makers = call.prepare(columns, rows, tensor)
        for source, same, suffix, amax, make, slot in (
            (tensor, tensor, "", "global_amax_row", makers[0], columns),
            (tensor.t(), reference["transformed"], "_t", "global_amax_col", makers[1], rows),
        ):
            quantized = quantize_nvfp4(same, NVFP4[slot].block)
            parts = {
                "codes": (quantized.codes, reference[f"data{suffix}"]),
                "scales": (quantized.scales, reference[f"scale{suffix}"]),
                "amax": (quantized.amax.view(1), reference[amax].view(1)),
            }
            assert make is not None
            found.note(f"{name} {slot.name} emulated", operand_fault(make(), source, call.request(slot)))
            for part, (actual, expected) in parts.items():
                found.note(f"{name} {slot.name} {part}", difference(actual, expected.view(actual.dtype)))
    for name, product in peer.items():
        exact = product.to(torch.float64)
        rounded = mine[name].to(torch.bfloat16).to(torch.float64)
        found.errors[name] = ((rounded - exact).norm() / exact.norm()).item()
    return found


def _sum_error(x: Tensor) -> Tensor:
    """FP32 [n, k]: how far two FP32 sums of the 16 products in an element's transform can be apart."""
    terms = x.float().abs().unflatten(-1, (-1, 16)).sum(-1) / 4
    return (terms * 15 * 2.0**-23).repeat_interleave(16, dim=-1)


def _ordinal(t: Tensor) -> Tensor:
    """Consecutive integers for consecutive BF16 numbers."""
    bits = t.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
