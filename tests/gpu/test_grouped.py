"""The linears of experts on a GPU against a CPU: operands bit for bit, products up to rounding."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand
from megatron_fp4.precision.linear import grouped_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.segments import Segments
from tests.distributed.hybrid import operand
from tests.gpu import INTERPRETED
from tests.gpu.test_linear_cuda import relative
from tests.precision import reference as ref
from tests.precision.test_grouped import COUNTS, of_experts, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Operands = list[tuple[Tensor, Tensor | None]]


CASES = [
    ("experts", name) for name in ("bf16", "nvfp4", "all the way", "nvfp4, four over six", "mxfp4", "mxfp8", "fp8")
]
CASES += [("sources", "bf16"), ("sources", "nvfp4")]
CASES += [] if INTERPRETED else [("experts", "quartet 2")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_operands_are_the_same_bits_as_on_the_cpu_and_products_agree(kind: str, name: str) -> None:
    """Twice, so that the second gradient of the weight is added to the first. Three rows follow all segments."""
    counted, results = torch.tensor(COUNTS[kind]), {}
    x, w, dy = tensors(counted, rest=3)
    if INTERPRETED and name not in ("bf16", "fp8"):  # 256 outputs are whole tiles, 64 are a part of one
        w, dy = w[:, :64].contiguous(), dy[:, :64].contiguous()
    operands: dict[str, Operands] = {"cpu": [], "cuda": []}
    grouped_gemm = EmulatedBackend.grouped_gemm
    for device, found in operands.items():

        def watched(self: Any, gemm: str, a: GemmOperand, b: GemmOperand, *of: Any, found: Operands = found) -> Tensor:
            found.extend((operand(a), operand(b)))
            return grouped_gemm(self, gemm, a, b, *of)

        segments = Segments.of_experts(counted.to(device), of_experts(counted, rest=3).to(device))
        weight, of_device = w.to(device).clone().detach().requires_grad_(), []
        with mock.patch.object(EmulatedBackend, "grouped_gemm", watched):
            for micro_batch in range(2):
                context = LinearContext("experts", ref.RECIPES[name], StepState(1, 4, micro_batch))
                inputs = x.to(device).detach().requires_grad_()
                y = grouped_linear(inputs, weight, context, segments)
                y.backward(dy.to(device))
                of_device += [y.detach(), inputs.grad]
        results[device] = [*of_device, weight.grad]
    assert len(operands["cpu"]) == len(operands["cuda"]) == 12
    has_tokens = counted.flatten() > 0
    for (values, scale), (gpu_values, gpu_scale) in zip(*operands.values(), strict=True):
        assert torch.equal(values, gpu_values.cpu())
        if scale is not None and gpu_scale is not None and len(scale) == len(has_tokens):
            scale, gpu_scale = scale[has_tokens], gpu_scale.cpu()[has_tokens]
        assert (scale is None and gpu_scale is None) or torch.equal(scale, gpu_scale.cpu())
    for expected, actual in zip(*results.values(), strict=True):
        assert actual.dtype == expected.dtype and relative(actual, expected) < (2e-6 if actual.dim() == 3 else 1e-3)
        assert not actual[-3:].any() if actual.dim() == 2 else not actual[1].any()
