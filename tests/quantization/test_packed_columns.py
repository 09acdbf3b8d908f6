"""Codes that the kernels pack along the rows are, transposed, the packed codes of the transpose."""

import pytest
import torch

from megatron_fp4.quantization.formats import unpack_codes
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.rounding import rounding_key
from tests.quantization import kernel_layout


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (160, 32), (400, 272)])
def test_the_transpose_in_bytes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= -1000
    expected = quantize_nvfp4(x.t(), rounding="stochastic", key=rounding_key(1))
    packed = kernel_layout.words(unpack_codes(expected.codes).t(), expected.scales.view(torch.uint8).t())
    assert packed.shape == shape
    codes, scales = packed.transposed()
    assert codes.is_contiguous()
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scales, expected.scales.view(torch.uint8))


def test_each_code_is_where_the_kernels_say():
    """Nibble r of a word's low half is row r of four in the even column, of its high half in the odd one."""
    codes = torch.zeros(16, 4, dtype=torch.uint8)
    codes[4 + 2, 3], codes[4 + 3, 2] = 0xA, 0xF
    packed = kernel_layout.words(codes, torch.zeros(1, 4, dtype=torch.uint8))
    assert packed.codes[0, 1, 1].item() & 0xFFFFFFFF == 0xA << (16 + 8) | 0xF << 12
    assert packed.codes.count_nonzero() == 1
