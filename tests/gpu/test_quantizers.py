"""The fused kernels against the PyTorch reference on the CPU, bit for bit."""

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.elements import unpack_codes
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.fp4 import FusedFP4, PackedColumns
from megatron_fp4.quantization.fp8 import BlockScaled, matmul_fp8, quantize_fp8, quantize_fp8_fused
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.mxfp4 import quantize_mxfp4
from megatron_fp4.quantization.mxfp8 import PackedMXFP8, mxfp8_bytes, quantize_mxfp8, quantize_mxfp8_fused
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.rounding import rounding_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INF, NAN = float("inf"), float("nan")


def normal(rows: int = 96, columns: int = 224) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def with_values(x: Tensor, *values: float) -> Tensor:
    for i, value in enumerate(values):
        x[3 + i, 5] = value
    return x


CASES = {
    "normal": normal(),
    "one tile": normal(32, 32),
    "odd multiples of 32": normal(32 * 33, 32 * 35),
    "larger than a program": normal(160, 2080),
    "fp32 input": normal(64, 96),
    "zeros": torch.zeros(64, 64),
    "negative zeros": with_values(-torch.zeros(64, 64), 1.0),
    "subnormals": normal() * 1e-39,
    "tiny": normal() * 1e-33,
    "smaller than the tensor scale can express": normal() * 1e-36,
    "large": normal() * 1e37,
    "one huge element": with_values(normal() * 1e-3, 1e30),
    "of all magnitudes": normal() * torch.exp2(torch.randint(-60, 60, (96, 224)).float()),
    "on the grid": torch.randint(-12, 13, (96, 224)) * 0.25,
    "few channels alive": normal() * (torch.arange(224) % 37 == 0),
    "inf": with_values(normal(), INF),
    "inf and -inf": with_values(normal(), INF, -INF),
    "nan": with_values(normal(), NAN),
}


