"""The backend `torch` on a GPU: its operands on any of them (their kernels' bits are in test_quantizers.py), products
on those whose tensor cores take block scales."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.precision import torch_scaled_mm, verify
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.verify import Case
from tests.precision.reference import ALL_THE_WAY, MXFP8, NVFP4, W2, X
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
