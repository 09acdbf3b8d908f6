"""The linear layer on a GPU against the same layer on a CPU: operands bit for bit, products up to rounding."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_fp4.precision.gemm_cuda as gemm_cuda
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.emulated import GemmOperand
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.sums import blackwell_product
from tests.distributed.hybrid import operand, watched_gemms
from tests.gpu import INTERPRETED
from tests.precision import reference as ref
from tests.precision.test_sums import random_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RECIPES = {
    **ref.RECIPES,
    "nvfp4, a large transform": ref.changed(ref.NVFP4, wgrad_rht=64),
    "mxfp8, square": ref.changed(ref.RECIPES["mxfp8, square weights"], wgrad_activation=ref.W8),
}


def tensors(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + inputs + outputs)
    x, dy = (torch.randn(tokens, n, generator=generator).bfloat16() for n in (inputs, outputs))
    x[:, ::7] *= 20
    return x, torch.randn(outputs, inputs, generator=generator) * inputs**-0.5, dy * 1e-4


def context_of(recipe: Recipe, num_groups: int = 1) -> LinearContext:
    context = ref.context_of(recipe, num_groups=num_groups)
    context.step_state.step = 3
    return context


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("name", "dtype", "num_groups"),
    [
        *((name, torch.float32, 1) for name in RECIPES),
        *((name, torch.bfloat16, 1) for name in ("nvfp4", "mxfp4", "fp8")),
        *((name, torch.float32, 3) for name in ("nvfp4", "mxfp4, square weights")),
    ],
)
def test_operands_are_the_same_bits_as_on_the_cpu_and_products_agree(name: str, dtype, num_groups: int) -> None:
    """Weights are kept as codes on the GPU and as values on the CPU. Groups of 84 rows are padded."""
    x, w, dy = tensors(128, 384, (128 if INTERPRETED else 256) if num_groups == 1 else 84 * num_groups)
    gemms: dict[str, list[tuple[Tensor, Tensor | None]]] = {"cpu": [], "cuda": []}
    results = {}
    for device, found in gemms.items():

        def keep(a: GemmOperand, b: GemmOperand, found: list[Any] = found) -> None:
            found.extend((operand(a), operand(b)))

        with watched_gemms(keep):
            results[device] = ref.run(  # type: ignore[call-arg]
                *(t.to(device) for t in (x, w.to(dtype), dy)), context_of(RECIPES[name], num_groups)
            )
    assert len(gemms["cpu"]) == len(gemms["cuda"]) == 6
    for (values, scale), (gpu_values, gpu_scale) in zip(*gemms.values(), strict=True):
        assert torch.equal(values, gpu_values.cpu())
        assert (scale is None and gpu_scale is None) or torch.equal(scale, gpu_scale.cpu())
    # y and dx are rounded to BF16, and differ by one unit where the order of accumulation decides the rounding.
    for expected, actual, bound in zip(*results.values(), (1e-3, 1e-3, 2e-6), strict=True):
        assert actual.dtype == expected.dtype and relative(actual, expected) < bound


def strided(t: Tensor, transposed: bool) -> Tensor:
    """Contiguous along its first dimension if `transposed`."""
    return t.t().contiguous().t() if transposed else t


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left, right", [(False, True), (True, False), (True, True)])
def test_scaled_matmul(left: bool, right: bool, dtype: torch.dtype) -> None:
    # Small integers have exact sums, so both ways of scaling must give the same bits.
    a = strided(torch.randint(-8, 9, (160, 336), device="cuda").bfloat16(), left)
    b = strided(torch.randint(-8, 9, (336, 208), device="cuda").bfloat16(), right)
    alpha = torch.tensor(0.1234567, device="cuda")
    exact = torch.mm(a, b, out_dtype=torch.float32)
    for library in (gemm_cuda._cublas, lambda: None):
        with mock.patch.object(gemm_cuda, "_cublas", library):
            assert torch.equal(gemm_cuda.scaled_matmul(a, b, alpha, dtype), (exact * alpha).to(dtype))
    assert torch.equal(gemm_cuda.scaled_matmul(a, b, None, dtype), exact.to(dtype))
    assert torch.equal(torch.mm(a, b), (a.float() @ b.float()).bfloat16())  # the handle is as before


@pytest.mark.parametrize(
    ("dtype", "rows", "left"),
    [
        (torch.float32, None, False),
        (torch.float32, RowGroups(48, 36), True),
        (torch.float32, RowGroups(48, 40), False),
        (torch.float32, RowGroups(160, 160), True),
        (torch.bfloat16, RowGroups(48, 36), False),
        (torch.bfloat16, RowGroups(48, 40), True),
    ],
    ids=str,
)
def test_scaled_matmul_adds_and_leaves_out_padding(dtype: torch.dtype, rows: RowGroups | None, left: bool) -> None:
    a = strided(torch.randint(-8, 9, (480, 336), device="cuda").bfloat16(), left)
    b = torch.randint(-8, 9, (336, 208), device="cuda").bfloat16()
    alpha = torch.tensor(0.25, device="cuda")
    product = torch.mm(a, b, out_dtype=torch.float32) * alpha
    product = product if rows is None else rows.unpadded(product)
    before = torch.randint(-8, 9, product.shape, device="cuda").to(dtype)
    for library in (gemm_cuda._cublas, lambda: None):
        with mock.patch.object(gemm_cuda, "_cublas", library):
            assert torch.equal(gemm_cuda.scaled_matmul(a, b, alpha, dtype, groups=rows), product.to(dtype))
            total = before.clone()
            added = gemm_cuda.scaled_matmul(a, b, alpha, dtype, total, rows)
            assert added.data_ptr() == total.data_ptr()
            if dtype == torch.float32:
                assert torch.equal(total, product + before)
            else:
                assert relative(total, product.cpu() + before.cpu()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k, left, right", [(2048, True, True), (336, False, True), (80, False, False)])
@pytest.mark.parametrize("groups", [None, RowGroups(48, 36)])
def test_sums_in_blackwells_order(k: int, left: bool, right: bool, groups: RowGroups | None, dtype) -> None:
    m, n = (96, 80) if INTERPRETED else (480, 336)
    a, b = (strided(random_values(rows, k, rows), across) for rows, across in ((m, left), (n, right)))
    alpha = torch.tensor(1.2345678e-5)
    expected = blackwell_product(a, b, alpha, dtype, None, groups)
    before = torch.randn(expected.shape).to(dtype)
    total = before.cuda()
    found = blackwell_product(a.cuda(), b.cuda(), alpha.cuda(), dtype, None, groups)
    blackwell_product(a.cuda(), b.cuda(), alpha.cuda(), dtype, total, groups)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(total.cpu(), blackwell_product(a, b, alpha, dtype, before, groups))


def test_tensors_saved_for_backward_have_4_bits() -> None:
    x, w, dy = (tensor.cuda() for tensor in tensors(64 if INTERPRETED else 256, 128, 64))
    context = context_of(ref.NVFP4)
    ref.run(x, w, dy, context)  # fills the weight's cache
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        quantized_linear(x.requires_grad_(), w.requires_grad_(), context)
    weight_bytes, scalars = w.numel() * 2, 32
    assert sum(saved.values()) <= weight_bytes + x.numel() * (0.5 + 1 / 16) + scalars
