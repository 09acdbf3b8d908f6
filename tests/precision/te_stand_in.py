"""A stand-in for Transformer Engine's NVFP4 on a CPU: the reference quantizer behind the interface of its quantizer and
GEMM, in its storage layout. (Its FP8 is tested on a GPU: tests/gpu/test_transformer_engine.py.)

It imitates what its kernels do and the reference does not: maxima ignore NaN, and NaN becomes the largest code; every
negative zero has code 8; draws have 8 bits and come from CUDA's default generator; padding is not written; scales are
in cuBLAS's order if the kernels of compute capability 10.0 write them so. The names of arguments are those of its
releases.
"""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.quantization import nvfp4
from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform
from megatron_fp4.quantization.rounding import (
    e2m1_codes,
    e2m1_values,
    pack_codes,
    round_e2m1_nearest,
    round_e2m1_stochastic,
    unpack_codes,
)
from tests.quantization.cublas import slots

PADDING = 0x5A  # the byte in memory that is not written
GEMMS: list[dict[str, Any]] = []  # the calls of `general_gemm`
SPLITS: list[list[int]] = []  # the rows of the calls of `split_quantize`
_SETTINGS = {
    *("rowwise", "columnwise", "with_amax_reduction", "amax_reduction_group", "with_rht", "with_post_rht_amax"),
    *("with_2d_quantization", "stochastic_rounding", "with_random_sign_mask"),
}
_OF_FOUR_OVER_SIX = {"nvfp4_use_4over6": False, "nvfp4_e4m3_max": 448, "nvfp4_4over6_err_mode": "MAE"}
_NAMES = {
    *(f"{side}_{part}" for side in ("rowwise", "columnwise") for part in ("data", "scale_inv")),
    *("amax_rowwise", "amax_columnwise", "quantizer", "fake_dtype", "fp4_dtype", "with_gemm_swizzled_scales"),
    *("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"),
}


class NVFP4TensorStorage:
    """The named tensors and settings that the quantizer returns and the GEMM takes."""

    def __init__(self, **parts: Any) -> None:
        assert set(parts) == _NAMES, set(parts) ^ _NAMES
        self.parts = parts

    def get_metadata(self) -> dict[str, Any]:
        return dict(self.parts)