def reference(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Values in BF16, codes, scale bytes and the decode scale of x along its last dimension, from the CPU."""
    block = side.block[1]
    if side.hadamard:
        x = random_hadamard_transform(x, block, None if side.signs == "fixed" else torch.ones(block))
    rounding = "nearest" if side.key is None else "stochastic"
    if side.format == "nvfp4":
        nvfp4 = quantize_nvfp4(x, side.block, rounding, key=side.key)
        scale = nvfp4.amax / torch.tensor(2688.0)
        return nvfp4.block_values().bfloat16(), unpack_codes(nvfp4.codes), nvfp4.scales.view(torch.uint8), scale
    mxfp4 = quantize_mxfp4(x, side.block, rounding, key=side.key)
    return mxfp4.dequantize(torch.bfloat16), unpack_codes(mxfp4.codes), mxfp4.scales, None


def codes_and_scales(packed: PackedColumns) -> tuple[Tensor, Tensor]:
    """The documented order of packed codes, undone in PyTorch."""
    words, (rows, columns) = packed.codes.cpu(), packed.shape
    codes = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], -1)  # even column: rows 0, 1, 2, 3; odd
    codes = codes.unflatten(-1, (2, 4)).permute(0, 1, 4, 2, 3).reshape(rows, columns)
    scales = packed.scales.cpu().to(torch.int32)
    return codes.to(torch.uint8), torch.stack((scales & 0xFF, (scales >> 8) & 0xFF), -1).flatten(-2).to(torch.uint8)


def same(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Equal, NaN where NaN; zeros of either sign are equal."""
    if actual is None or expected is None:
        return actual is expected
    actual = actual.cpu()
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def sides(form: str) -> list[tuple[Side, Side]]:
    """What a tensor may get along its columns and along its rows: x, W and dy of the recipes."""
    row, square = FORMATS[form].blocks
    block = row[1]
    first = rounding_key(1, "a", row_offset=48, column_offset=160)
    second = rounding_key(1, "b", row_offset=2**33, column_offset=16)
    return [
        (Side(form, row), Side(form, row, block)),
        (Side(form, square), Side(form, row)),
        (Side(form, row, key=first), Side(form, row, block, key=second)),
    ]


def check(x: Tensor, on_device: Tensor, columns: Side, rows: Side) -> None:
    measured = FusedFP4(on_device, columns, rows)
    finite = x.isfinite().all()  # which codes stand under a scale of NaN does not matter
    values, codes, scales, scale = reference(x, columns)
    assert same(measured.along_columns(), values)
    assert same(measured.columns_scale, scale)
    packed_codes, packed_scales = measured.packed_columns()
    assert torch.equal(packed_scales.cpu(), scales)
    assert torch.equal(unpack_codes(packed_codes.cpu()), codes) or not finite
    values, codes, scales, scale = reference(x.t(), rows)
    assert same(measured.along_rows(), values)
    assert same(measured.rows_scale, scale)
    packed = measured.packed_rows()
    assert same(packed.values(), values)
    packed_codes, packed_scales = codes_and_scales(packed)
    assert torch.equal(packed_scales, scales.t())
    assert torch.equal(packed_codes, codes.t()) or not finite
    packed_codes, packed_scales = packed.transposed()
    assert torch.equal(packed_scales.cpu(), scales)
    assert torch.equal(unpack_codes(packed_codes.cpu()), codes) or not finite


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_values_codes_and_scales_are_those_of_the_reference(case, form):
    x = CASES[case].bfloat16()
    on_device = (CASES[case] if case == "fp32 input" else x).cuda()
    for columns, rows in sides(form):
        check(x, on_device, columns, rows)


def test_the_branchless_reciprocal_is_correctly_rounded():
    # One block a row, whose scale takes every E4M3 value, under tensor maxima of all mantissas and many exponents.
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for exponent in (-126, -110, -100, -64, -61, -60, -59, 0, 1, 60, 100, 119):
        amax = torch.linspace(1, 2, 129)[:-1].bfloat16().float() * 2.0**exponent
        for largest in amax[:: 8 if exponent else 1].tolist():
            x = (scales / 448 * largest).bfloat16()[:, None] * torch.linspace(0.05, 1, 16)
            x = torch.cat((x, torch.full((2, 16), largest))).bfloat16()
            values, _, _, _ = reference(x, Side("nvfp4", (1, 16)))
            assert same(FusedFP4(x.cuda(), Side("nvfp4", (1, 16)), None).along_columns(), values), largest


FP8_CASES = {
    "normal": normal(256, 256),
    "zeros": torch.zeros(256, 256),
    "subnormals": normal(256, 256) * 1e-39,
    "one huge element": with_values(normal(256, 256) * 1e-3, 1e30),
    "of all magnitudes": normal(256, 256) * torch.exp2(torch.randint(-60, 60, (256, 256)).float()),
    "inf and nan": with_values(normal(256, 256), INF, 1.0, NAN),
}


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8_codes_and_scales_are_those_of_the_reference(case, along_rows, block_rows, power_of_two):
    x = FP8_CASES[case].bfloat16()
    seen = x.t() if along_rows else x
    expected = quantize_fp8(seen, (block_rows, 128), power_of_two_scales=power_of_two)
    scales = expected.scales[:: block_rows if block_rows > 1 else 1]
    options = {"along_rows": along_rows, "power_of_two_scales": power_of_two}
    made = quantize_fp8_fused(x.cuda(), block_rows, keep=False, **options)
    if power_of_two:
        assert isinstance(made, Tensor)
        assert same(made, expected.dequantize(torch.bfloat16))
        return
    kept = quantize_fp8_fused(x.cuda(), block_rows, keep=True, **options)
    for actual in (made, kept):
        assert isinstance(actual, BlockScaled)
        assert same(actual.scales, scales)
        assert same(actual.codes.float(), expected.codes.float()) or not x.isfinite().all()
        assert same(actual.values(), expected.dequantize())


@pytest.mark.parametrize("m, n, k", [(128, 128, 128), (80, 336, 512), (1040, 16, 1280)])
def test_fp8_products(m, n, k):
    a, b = normal(m, k).bfloat16().cuda(), normal(k, n).bfloat16().cuda()
    left = quantize_fp8_fused(a, 1, along_rows=False, power_of_two_scales=False, keep=False)
    right = quantize_fp8_fused(b, 1, along_rows=True, power_of_two_scales=False, keep=True)
    assert isinstance(left, BlockScaled) and isinstance(right, BlockScaled)
    exact = left.values().double() @ right.values().double().t()
    product = matmul_fp8(left, right, torch.float32).double()
    assert (product - exact).norm() / exact.norm() < 1e-6


MXFP8_CASES = CASES | {
    "around powers of two": 448 * torch.exp2(torch.randint(-130, 110, (96, 224)).float()),
    "every bfloat16": (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32).reshape(512, 128),
}


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize("case", MXFP8_CASES)
def test_mxfp8_values_codes_and_scales_are_those_of_the_reference(case, along_rows, block_rows):
    x = MXFP8_CASES[case].bfloat16()
    on_device = (MXFP8_CASES[case] if case == "fp32 input" else x).cuda()
    expected = quantize_mxfp8(x.t() if along_rows else x, (block_rows, 32))
    made = quantize_mxfp8_fused(on_device, block_rows, along_rows=along_rows, keep=False)
    assert isinstance(made, Tensor) and made.dtype == torch.bfloat16
    assert same(made, expected.dequantize(torch.bfloat16))
    finite = (expected.scales != 255).repeat_interleave(32, -1)  # the codes under a scale of NaN do not matter
    codes, scales = mxfp8_bytes(on_device, block_rows, along_rows=along_rows)
    assert codes.is_contiguous() and torch.equal(codes.cpu()[finite], expected.codes.view(torch.uint8)[finite])
    assert torch.equal(scales.cpu(), expected.scales)
    if along_rows:
        kept = quantize_mxfp8_fused(on_device, block_rows, along_rows=True, keep=True)
        assert isinstance(kept, PackedMXFP8)
        assert same(kept.values(), expected.dequantize(torch.bfloat16))
        assert torch.equal(kept.scales.cpu().t(), expected.scales)
        assert torch.equal(kept.codes, codes.t())


def test_mxfp8_of_more_tokens_than_a_grid_has_rows():
    x = normal(32, 32).bfloat16().repeat(70_000, 1).cuda()
    for along_rows in (False, True):
        made = quantize_mxfp8_fused(x, 1, along_rows=along_rows, keep=False)
        assert isinstance(made, Tensor)
        made = made.t() if along_rows else made
        assert torch.equal(made[-32:], made[:32])
