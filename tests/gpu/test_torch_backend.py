"""The backend `torch`: its operands on any GPU (test_quantizers.py compares the kernels' bits), its products on GPUs
whose tensor cores take block scales."""

import pytest
import torch

from megatron_fp4.precision import torch_scaled_mm, verify
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.verify import Case
from tests.precision.reference import RECIPES
from tests.quantization import cublas

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = [
    *("nvfp4", "nvfp4, fresh signs", "nvfp4, four over six", "all the way"),
    *("mxfp8, square weights", "mxfp8, transforms", "nvfp4 forward, mxfp8 backward"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_self_test_passes_with_the_gemms_replaced(name, monkeypatch):
    monkeypatch.setattr(torch_scaled_mm, "scaled_mm", cublas.scaled_mm)
    findings = verify.check(TorchBackend(), Case(256, 288, 3 * 80, 3, RECIPES[name]), torch.device("cuda", 0))
    assert [str(finding) for finding in findings if finding.fault] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_self_test_passes_on_tensor_cores(name):
    reason = unsupported("torch", RECIPES[name], torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    for shape in ((256, 288, 240), (1024, 512, 2048)):
        findings = verify.check(TorchBackend(), Case(*shape, 1, RECIPES[name]), torch.device("cuda", 0))
        assert [str(finding) for finding in findings if finding.fault] == []
