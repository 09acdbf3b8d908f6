"""The backend `torch` on a GPU: operands are the CPU's bits on any of them, products on those whose tensor cores take
block scales."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.precision import torch_scaled_mm, verify
from megatron_fp4.precision.emulated import OperandRequest
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.verify import Case
from megatron_fp4.quantization.rounding import rounding_key
from tests.quantization import cublas
from tests.recipes import changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

X, W = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16))
DY = replace(X, rounding="stochastic")
NVFP4 = Recipe("nvfp4", Gemm(X, W), Gemm(DY, W), Gemm(DY, X, 16))
SIX = replace(X, four_over_six=True)
X8, W8 = Operand("mxfp8", (1, 32)), Operand("mxfp8", (32, 32))
MXFP8 = Recipe("mxfp8", Gemm(X8, X8), Gemm(X8, X8), Gemm(X8, X8))
RECIPES = {
    "nvfp4": NVFP4,
    "fresh signs": replace(NVFP4, rht_signs="fresh"),
    "1x16 weights": changed(NVFP4, fprop_weight=X, dgrad_weight=X),
    "four over six": changed(NVFP4, fprop_activation=SIX, wgrad_activation=SIX),
    "all the way": Recipe("all_the_way", Gemm(X, X), Gemm(DY, X), Gemm(DY, DY)),
    "mxfp8": MXFP8,
    "mxfp8, square weights": changed(MXFP8, fprop_weight=W8, dgrad_weight=W8),
    "mxfp8, transform": changed(MXFP8, wgrad_rht=32),
    "nvfp4 forward, mxfp8 backward": changed(MXFP8, fprop_activation=X, fprop_weight=W),
}


def requests(operand: Operand, rht: int) -> tuple[OperandRequest, OperandRequest]:
    """Along the columns and along the rows."""
    keys = [rounding_key(1, what, row_offset=48, column_offset=160) for what in "ab"]
    keys = keys if operand.rounding == "stochastic" else [None, None]
    return OperandRequest(operand, 0, "fixed", keys[0]), OperandRequest(operand, rht, "fixed", keys[1])


OPERANDS = [(X, 16), (W, 0), (DY, 16), (DY, 0), (SIX, 16), (X8, 0), (X8, 32), (W8, 0)]


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (160, 2080), (1056, 352)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("operand", "rht"), OPERANDS, ids=str)
def test_operands_are_the_same_bytes_as_on_the_cpu(shape, dtype, operand, rht):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, ::7] *= 20
    if operand.format == "mxfp8":
        x[5], x[:, 9], x[0, 0], x[1, 1], x[2, 2] = 1e-39, -0.0, 3e38, -1e-30, 448
    makers = [TorchBackend().operands(t, *requests(operand, rht)) for t in (x, x.cuda())]
    for on_cpu, on_gpu in zip(*makers, strict=True):
        expected, made = on_cpu(), on_gpu()
        for mine, theirs in zip(made.tensors(), expected.tensors(), strict=True):
            if theirs is None:
                assert mine is None
                continue
            assert mine.is_cuda and mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert torch.equal(mine.cpu().reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        assert made.layout == expected.layout


@pytest.mark.parametrize("name", RECIPES)
def test_the_self_test_passes_with_the_gemms_replaced(name, monkeypatch):
    monkeypatch.setattr(torch_scaled_mm, "scaled_mm", cublas.scaled_mm)
    findings = verify.check(TorchBackend(), Case(256, 288, 3 * 80, 3, RECIPES[name]), torch.device("cuda", 0))
    assert [str(finding) for finding in findings if finding.fault] == []


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(256, 288, 240), (1024, 512, 2048)])
def test_tensor_cores(name, shape):
    reason = unsupported("torch", RECIPES[name], torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    findings = verify.check(TorchBackend(), Case(*shape, 1, RECIPES[name]), torch.device("cuda", 0))
    assert [str(finding) for finding in findings if finding.fault] == []
