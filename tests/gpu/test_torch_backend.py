"""The backend `torch` on a GPU: operands are the CPU's bits on any of them, products on those whose tensor cores take
block scales."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.precision import torch_scaled_mm, verify
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.verify import Case
from megatron_fp4.quantization.rounding import rounding_key
from tests.precision.reference import ALL_THE_WAY, DY, MX8, MXFP8, NVFP4, W2, X
from tests.quantization import cublas
from tests.recipes import changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

W8, SIX = Operand("mxfp8", (32, 32)), replace(X, four_over_six=True)
RECIPES = {
    "nvfp4": NVFP4,
    "fresh signs": replace(NVFP4, rht_signs="fresh"),
    "four over six": changed(NVFP4, fprop_activation=SIX, wgrad_activation=SIX),
    "all the way": ALL_THE_WAY,
    "mxfp8, square weights": changed(MXFP8, fprop_weight=W8, dgrad_weight=W8),
    "mxfp8, transform": changed(MXFP8, wgrad_rht=32),
    "nvfp4 forward, mxfp8 backward": changed(MXFP8, fprop_activation=X, fprop_weight=W2),
}
OPERANDS = [(X, 16), (W2, 0), (DY, 16), (DY, 0), (SIX, 16), (MX8, 0), (MX8, 32), (W8, 0)]


@pytest.mark.parametrize(("shape", "dtype"), [((32, 32), torch.float32), ((160, 2080), torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("operand", "rht"), OPERANDS, ids=str)
def test_operands_are_the_same_bytes_as_on_the_cpu(shape, dtype, operand, rht):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, ::7] *= 20
    if operand.format == "mxfp8":
        x[5], x[:, 9], x[0, 0], x[1, 1], x[2, 2] = 1e-39, -0.0, 3e38, -1e-30, 448
    keys = [rounding_key(1, what, row_offset=48, column_offset=160) if operand.drawn else None for what in "ab"]
    requests = OperandRequest(operand, 0, "fixed", keys[0]), OperandRequest(operand, rht, "fixed", keys[1])
    makers = [TorchBackend().operands(t, *requests) for t in (x, x.cuda())]
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
def test_tensor_cores(name):
    reason = unsupported("torch", RECIPES[name], torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    for shape in ((256, 288, 240), (1024, 512, 2048)):
        findings = verify.check(TorchBackend(), Case(*shape, 1, RECIPES[name]), torch.device("cuda", 0))
        assert [str(finding) for finding in findings if finding.fault] == []
