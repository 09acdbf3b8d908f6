"""The native backend on a GPU: FP8 blocks bit for bit as `te.Linear`; the emulated one as TE's NVFP4 reference."""

import importlib.util

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import verify
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import unsupported
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.precision.verify import PRODUCT_ERROR
from tests.gpu.te_linear import FP8, FP8_FP32_SCALES, NVFP4, compare_fp8, compare_nvfp4, ours
from tests.precision.reference import NVFP4 as PAPER

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (9, 0), reason="needs compute capability 9.0 or more"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
SHAPES = [(256, 128, 384), (1024, 512, 2048), (8192, 2048, 1024)]


def tensors(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    case = verify.Case(tokens, inputs, outputs, 1, BF16)
    return verify.sample_tensors(case, torch.device("cuda", 0))


@pytest.fixture(scope="module")
def backend() -> TransformerEngineBackend:
    return TransformerEngineBackend()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "FP32 scales"])
def test_fp8_blocks_are_te_linear_bit_for_bit(shape, power_of_two):
    if unsupported("transformer_engine", FP8 if power_of_two else FP8_FP32_SCALES, CAPABILITY):
        pytest.skip("not on this chip")
    assert compare_fp8(*tensors(*shape), power_of_two=power_of_two).differences == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_emulation_is_te_nvfp4_reference(shape):
    found = compare_nvfp4(*tensors(*shape))
    assert found.differences == {}
    assert found.agrees, found.errors


@pytest.mark.parametrize("recipe", [FP8, FP8_FP32_SCALES, NVFP4, PAPER], ids=lambda recipe: recipe.name)
def test_native_kernels_are_the_reference(backend, recipe):
    if reason := unsupported("transformer_engine", recipe, CAPABILITY):
        pytest.skip(reason)
    for shape in SHAPES[:2]:
        case = verify.Case(*shape, 1, recipe)
        faults = [str(f) for f in verify.check(backend, case, torch.device("cuda", 0)) if f.fault]
        assert faults == []


def test_gemms_add_the_gradients_of_micro_batches(backend, monkeypatch):
    x, w, dy = tensors(3 * 256, 256, 384)
    batches = list(zip(x.chunk(3), dy.chunk(3), strict=True))
    expected = sum(ours(a, w, b, FP8, backend)["dW"].double() for a, b in batches)
    totals = []
    original = TransformerEngineBackend.gemm

    def watching(self, a, b, out_dtype, total=None, rows=None):
        totals.append(total is not None)
        return original(self, a, b, out_dtype, total, rows)

    monkeypatch.setattr(TransformerEngineBackend, "gemm", watching)
    context = LinearContext("a", FP8, StepState(seed=0), backend)
    w = w.requires_grad_()
    places = []
    for a, b in batches:
        quantized_linear(a.contiguous(), w, context).backward(b.contiguous())
        assert w.grad.dtype == torch.float32 and (w.grad.bfloat16().float() != w.grad).any()
        places.append(w.grad.data_ptr())
    assert totals == [False, False] + [False, True] * 2  # fprop and wgrad; dx is not asked for
    assert len(set(places)) == 1
    assert ((w.grad.double() - expected).norm() / expected.norm()) < PRODUCT_ERROR[torch.float32]
