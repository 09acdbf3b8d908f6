"""The backend `torch` against the emulation: operands bit for bit, products to the order of accumulation.

No chip here multiplies such codes: the GEMM is one that decodes its arguments (tests/quantization/cublas.py).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import torch_scaled_mm as backend
from megatron_fp4.precision import verify
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EMULATED, EmulatedBackend
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.torch_scaled_mm import PackedOperand, TorchBackend
from megatron_fp4.precision.verify import Case
from tests.precision import reference as ref
from tests.quantization import cublas
from tests.recipes import changed

NVFP4, MXFP8 = ref.NVFP4, ref.MXFP8
MX8_2D = Operand("mxfp8", (32, 32))
SIX, SIX2 = replace(ref.X, four_over_six=True), replace(ref.W2, four_over_six=True)
RECIPES = {
    "nvfp4": NVFP4,
    "fresh signs": replace(NVFP4, rht_signs="fresh"),
    "transforms in all": changed(NVFP4, fprop_rht=16, dgrad_rht=16, fprop_weight=ref.W, dgrad_weight=ref.W),
    "four over six": changed(NVFP4, fprop_activation=SIX, fprop_weight=SIX2, dgrad_weight=SIX2, wgrad_activation=SIX),
    "quartet 2": ref.QUARTET2,
    "other weight blocks in dgrad": changed(NVFP4, fprop_weight=ref.W),
    "all the way": ref.ALL_THE_WAY,
    "forward only": ref.QAF,
    "backward only, stochastic weights": Recipe("", dgrad=Gemm(ref.DY, replace(ref.W2, rounding=ref.SR))),
    "mxfp8, square weights": changed(MXFP8, fprop_weight=MX8_2D, dgrad_weight=MX8_2D),
    "mxfp8, transforms": changed(MXFP8, fprop_rht=16, dgrad_rht=32, wgrad_rht=64),
    "nvfp4 forward, mxfp8 backward": changed(MXFP8, fprop_activation=ref.X, fprop_weight=ref.W2),
    "bf16": BF16,
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(backend, "scaled_mm", cublas.scaled_mm)


class Recorded:
    """A backend that keeps the operands of every GEMM, as (code * block scale, tensor scale)."""

    def __init__(self, inner: EmulatedBackend | TorchBackend) -> None:
        self.inner, self.gemms = inner, []
        self.accumulates = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gemm(self, a, b, out_dtype: torch.dtype, total=None, rows=None) -> Tensor:
        self.gemms.append([_numbers(operand) for operand in (a, b)])
        return self.inner.gemm(a, b, out_dtype, total, rows)


def _numbers(operand) -> tuple[Tensor, Tensor | None]:
    return operand.unpacked().float() + 0.0, operand.scale  # the emulation does not keep the sign of a zero


def compare(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    """Run one linear by both backends; the operands of all GEMMs must be equal, and the products nearly."""
    x, w, dy = ref.tensors(*shape)
    x, dy = x.bfloat16(), dy.bfloat16()
    emulation, packed = Recorded(EMULATED), Recorded(TorchBackend())
    ref.run(x, w, dy, ref.context_of(recipe, backend=emulation))
    found = ref.run(x, w, dy, ref.context_of(recipe, backend=packed))
    assert len(packed.gemms) == len(emulation.gemms) == 3
    for mine, theirs in zip(packed.gemms, emulation.gemms, strict=True):
        for (values, scale), (right, right_scale) in zip(mine, theirs, strict=True):
            assert torch.equal(values, right)
            assert (scale is None and right_scale is None) or torch.equal(scale, right_scale)
    expected = ref.specified(x, w, dy, ref.context_of(recipe))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_the_emulations_and_products_agree(name):
    for shape in ((48, 80, 208), (37, 16, 9)):
        compare(RECIPES[name], inputs_for(RECIPES[name], shape))


def inputs_for(recipe: Recipe, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """With input features, which are not padded, that the recipe takes."""
    inputs = EMULATED.alignment(recipe).inputs
    return shape[0], -(-shape[1] // inputs) * inputs, shape[2]


@pytest.mark.parametrize("operand, columns", [(ref.X, 48), (ref.X, 64), (ref.MX8, 64)], ids=str)
def test_codes_are_the_quantizers_and_filled_up_with_zeros(operand, columns):
    x = torch.randn(160, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[32:64, 8:16], x[0, 0], x[1, 5], x[2, 9] = -1e-30, -0.0, 1000, 3e-39
    expected = operand.encode(x.float())
    made = TorchBackend().operands(x, OperandRequest(operand), None)[0]()
    assert torch.equal(made.decoded().codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(made.decoded().scales.view(torch.uint8), expected.scales.view(torch.uint8))
    size, whole = x.shape[1] // made.form.per_byte, -(-x.shape[1] // 32) * 32 // made.form.per_byte
    assert made.codes.shape == (160, whole) and not made.codes[:, size:].any()
    codes = made.codes if made.form.per_byte == 2 else made.codes.view(torch.float8_e4m3fn)
    assert torch.equal(cublas.decoded(codes, made.scales)[:, : x.shape[1]], made.unpacked())


def faults(name: str) -> list[str]:
    case = Case(*inputs_for(RECIPES[name], (64, 96, 120)), 3, RECIPES[name])
    return [str(finding) for finding in verify.check(TorchBackend(), case, torch.device("cpu")) if finding.fault]


@pytest.mark.parametrize("name", ["nvfp4", "quartet 2", "mxfp8, square weights"])
def test_the_self_test_passes(name):
    assert faults(name) == []


def swapped_nibbles(operand: PackedOperand) -> PackedOperand:
    return replace(operand, codes=(operand.codes >> 4) | (operand.codes << 4))


def plain_scales(operand: PackedOperand) -> PackedOperand:
    scales = torch.zeros_like(operand.scales.view(torch.uint8))
    plain = operand.decoded().scales.view(torch.uint8).flatten()
    scales[: plain.numel()] = plain
    return replace(operand, scales=scales.view(operand.scales.dtype))


def encode_scale(operand: PackedOperand) -> PackedOperand:
    return replace(operand, scale=1 / operand.scale)


@pytest.mark.parametrize(
    ("spoil", "name", "seen"),
    [
        (swapped_nibbles, "nvfp4", "fprop_activation codes: values differ"),
        (swapped_nibbles, "nvfp4", "dgrad_gradient draws: values differ"),
        (plain_scales, "nvfp4", "wgrad_activation codes: values differ"),
        (plain_scales, "mxfp8, square weights", "fprop_weight codes: values differ"),
        (encode_scale, "nvfp4", "fprop_weight codes: tensor scale differ"),
    ],
)
def test_the_self_test_notices(monkeypatch, spoil, name, seen):
    made = PackedOperand.of
    monkeypatch.setattr(PackedOperand, "of", lambda *given: spoil(made(*given)))
    found = faults(name)
    assert any(seen in fault for fault in found), found
