"""The linear layer on a GPU against the same layer on the CPU: operands bit for bit, products to rounding."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_fp4.precision.gemm_cuda as gemm_cuda
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from tests.recipes import changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SR = "stochastic"
X, W2, DY = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16)), Operand("nvfp4", (1, 16), SR)
NVFP4 = Recipe("nvfp4", Gemm(X, W2), Gemm(DY, W2), Gemm(DY, X, 16))
MX, MX2, MX_DY = Operand("mxfp4", (1, 32)), Operand("mxfp4", (32, 32)), Operand("mxfp4", (1, 32), SR)
M8, M8_W = Operand("mxfp8", (1, 32)), Operand("mxfp8", (32, 32))
F8, F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
F8P, F8P_W = (replace(operand, power_of_two_scales=True) for operand in (F8, F8_W))
SIX = replace(X, four_over_six=True)
SIX_SQUARED = replace(SIX, four_over_six_error="squared")
EDEN, AGAIN = replace(X, rounding="ms_eden"), replace(X, source="forward")
EDEN_AGAIN = replace(EDEN, source="forward")
QUARTET2 = Recipe(
    "quartet2", Gemm(SIX_SQUARED, SIX_SQUARED), Gemm(EDEN, EDEN_AGAIN, 128), Gemm(EDEN, EDEN_AGAIN, 128), "fresh"
)
RECIPES = {
    "bf16": BF16,
    "nvfp4": NVFP4,
    "nvfp4, fresh signs": replace(NVFP4, rht_signs="fresh"),
    "nvfp4, no signs": replace(NVFP4, rht_signs="none"),
    "nvfp4, rht 64": changed(NVFP4, wgrad_rht=64),
    "nvfp4, rht in all": changed(NVFP4, fprop_rht=16, dgrad_rht=16, fprop_weight=X, dgrad_weight=X),
    "nvfp4, 1x16 weights": changed(NVFP4, fprop_weight=X, dgrad_weight=X),
    "nvfp4, four over six": changed(NVFP4, fprop_activation=SIX, wgrad_activation=SIX),
    "nvfp4, codes of fprop": changed(NVFP4, wgrad_rht=0, wgrad_activation=replace(X, source="codes")),
    "nvfp4 forward only": changed(BF16, fprop_activation=X, fprop_weight=W2),
    "nvfp4 backward only": changed(NVFP4, fprop_activation=Operand(), fprop_weight=Operand()),
    "all the way": Recipe("all_the_way", Gemm(X, X), Gemm(DY, X), Gemm(DY, DY)),
    "mxfp4": Recipe("mxfp4", Gemm(MX, MX), Gemm(MX_DY, MX), Gemm(MX_DY, MX, 32)),
    "mxfp4, 32x32 weights": Recipe("mxfp4", Gemm(MX, MX2), Gemm(MX_DY, MX2), Gemm(MX_DY, MX, 32)),
    "mxfp8": Recipe("mxfp8", Gemm(M8, M8), Gemm(M8, M8), Gemm(M8, M8)),
    "mxfp8, 32x32 weights": Recipe("mxfp8", Gemm(M8, M8_W), Gemm(M8, M8_W), Gemm(M8, M8)),
    "mxfp8, 32x32 activations": Recipe("mxfp8", Gemm(M8_W, M8), Gemm(M8, M8), Gemm(M8, M8_W)),
    "mxfp8, codes of fprop": Recipe("mxfp8", Gemm(M8, M8), Gemm(M8, M8), Gemm(M8, replace(M8, source="codes"))),
    "mxfp8, rht": Recipe("mxfp8", Gemm(M8, M8), Gemm(M8, M8), Gemm(M8, M8, 32)),
    "mxfp8 and nvfp4": changed(NVFP4, fprop_activation=M8, fprop_weight=M8, dgrad_weight=M8),
    "fp8": Recipe("fp8", Gemm(F8, F8_W), Gemm(F8, F8_W), Gemm(F8, F8)),
    "fp8, powers of two": Recipe("fp8", Gemm(F8P, F8P_W), Gemm(F8P, F8P_W), Gemm(F8P, F8P)),
    "quartet 2": QUARTET2,
    "quartet 2, from tensors": changed(QUARTET2, dgrad_weight=EDEN, wgrad_activation=EDEN),
    "codes quantized again": changed(NVFP4, fprop_weight=SIX, dgrad_weight=AGAIN, wgrad_activation=AGAIN),
    "mixed formats": changed(NVFP4, fprop_activation=MX, fprop_weight=MX2, dgrad_weight=MX2, dgrad_gradient=MX_DY),
}


def tensors(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + inputs + outputs)
    x, dy = (torch.randn(tokens, n, generator=generator).bfloat16() for n in (inputs, outputs))
    x[:, ::7] *= 20
    return x, torch.randn(outputs, inputs, generator=generator) * inputs**-0.5, dy * 1e-4


def context_of(recipe: Recipe, **settings) -> LinearContext:
    return LinearContext(name="blocks.0.mixer.in_proj", recipe=recipe, step_state=StepState(seed=1, step=3), **settings)


def run(x: Tensor, w: Tensor, dy: Tensor, context: LinearContext) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = quantized_linear(x, w, context)
    y.backward(dy)
    assert w.grad is not None and w.grad.dtype == torch.float32
    return y.detach(), x.grad, w.grad


@contextmanager
def recorded(gemms: list):
    """Keep the operands of every GEMM inside."""
    original = EmulatedBackend.gemm

    def recording(backend, a, b, *others):
        gemms.append([(of.unpacked().cpu(), None if of.scale is None else of.scale.cpu()) for of in (a, b)])
        return original(backend, a, b, *others)

    with mock.patch.object(EmulatedBackend, "gemm", recording):
        yield


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32 weight", "bf16 weight"])
@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_the_same_bits_as_on_the_cpu_and_products_agree(name, weight_dtype):
    x, w, dy = tensors(128, 384, 256)
    w = w.to(weight_dtype)
    on_cpu, on_gpu = [], []
    with recorded(on_cpu):
        expected = run(x, w, dy, context_of(RECIPES[name]))
    with recorded(on_gpu):
        actual = run(x.cuda(), w.cuda(), dy.cuda(), context_of(RECIPES[name]))
    assert len(on_cpu) == len(on_gpu) == 3
    for cpu_gemm, gpu_gemm in zip(on_cpu, on_gpu, strict=True):
        for (values, scale), (gpu_values, gpu_scale) in zip(cpu_gemm, gpu_gemm, strict=True):
            assert torch.equal(values, gpu_values)
            assert (scale is None and gpu_scale is None) or torch.equal(scale, gpu_scale)
    # y and dx are rounded to BF16; where the order of accumulation decides, by one unit.
    for (mine, theirs), bound in zip(zip(actual, expected, strict=True), (1e-3, 1e-3, 2e-6), strict=True):
        assert mine.dtype == theirs.dtype
        assert relative(mine, theirs) < bound


@pytest.mark.parametrize("recipe", [NVFP4, RECIPES["mxfp8"]], ids=["nvfp4", "mxfp8"])
def test_a_non_finite_value_never_disappears(recipe):
    for value in (float("nan"), float("inf")):
        for broken in range(3):
            given = [tensor.cuda() for tensor in tensors(64, 64, 64)]
            given[broken][5, 7] = value
            y, dx, dw = run(*given, context_of(recipe))
            assert not y.isfinite().all() or broken == 2
            assert not dx.isfinite().all() or broken == 0
            assert not dw.isfinite().all() or broken == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left, right", [(False, False), (False, True), (True, False), (True, True)])
def test_scaled_matmul(left, right, dtype):
    # Small integers: every sum is exact, so the two ways of scaling must agree in every bit.
    a = torch.randint(-8, 9, (160, 336), device="cuda").bfloat16()
    b = torch.randint(-8, 9, (336, 208), device="cuda").bfloat16()
    a = a.t().contiguous().t() if left else a
    b = b.t().contiguous().t() if right else b
    alpha = torch.tensor(0.1234567, device="cuda")
    expected = (torch.mm(a, b, out_dtype=torch.float32) * alpha).to(dtype)
    assert torch.equal(gemm_cuda.scaled_matmul(a, b, alpha, dtype), expected)
    with mock.patch.object(gemm_cuda, "_cublas", lambda: None):
        assert torch.equal(gemm_cuda.scaled_matmul(a, b, alpha, dtype), expected)
    assert torch.equal(gemm_cuda.scaled_matmul(a, b, None, dtype), torch.mm(a, b, out_dtype=torch.float32).to(dtype))
    assert torch.equal(torch.mm(a, b), (a.float() @ b.float()).bfloat16())  # the handle is left as PyTorch had it


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("rows", [None, RowGroups(48, 36), RowGroups(160, 160)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_matmul_adds_and_leaves_padding_out(dtype, rows, left):
    a = torch.randint(-8, 9, (480, 336), device="cuda").bfloat16()
    b = torch.randint(-8, 9, (336, 208), device="cuda").bfloat16()
    a = a.t().contiguous().t() if left else a
    alpha = torch.tensor(0.25, device="cuda")
    product = torch.mm(a, b, out_dtype=torch.float32) * alpha
    product = product if rows is None else rows.of(product)
    before = torch.randint(-8, 9, product.shape, device="cuda").to(dtype)
    for library in (gemm_cuda._cublas, lambda: None):
        with mock.patch.object(gemm_cuda, "_cublas", library):
            assert torch.equal(gemm_cuda.scaled_matmul(a, b, alpha, dtype, rows=rows), product.to(dtype))
            total = before.clone()
            added = gemm_cuda.scaled_matmul(a, b, alpha, dtype, total, rows)
            assert added.data_ptr() == total.data_ptr()
            if dtype == torch.float32:
                assert torch.equal(total, product + before)
            else:
                assert relative(total, product.cpu() + before.cpu()) < 4e-3


@pytest.mark.parametrize("recipe", [BF16, NVFP4, RECIPES["fp8"]], ids=["bf16", "nvfp4", "fp8"])
@pytest.mark.parametrize("num_groups, features", [(1, 128), (3, 40)])
def test_later_micro_batches_add_to_the_gradient(recipe, num_groups, features):
    x, w, dy = (tensor.cuda() for tensor in tensors(128, 128, num_groups * features))
    context = context_of(recipe, num_groups=num_groups)
    weight = w.clone().requires_grad_()
    for _ in range(2):
        quantized_linear(x, weight, context).backward(dy)
        context.step_state.micro_batch += 1
    alone = []
    for micro_batch in range(2):
        context.step_state.micro_batch = micro_batch
        alone.append(run(x, w, dy, context)[2].cpu().double())
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert relative(weight.grad, alone[0] + alone[1]) < 1e-6


def test_what_is_saved_for_backward_is_four_bits_wide():
    x, w, dy = (tensor.cuda() for tensor in tensors(1024, 512, 256))
    context = context_of(NVFP4)
    run(x, w, dy, context)  # fills the weight's cache
    x, w = x.requires_grad_(), w.requires_grad_()
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        quantized_linear(x, w, context)
    weight_bytes, scalars = w.numel() * 2, 32
    assert sum(saved.values()) <= weight_bytes + x.numel() * (0.5 + 1 / 16) + scalars
