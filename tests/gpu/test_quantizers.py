"""The quantizing kernels against the PyTorch reference on the CPU, bit for bit."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Side
from megatron_fp4.quantization.formats import FORMATS, quantize
from megatron_fp4.quantization.fp4 import FusedFourOverSix, FusedFP4
from megatron_fp4.quantization.fp8 import BlockScaled, FusedFP8, matmul_fp8
from megatron_fp4.quantization.hadamard import random_hadamard_transform, random_signs
from megatron_fp4.quantization.microscaling import FusedMXFP8, PackedMXFP8
from megatron_fp4.quantization.ms_eden import FusedMSEden, encode_ms_eden
from megatron_fp4.quantization.rounding import Place, RoundingKey, Span, rounding_key, unpack_codes
from tests.gpu import INTERPRETED
from tests.quantization.partitions import CASES as CASES_OF_PARTS
from tests.quantization.partitions import check_parts, kernels_take, made, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

INF, NAN = float("inf"), float("nan")
ALONG = ("columns", "rows")


def normal(rows: int = 32 if INTERPRETED else 96, columns: int = 224) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def with_values(x: Tensor, *values: float) -> Tensor:
    for i, value in enumerate(values):
        x[3 + i, 5] = value
    return x


CASES = {
    "normal": normal(),
    "odd multiples of 32": normal(32 * 3, 32 * 5) if INTERPRETED else normal(32 * 33, 32 * 35),
    "larger than a program": normal(32, 1056) if INTERPRETED else normal(160, 2080),
    "fp32 input": normal(32, 96),
    "negative zeros": with_values(-torch.zeros(32, 64), 1.0),
    "subnormals": normal() * 1e-39,
    "smaller than the tensor scale can express": normal() * 1e-36,
    "large": normal() * 1e37,
    "one huge element": with_values(normal() * 1e-3, 1e30),
    "of all magnitudes": normal() * torch.exp2(torch.randint(-60, 60, normal().shape).float()),
    "on the grid": torch.randint(-12, 13, normal().shape) * 0.25,
    "inf and -inf": with_values(normal(), INF, -INF),
    "nan": with_values(normal(), NAN),
}


def case_of(name: str) -> Tensor:
    """The tensor in BF16; the one of "fp32 input" stays in FP32, and kernels round it to BF16."""
    return CASES[name] if name == "fp32 input" else CASES[name].bfloat16()


def reference(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """BF16 values, codes, scale bytes and the decode scale of x, quantized along its last dimension on the CPU."""
    x = x.bfloat16().contiguous()
    if side.ms_eden:
        assert side.signs_key is not None
        rotated = random_hadamard_transform(x, 128, random_signs(128, side.signs_key))
        encoded = encode_ms_eden(rotated.float(), side.key)
    else:
        if side.hadamard:
            x = random_hadamard_transform(x, side.hadamard)
        six = {"four_over_six": side.four_over_six} if side.four_over_six else {}
        encoded = FORMATS[side.format].encode(x.float(), side.block, side.key, **six)
    codes, scales = unpack_codes(encoded.codes), encoded.scales.view(torch.uint8)
    return encoded.block_values().bfloat16(), codes, scales, encoded.decode_scale()


def same(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Whether both are equal; NaN equals NaN, and +0 equals -0."""
    if actual is None or expected is None:
        return actual is expected
    actual = actual.cpu()
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def check(kernels: type[Fused], x: Tensor, along: str, given: Side, side: Side, made: Fused | None = None) -> None:
    """Compare one operand of x, in all its forms, with the reference. given: the side for the kernels; it differs from
    `side` if keys are in memory. made: the kernels' object, if it exists already."""
    values, codes, scales, scale = reference(x if along == "columns" else x.t(), side)
    made = made or kernels(x.cuda(), **{along: given})
    vars(made)["operand"] = cache(made.operand)
    # Codes do not matter if their scale is NaN. Large numbers may overflow in a transform.
    finite = x.isfinite().all() and (scale is None or scale.isfinite())
    code_bytes, scale_bytes = made.code_bytes(along)
    assert torch.equal(scale_bytes.cpu(), scales) or (side.ms_eden and not finite)
    assert torch.equal(unpack_codes(code_bytes.cpu()), codes) or not finite
    if not (side.ms_eden and along == "columns"):  # this operand can be made only once, as values
        packed = made.operand(along, keep=True)
        assert not isinstance(packed, Tensor) and same(packed.values(), values)
    found = made.operand(along)
    assert isinstance(found, Tensor) and same(found, values)
    assert same(made.scales.get(along), scale)