class NVFP4Quantizer:
    """`log` (the tensors that were quantized) and `own_maximum` (ranks do not share their maxima) are for tests."""

    log: list[dict[str, Any]]
    own_maximum: bool

    def __init__(self, **given: Any) -> None:
        assert _SETTINGS <= given.keys() <= _SETTINGS | _OF_FOUR_OVER_SIX.keys()
        self.__dict__.update(_OF_FOUR_OVER_SIX | given)
        self.internal = self.optimize_for_gemm = False
        assert not (self.nvfp4_use_4over6 and (self.with_rht or self.stochastic_rounding))
        assert self.with_post_rht_amax == self.with_rht, "the maximum must be that after the transform"

    def __call__(self, x: Tensor) -> NVFP4TensorStorage:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.dim() == 2
        assert not any(size % 16 for size in x.shape) and self.internal and self.rowwise
        self.log.append({"shape": tuple(x.shape), "quantizer": self})
        transposed = x.t().contiguous()
        if self.with_rht:
            signs = fixed_signs(16) if self.with_random_sign_mask else torch.ones(16)
            transposed = random_hadamard_transform(transposed, 16, signs)
        fused = self.with_rht and x.shape[0] % 64 == 0 and x.shape[1] % 128 == 0
        square = self.with_2d_quantization and not any(size % 128 for size in x.shape) and not self.nvfp4_use_4over6
        swizzled = self.optimize_for_gemm and (fused or square)
        parts: dict[str, Any] = {}
        for name, rows, wanted in (("rowwise", x, True), ("columnwise", transposed, self.columnwise)):
            data, scales, amax = self.side(rows) if wanted else (None, None, None)
            if wanted and swizzled:
                scales = swizzle(scales)
            parts |= {f"{name}_data": data, f"{name}_scale_inv": scales, f"amax_{name}": amax}
        return NVFP4TensorStorage(
            **parts,
            fp4_dtype="E2M1",
            quantizer=self,
            with_gemm_swizzled_scales=swizzled,
            row_scaled_nvfp4=False,
            nvfp4_use_4over6=self.nvfp4_use_4over6,
            nvfp4_e4m3_max=self.nvfp4_e4m3_max if self.nvfp4_use_4over6 else 448,
            fake_dtype=torch.bfloat16,
        )

    def side(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, padded scales and the maximum of `rows` [n, k]."""
        without_nan = rows.to(torch.float32).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        amax = without_nan.abs().amax()
        if self.with_amax_reduction and not self.own_maximum:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.amax_reduction_group)
        block = (16, 16) if self.with_2d_quantization else (1, 16)
        error = {"MAE": "absolute", "MSE": "squared"}[self.nvfp4_4over6_err_mode]
        made = quantize_nvfp4(without_nan, block, amax=amax, four_over_six=error if self.nvfp4_use_4over6 else "")
        scaled = nvfp4._scaled_to_grid(without_nan, made.scales, nvfp4.encode_tensor_scale(amax, made.scale_max))
        values = round_e2m1_nearest(scaled)
        if self.stochastic_rounding:
            draws = torch.randint(256, rows.shape, generator=torch.cuda.default_generators[0].state)
            values = round_e2m1_stochastic(scaled, (draws.to(torch.float32) + 0.5) * 2.0**-8)
        codes = e2m1_codes(torch.where(rows.isnan(), 6.0, values), rows.signbit())
        return pack_codes(codes), padded(made.scales.view(torch.uint8), 128, 4), made.amax.reshape(1).clone()


def general_gemm(A, B, *, out_dtype, layout, grad, use_split_accumulator, out=None, accumulate=False):
    """op(B) op(A)^T of row-major matrices: cuBLAS's op(A) op(B), which is column-major."""
    assert layout in ("TN", "NN", "NT") and (out is None or out.is_contiguous()) and use_split_accumulator
    GEMMS.append({"layout": layout, "out_dtype": out_dtype, "grad": grad, "accumulate": accumulate})
    right = decoded(A, "rowwise" if layout[0] == "T" else "columnwise")
    left = decoded(B, "columnwise" if layout[1] == "T" else "rowwise")
    assert left.shape[1] == right.shape[1] and left.shape[1] % 16 == 0
    product = left @ right.t()
    if out is None:
        return product.to(out_dtype), None, None, None
    assert out.dtype == out_dtype and out.shape == product.shape
    out.copy_(product + out if accumulate else product)
    return out, None, None, None


def general_grouped_gemm(A, B, out, quantization_params, out_dtype, *, layout, m_splits, accumulate=False, **settings):
    """A GEMM for each expert."""
    assert len(A) == len(B) == len(out) == len(quantization_params) == len(m_splits) and not any(quantization_params)
    for a, b, product in zip(A, B, out, strict=True):
        settings |= {"out_dtype": out_dtype, "layout": layout, "accumulate": accumulate}
        general_gemm(a, b, out=product, **settings)
    return out, None, None


def split_quantize(x: Tensor, rows: list[int], quantizers: list[NVFP4Quantizer]) -> list[NVFP4TensorStorage]:
    """Each part by its quantizer; one generator state draws for all. With the limits of the kernels of 10.0."""
    assert len(rows) == len(quantizers) <= 64 and x.is_contiguous() and x.shape[0] == sum(rows)
    assert not any(size % 128 for size in (*rows, x.shape[1])) and not quantizers[0].with_2d_quantization
    SPLITS.append(rows)
    return [quantizer(part) for quantizer, part in zip(quantizers, x.split(rows), strict=True)]


def decoded(storage: NVFP4TensorStorage, side: str) -> Tensor:
    """The values along one direction, FP64 [rows, k]; the storage must not have the other one."""
    parts = storage.parts
    other = "columnwise" if side == "rowwise" else "rowwise"
    assert parts[f"{other}_data"] is None and parts[f"{other}_scale_inv"] is None
    data, scales = parts[f"{side}_data"], parts[f"{side}_scale_inv"]
    if parts["with_gemm_swizzled_scales"]:
        scales = scales.flatten()[slots(*scales.shape)]
    scales = scales[: data.shape[0], : data.shape[1] // 8].view(torch.float8_e4m3fn).to(torch.float64)
    values = e2m1_values(unpack_codes(data)).to(torch.float64).unflatten(1, (-1, 16))
    factor = parts[f"amax_{side}"].to(torch.float64) / (6 * parts["nvfp4_e4m3_max"])
    return (values * scales[..., None]).flatten(1) * factor


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    extra = (-scales.shape[0] % rows, -scales.shape[1] % columns)
    return torch.nn.functional.pad(scales, (0, extra[1], 0, extra[0]), value=PADDING)


def swizzle(scales: Tensor) -> Tensor:
    swizzled = torch.empty_like(scales).flatten()
    swizzled[slots(*scales.shape)] = scales
    return swizzled.view(scales.shape)


class DefaultGenerator:
    """CUDA's default generator, which draws from the state that it is given; CPU generators do not have these calls."""

    def __init__(self) -> None:
        self.state = torch.Generator()

    def graphsafe_get_state(self) -> torch.Generator:
        return self.state

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.state = state


@contextlib.contextmanager
def installed(own_maximum: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Make the backend use this instead of the package; yields the log of the tensors that are quantized."""
    log: list[dict[str, Any]] = []
    quantizer = type("NVFP4Quantizer", (NVFP4Quantizer,), {"log": log, "own_maximum": own_maximum})
    gemms = {"general_gemm": general_gemm, "general_grouped_gemm": general_grouped_gemm}
    library = SimpleNamespace(e4m3="E4M3", **gemms, split_quantize=split_quantize, NVFP4Quantizer=quantizer)
    GEMMS.clear()
    SPLITS.clear()
    with (
        mock.patch.object(te, "_library", lambda: library),
        mock.patch.object(torch.cuda, "device", lambda _: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "default_generators", (DefaultGenerator(),)),
    ):
        yield log
