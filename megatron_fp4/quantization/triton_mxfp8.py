"""MXFP8 as Triton kernels: the quantizer of `mxfp8.py` bit for bit.

E4M3 codes under powers of two are exact in BF16, so an operand is a BF16 tensor of values, and its GEMM an ordinary
one. What waits for the backward pass is kept as codes and decoded there.

A program does 32 rows and 128 columns, as [32, 4, 32]: rows, blocks, columns of a block.
"""

# ruff: noqa: D103 (kernels are documented by their arguments)
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.triton_fp8 import e4m3_bytes, nan_max, round_e4m3


@triton.jit
def quantize_mxfp8_kernel(
    x_ptr,  # [rows, columns], BF16, or FP32 that counts as rounded to BF16
    out_ptr,  # values as BF16, or codes as bytes, in the layout of x
    scales_ptr,  # out, with codes: UE8M0 codes, [rows, columns / 32] of 1x32, else [rows / 32, columns]
    num_rows,
    num_columns,
    BLOCK_ROWS: tl.constexpr,  # 1x32: along the columns, 32x1: along the rows, 32x32
    BLOCK_COLUMNS: tl.constexpr,
    CODES: tl.constexpr,  # codes rather than values
):
    rows, columns = _tile()
    mask = (rows < num_rows) & (columns < num_columns)
    offsets = rows.to(tl.int64) * num_columns + columns
    x = tl.load(x_ptr + offsets, mask, 0.0).to(tl.bfloat16).to(tl.float32)
    amax = tl.abs(x)
    if BLOCK_COLUMNS == 32:
        amax = tl.reduce(amax, 2, nan_max, keep_dims=True)
    if BLOCK_ROWS == 32:
        amax = tl.reduce(amax, 0, nan_max, keep_dims=True)
    # Rounded up to a power of two; in exponent field 0 a mantissa of 0x400000 is 2^-127, the smallest.
    quotient = (amax * 0.002232142857142857).to(tl.int32, bitcast=True)
    exponent, mantissa = quotient >> 23, quotient & 0x7FFFFF
    scale = exponent + (mantissa > tl.where(exponent == 0, 0x400000, 0)).to(tl.int32)
    scale = tl.where(amax < float("inf"), scale, 255)
    scaled = x * ((254 - scale) << 23).to(tl.float32, bitcast=True)
    magnitude = round_e4m3(scaled)
    negative = scaled.to(tl.int32, bitcast=True) & -2147483648
    if CODES:
        tl.store(out_ptr + offsets, e4m3_bytes(magnitude, negative), mask)
        if BLOCK_ROWS == 1:
            block, num_blocks = tl.program_id(1) * 4 + tl.arange(0, 4)[None, :, None], num_columns // 32
            inside = (rows < num_rows) & (block < num_blocks)
            tl.store(scales_ptr + rows.to(tl.int64) * num_blocks + block, scale.to(tl.uint8), inside)
        else:
            row = tl.program_id(0).to(tl.int64)
            tl.store(scales_ptr + row * num_columns + columns, _broadcast(scale).to(tl.uint8), columns < num_columns)
    else:
        code = (magnitude.to(tl.int32, bitcast=True) | negative).to(tl.float32, bitcast=True)
        tl.store(out_ptr + offsets, (code * _power_of_two(scale)).to(tl.bfloat16), mask)


@triton.jit
def decode_mxfp8_kernel(
    codes_ptr,  # bytes [rows, columns]
    scales_ptr,  # UE8M0 codes [rows / 32, columns]
    out_ptr,  # BF16 values [rows, columns]
    num_rows,
    num_columns,
):
    rows, columns = _tile()
    mask = (rows < num_rows) & (columns < num_columns)
    offsets = rows.to(tl.int64) * num_columns + columns
    byte = tl.load(codes_ptr + offsets, mask, 0).to(tl.int32)
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + row * num_columns + columns, columns < num_columns, 0).to(tl.int32)
    magnitude = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    code = (magnitude.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + offsets, (code * _power_of_two(scale)).to(tl.bfloat16), mask)


@triton.jit
def _tile():
    rows = tl.program_id(0) * 32 + tl.arange(0, 32)[:, None, None]
    columns = tl.program_id(1) * 128 + tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    return rows, columns


@triton.jit
def _broadcast(scale):
    return scale + tl.zeros([1, 4, 32], tl.int32)


@triton.jit
def _power_of_two(scale):
    """FP32 value of UE8M0 codes; 255 is NaN."""
    bits = tl.where(scale == 0, 0x400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