def sides(form: str) -> list[tuple[Side, Side]]:
    """The sides along columns and along rows of the recipes' x, W and dy."""
    row, square = FORMATS[form].blocks
    block = row[1]
    first, second = rounding_key(1, "a"), rounding_key(1, "b")
    return [
        (Side(form, row), Side(form, row, block)),
        (Side(form, square), Side(form, row)),
        (Side(form, row, key=first), Side(form, row, block, key=second)),
    ]


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_fp4(case: str, form: str) -> None:
    x = case_of(case)
    for columns, rows in sides(form):
        made = FusedFP4(x.cuda(), columns, rows)
        check(FusedFP4, x, "columns", columns, columns, made)
        check(FusedFP4, x, "rows", rows, rows, made)


@pytest.mark.parametrize("name", [name for name, case in CASES_OF_PARTS.items() if kernels_take(case)])
def test_parts_have_the_codes_of_the_whole(name: str) -> None:
    check_parts(CASES_OF_PARTS[name], "cuda")


@pytest.mark.parametrize("name", [name for name, case in CASES_OF_PARTS.items() if case[0].operand.drawn])
def test_rows_in_any_order_draw_by_their_positions(name: str) -> None:
    """As the tokens of an expert, which do not come in blocks or pairs."""
    case = CASES_OF_PARTS[name]
    index = torch.randperm(2**16)[: len(tensor(case, "cpu"))] + 2**33
    on_cpu, on_gpu = (made(tensor(case, kind), Place(Span(index.to(kind))), case) for kind in ("cpu", "cuda"))
    assert same(on_gpu.unpacked(), on_cpu.unpacked()) and same(on_gpu.scale, on_cpu.scale)


def in_memory(key: RoundingKey) -> RoundingKey:
    """`key` in device memory, as for CUDA graphs."""
    halves = torch.tensor([key.key & 0xFFFFFFFF, key.key >> 32, 0, 0], dtype=torch.int64)
    return replace(key, key=0, device=halves.to(torch.int32).cuda())


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_fp4_with_keys_in_memory(form: str) -> None:
    """Keys of one operand, of the other, or of both."""
    x, (columns, rows) = CASES["normal"].bfloat16(), sides(form)[2]
    first, second = (replace(side, key=in_memory(side.key)) for side in (columns, rows) if side.key is not None)
    for given in ((first, rows), (columns, second), (first, second)):
        made = FusedFP4(x.cuda(), *given)
        check(FusedFP4, x, "columns", given[0], columns, made)
        check(FusedFP4, x, "rows", given[1], rows, made)


@pytest.mark.parametrize("error", ["absolute", "squared"])
@pytest.mark.parametrize("case", CASES)
def test_four_over_six(case: str, error: str) -> None:
    side = Side("nvfp4", (1, 16), four_over_six=error)
    check(FusedFourOverSix, case_of(case), "columns", side, side)


def check_ms_eden(x: Tensor, device_keys: bool) -> None:
    key, signs = rounding_key(1, "a"), rounding_key(7, "signs")
    side = given = Side("nvfp4", (1, 16), 128, "fresh", key, signs_key=signs, ms_eden=True)
    if device_keys:
        given = replace(side, key=in_memory(key), signs_key=in_memory(signs))
    check(FusedMSEden, x, "rows", given, side)
    check(FusedMSEden, x.t().contiguous(), "columns", given, side)


@pytest.mark.parametrize("case", CASES)
def test_ms_eden(case: str) -> None:
    x = case_of(case)
    check_ms_eden(torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 128)), device_keys=False)


@pytest.mark.parametrize("rows, columns", [(128, 16), (128, 144), (256, 272) if INTERPRETED else (1280, 1408)])
def test_ms_eden_of_other_sizes_and_with_keys_in_memory(rows: int, columns: int) -> None:
    check_ms_eden(normal(rows, columns).bfloat16(), device_keys=True)


