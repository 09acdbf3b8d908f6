"""MS-EDEN's and four over six's kernels against the PyTorch reference on the CPU, bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.elements import unpack_codes
from megatron_fp4.quantization.fp4 import FusedFourOverSix
from megatron_fp4.quantization.hadamard import random_hadamard_transform, random_signs
from megatron_fp4.quantization.ms_eden import FusedMSEden, quantize_ms_eden
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.rounding import RoundingKey, rounding_key
from megatron_fp4.quantization.tensor import NVFP4Tensor
from tests.gpu.test_quantizers import CASES, codes_and_scales, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY = rounding_key(1, "a", row_offset=2**33 + 48, column_offset=128 * 160)
SIGNS = rounding_key(7, "signs")


def on_device(key: RoundingKey) -> RoundingKey:
    """`key`, to be read from memory, as under CUDA graphs."""
    halves = torch.tensor([key.key & 0xFFFFFFFF, key.key >> 32, 0, 0], dtype=torch.int64)
    return replace(key, key=0, device=halves.to(torch.int32).cuda())


def side(device_keys: bool) -> Side:
    key, signs = (on_device(key) if device_keys else key for key in (KEY, SIGNS))
    return Side("nvfp4", (1, 16), 128, "fresh", key, signs_key=signs, ms_eden=True)


def padded(x: Tensor) -> Tensor:
    """With rows to a multiple of 128."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 128))


def reference(x: Tensor) -> NVFP4Tensor:
    rotated = random_hadamard_transform(x.bfloat16().t().contiguous(), 128, random_signs(128, SIGNS))
    return quantize_ms_eden(rotated, key=KEY)


def check(x: Tensor, device_keys: bool) -> None:
    expected = reference(x)
    finite = expected.amax.isfinite()  # large numbers may overflow in the transform
    values, scale = expected.block_values().bfloat16(), expected.decode_scale()
    along_rows = FusedMSEden(x.cuda(), None, side(device_keys))
    assert same(along_rows.along_rows(), values)
    assert same(along_rows.rows_scale, scale)
    packed = along_rows.along_rows(keep=True)
    assert same(packed.values(), values)
    codes, scales = codes_and_scales(packed)
    assert torch.equal(scales.t(), expected.scales.view(torch.uint8)) or not finite
    assert torch.equal(codes.t(), unpack_codes(expected.codes)) or not finite
    along_columns = FusedMSEden(x.t().contiguous().cuda(), side(device_keys), None)
    assert same(along_columns.along_columns(), values)
    assert same(along_columns.columns_scale, scale)


@pytest.mark.parametrize("case", CASES)
def test_values_codes_and_scales_of_ms_eden_are_those_of_the_reference(case):
    x = padded(CASES[case])
    check(x if case == "fp32 input" else x.bfloat16(), device_keys=False)


@pytest.mark.parametrize("rows, columns", [(128, 16), (128, 144), (1280, 1408)])
def test_ms_eden_of_other_sizes_and_with_keys_in_memory(rows, columns):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).bfloat16()
    check(x, device_keys=True)


@pytest.mark.parametrize("error", ["absolute", "squared"])
@pytest.mark.parametrize("case", CASES)
def test_codes_of_four_over_six_are_those_of_the_reference(case, error):
    x = CASES[case]
    expected = quantize_nvfp4(x.bfloat16(), four_over_six=True, four_over_six_error=error)
    wanted = Side("nvfp4", (1, 16), four_over_six=True, four_over_six_error=error)
    made = FusedFourOverSix((x if case == "fp32 input" else x.bfloat16()).cuda(), wanted, None)
    codes, scales = made.packed_columns()
    assert torch.equal(scales.cpu(), expected.scales.view(torch.uint8))
    assert torch.equal(unpack_codes(codes.cpu()), unpack_codes(expected.codes)) or not x.isfinite().all()
    assert same(made.along_columns(), expected.block_values().bfloat16())
    assert same(made.columns_scale, expected.decode_scale())
