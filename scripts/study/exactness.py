"""Section `exactness`: where the tensor scale is applied, and shortcuts that do not give the specified codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fp4.precision.emulated import gemm
from megatron_fp4.quantization import quantize_nvfp4
from megatron_fp4.quantization.elements import E2M1_MAX, FP32_MAX, round_e2m1_nearest, to_e4m3
from megatron_fp4.quantization.tensor import block_amax
from scripts.study.errors import NEAREST, quantized, relative
from scripts.study.tables import table
from scripts.study.tensors import Study, generator, synthetic

ORDERS = ("as specified", "2688.0 / amax", "block amax / 6 x S", "encode = S / scale")


def study_exactness(study: Study) -> Iterator[tuple[str, str]]:
    """Where to apply the tensor scale, and which shortcuts move codes."""
    g = generator(5)
    kinds = ("code x block scale", "code x block scale x tensor scale")
    inexact, largest = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
    for _ in range(32):  # the share depends on the bits of the one number that is folded in
        x = quantize_nvfp4(torch.randn(256, 256, generator=g) * float(torch.rand((), generator=g)))
        values = x.block_values()
        for kind, exact in zip(kinds, (values, values * x.decode_scale()), strict=True):
            error = (exact.bfloat16().float() / exact - 1)[values != 0].abs()
            inexact[kind] += float((error > 0).double().mean()) / 32
            largest[kind] = max(largest[kind], float(error.max()))
    rows = [[kind, f"{inexact[kind]:.2%}", f"{largest[kind]:.2%}"] for kind in kinds]
    yield "folding", table(["BF16 operand", "inexact values", "largest error of a value"], rows)

    left = synthetic(study.size.side)["Gaussian"]
    a, b = quantize_nvfp4(left), quantize_nvfp4(left.flip(0))
    exact = (a.block_values().double() @ b.block_values().double().t()) * (a.decode_scale() * b.decode_scale())
    after = gemm(quantized(left, NEAREST), quantized(left.flip(0), NEAREST), torch.float32)
    before = a.dequantize().bfloat16().float() @ b.dequantize().bfloat16().float().t()
    products = {"tensor scales after the product": after, "tensor scales folded into BF16 operands": before}
    rows = [[name, f"{relative(product, exact):.1e}"] for name, product in products.items()]
    yield "accumulation", table(["emulated GEMM, FP32 accumulation", "error against FP64 accumulation"], rows)

    tensors = torch.randn(study.size.tensors, 1024, generator=generator(3)).bfloat16().float()
    right_codes, right_scales = encode_many(tensors, "as specified")
    rows = []
    for order in ORDERS[1:]:
        codes, scales = encode_many(tensors, order)
        touched = (scales != right_scales).any(1) | (codes != right_codes).any(1)
        moved, rescaled = (codes != right_codes).double().mean(), (scales != right_scales).double().mean()
        rows.append([order, f"{float(touched.double().mean()):.1%}", f"{float(rescaled):.3%}", f"{float(moved):.4%}"])
    yield "order", table(["shortcut", "tensors touched", "block scales moved", "codes moved"], rows)


def encode_many(tensors: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Grid values [n, cols] and block scales [n, cols / 16] of n FP32 tensors [n, cols] at once, each with a tensor
    scale of its own, in the specified order of operations or with one of the shortcuts `ORDERS`."""
    amax = tensors.abs().amax(1, keepdim=True)
    exact = torch.div(torch.full_like(amax, 2688.0), amax)
    tensor_scale = 2688.0 / amax if order == "2688.0 / amax" else exact
    vector_amax = block_amax(tensors, (1, 16))
    sixth = tensor_scale * torch.full_like(tensor_scale, E2M1_MAX).reciprocal()
    unrounded = vector_amax / E2M1_MAX * tensor_scale if order == "block amax / 6 x S" else vector_amax * sixth
    scales = to_e4m3(unrounded.clamp(max=FP32_MAX)).to(torch.float32)
    encode = (
        tensor_scale / scales if order == "encode = S / scale" else (scales * tensor_scale.reciprocal()).reciprocal()
    )
    scaled = tensors.unflatten(1, (-1, 16)) * encode.clamp(max=FP32_MAX)[..., None]
    return round_e2m1_nearest(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(1), scales