def test_the_branchless_reciprocal_is_correctly_rounded() -> None:
    # The blocks' scales are all E4M3 values, for tensor maxima of all BF16 mantissas and many exponents.
    scales, side = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), Side("nvfp4", (1, 16))
    for exponent in (-126, -110, -100, -64, -61, -60, -59, 0, 1, 60, 100, 119):
        amax = torch.linspace(1, 2, 129)[:-1].bfloat16().float() * 2.0**exponent
        for largest in amax[:: (8 if exponent else 1) * (32 if INTERPRETED else 1)].tolist():
            x = (scales / 448 * largest).bfloat16()[:, None] * torch.linspace(0.05, 1, 16)
            x = torch.cat((x, torch.full((2, 16), largest))).bfloat16().view(16, 128)
            made = FusedFP4(x.cuda(), side).operand("columns")
            assert isinstance(made, Tensor) and same(made, reference(x, side)[0]), largest


FP8_CASES = {
    "subnormals": normal(256, 256) * 1e-39,
    "of all magnitudes": normal(256, 256) * torch.exp2(torch.randint(-60, 60, (256, 256)).float()),
    "zeros, inf and nan": with_values(normal(256, 256) * (torch.arange(256) > 127), INF, 1.0, NAN),
}


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8(case: str, along: str, block_rows: int, power_of_two: bool) -> None:
    x, side = FP8_CASES[case].bfloat16(), Side("fp8", (block_rows, 128), power_of_two_scales=power_of_two)
    expected = quantize(x if along == "columns" else x.t(), "fp8", side.block, power_of_two_scales=power_of_two)
    for keep in (False, True):
        made = FusedFP8(x.cuda(), **{along: side}).operand(along, keep=keep)
        if power_of_two:
            assert isinstance(made, Tensor) and same(made, expected.dequantize(torch.bfloat16))
            continue
        assert isinstance(made, BlockScaled)
        assert same(made.scales, expected.scales[::block_rows])
        assert same(made.codes.float(), expected.codes.float()) or not x.isfinite().all()
        assert same(made.values(), expected.dequantize())


@pytest.mark.parametrize("m, n, k", [(80, 336, 512), (1040, 16, 1280)])
def test_fp8_products(m: int, n: int, k: int) -> None:
    a, b, side = normal(m, k).bfloat16().cuda(), normal(k, n).bfloat16().cuda(), Side("fp8", (1, 128))
    left, right = FusedFP8(a, side).operand("columns"), FusedFP8(b, rows=side).operand("rows", keep=True)
    assert isinstance(left, BlockScaled) and isinstance(right, BlockScaled)
    exact = left.values().double() @ right.values().double().t()
    product = matmul_fp8(left, right, torch.float32).double()
    assert (product - exact).norm() / exact.norm() < 1e-6


MXFP8_CASES = {
    **{name: CASES[name] for name in ("fp32 input", "larger than a program", "negative zeros", "nan")},
    "around powers of two": 448 * torch.exp2(torch.randint(-130, 110, (96, 224)).float()),
    "every bfloat16": (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32).reshape(512, 128),
}


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("case", MXFP8_CASES)
def test_mxfp8(case: str, along: str, block_rows: int) -> None:
    x, side = MXFP8_CASES[case].bfloat16(), Side("mxfp8", (block_rows, 32))
    given = (MXFP8_CASES[case] if case == "fp32 input" else x).cuda()
    expected = quantize(x if along == "columns" else x.t(), "mxfp8", side.block)
    fused = FusedMXFP8(given, **{along: side})
    made = fused.operand(along)
    assert isinstance(made, Tensor) and made.dtype == torch.bfloat16
    assert same(made, expected.dequantize(torch.bfloat16))
    finite = (expected.scales != 255).repeat_interleave(32, -1)  # codes do not matter if their scale is NaN
    codes, scales = fused.code_bytes(along)
    assert codes.is_contiguous() and torch.equal(codes.cpu()[finite], expected.codes.view(torch.uint8)[finite])
    assert torch.equal(scales.cpu(), expected.scales)
    if along == "rows":
        kept = fused.operand(along, keep=True)
        assert isinstance(kept, PackedMXFP8)
        assert same(kept.values(), expected.dequantize(torch.bfloat16))
        assert torch.equal(kept.scales.cpu().t(), expected.scales)
        assert torch.equal(kept.codes, codes.t())


def test_mxfp8_of_more_tokens_than_a_grid_has_rows() -> None:
    x, side = normal(32, 32).bfloat16().repeat(70_000, 1).cuda(), Side("mxfp8", (1, 32))
    for along in ALONG:
        made = FusedMXFP8(x, **{along: side}).operand(along)
        assert isinstance(made, Tensor)
        made = made if along == "columns" else made.t()
        assert torch.equal(made[-32:], made[:32])
