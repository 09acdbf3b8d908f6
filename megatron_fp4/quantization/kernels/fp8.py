"""FP8 in blocks and MXFP8 as Triton kernels: the quantizers, bit for bit as the reference, and a GEMM for FP32 scales.

E4M3 codes times power-of-two scales (MXFP8, or FP8 with this option) are exact in BF16. Then an operand is a BF16
tensor of values, and an ordinary GEMM multiplies it. MXFP8 operands wait as codes for the backward pass.

Codes times FP32 scales are not exact in BF16. So tensor cores multiply the codes, which are, block by block along the
dot product, and each block's FP32 sum is multiplied by the scales of its two operands, as FP8 tensor cores do it:

    out[m, n] = sum over blocks j of  scale_a[m, j] * scale_b[n, j] * (sum over k in j of code_a[m, k] code_b[n, k])
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import nan_max, nearest_e4m3


@triton.jit
def quantize_kernel(
    x_ptr,  # [rows, columns], BF16, or FP32, which is rounded to BF16
    out_ptr,  # out: codes as bytes, codes as BF16, or values as BF16, in the layout of x
    scales_ptr,  # out, except with values: FP32 or UE8M0 scales, [rows / BLOCK_ROWS, columns / BLOCK_COLUMNS]
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,  # 128: FP8, 32: MXFP8
    BLOCK_ROWS: tl.constexpr,  # BLOCK or 1
    BLOCK_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,  # "fp32", "power of two" (in FP32) or "e8m0"
    OUT: tl.constexpr,  # "bytes", "codes" or "values"
):
    """Quantizes x [rows, columns] to E4M3 in blocks of 1 x BLOCK, BLOCK x 1 or BLOCK x BLOCK."""
    rows, columns = tile_of_blocks(BLOCK)
    mask = (rows < num_rows) & (columns < num_columns)
    offsets = rows.to(tl.int64) * num_columns + columns
    x = tl.load(x_ptr + offsets, mask, 0.0).to(tl.bfloat16).to(tl.float32)
    amax = tl.abs(x)
    if BLOCK_COLUMNS > 1:
        amax = tl.reduce(amax, 2, nan_max, keep_dims=True)
    if BLOCK_ROWS > 1:
        amax = tl.reduce(amax, 0, nan_max, keep_dims=True)
    if SCALES == "e8m0":
        # amax / 448, rounded up to a power of two. In exponent field 0, a mantissa of 0x400000 is 2^-127, the smallest.
        quotient = (amax * 0.002232142857142857).to(tl.int32, bitcast=True)
        exponent, mantissa = quotient >> 23, quotient & 0x7FFFFF
        scale = exponent + (mantissa > tl.where(exponent == 0, 0x400000, 0)).to(tl.int32)
        scale = tl.where(amax < float("inf"), scale, 255)
        encode = ((254 - scale) << 23).to(tl.float32, bitcast=True)
        decode = power_of_two(scale)
    else:
        encode = tl.minimum(tl.div_rn(448.0, amax), 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
        if SCALES == "power of two":
            encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        encode = tl.where(amax == 0.0, 1.0, encode)
        decode = tl.where(amax < float("inf"), tl.div_rn(1.0, encode), float("nan"))
        scale = decode

    scaled = x * encode
    magnitude = nearest_e4m3(tl.minimum(tl.abs(scaled), 448.0))
    negative = scaled.to(tl.int32, bitcast=True) & -2147483648
    if OUT == "bytes":
        byte = (magnitude * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20  # 2^-120
        tl.store(out_ptr + offsets, (byte | ((negative >> 24) & 0x80)).to(tl.uint8), mask)
    else:
        code = (magnitude.to(tl.int32, bitcast=True) | negative).to(tl.float32, bitcast=True)
        tl.store(out_ptr + offsets, (code if OUT == "codes" else code * decode).to(tl.bfloat16), mask)

    if OUT != "values":
        if BLOCK_ROWS > 1:
            rows = tl.program_id(0) + tl.zeros([1, 1, 1], tl.int32)
        if BLOCK_COLUMNS > 1:
            columns = tl.program_id(1) * (128 // BLOCK) + tl.arange(0, 128 // BLOCK)[None, :, None]
        width = num_columns // BLOCK_COLUMNS
        inside = (rows < num_rows // BLOCK_ROWS) & (columns < width)
        tl.store(scales_ptr + rows.to(tl.int64) * width + columns, scale.to(scales_ptr.dtype.element_ty), inside)


@triton.jit
def matmul_fp8_kernel(
    a_ptr,  # BF16 codes [m, k]
    b_ptr,  # BF16 codes [n, k]
    scales_a_ptr,  # FP32 [m / rows of a's block, k / 128]
    scales_b_ptr,  # FP32 [n / rows of b's block, k / 128]
    out_ptr,  # out: [m, n], BF16 or FP32
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    stride_scales_am,
    stride_scales_ak,
    stride_scales_bn,
    stride_scales_bk,
    A_ROWS: tl.constexpr,  # rows of a block: 1 or 128
    B_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """a [m, k] times the transpose of b [n, k], codes with FP32 block scales."""
    rows, columns, a_rows, b_rows = tile_of_program(m, n, BLOCK_M, BLOCK_N)
    inner = tl.arange(0, 64)
    a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + b_rows.to(tl.int64)[None, :] * stride_bn + inner[:, None] * stride_bk
    scales_a_ptr += (a_rows // A_ROWS) * stride_scales_am
    scales_b_ptr += (b_rows // B_ROWS) * stride_scales_bn
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, k // 64):
        product = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), product)
        a_ptrs += 64 * stride_ak
        b_ptrs += 64 * stride_bk
        if step % 2 == 1:
            scale_a = tl.load(scales_a_ptr + (step // 2) * stride_scales_ak)
            scale_b = tl.load(scales_b_ptr + (step // 2) * stride_scales_bk)
            total += product * (scale_a[:, None] * scale_b[None, :])
            product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def tile_of_program(m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a program's tile of a product [m, n], and the rows of both factors that it reads.

    Consecutive programs work on 8 blocks of rows and the same columns, so that they share what they read. Beyond the
    edge, programs read the first rows again and must not store the result. (Where rows are contiguous, the modulus does
    not split the 8 elements of a load, because features are multiples of 16.)
    """
    blocks_m, blocks_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = tl.program_id(0) // (8 * blocks_n)
    height = tl.minimum(blocks_m - band * 8, 8)
    place_in_band = tl.program_id(0) % (8 * blocks_n)
    rows = (band * 8 + place_in_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (place_in_band // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = tl.max_contiguous(tl.multiple_of(rows % m, 8), 8)
    b_rows = tl.max_contiguous(tl.multiple_of(columns % n, 8), 8)
    return rows, columns, a_rows, b_rows


@triton.jit
def decode_mxfp8_kernel(
    codes_ptr,  # bytes [rows, columns]
    scales_ptr,  # UE8M0 codes [rows / 32, columns]
    out_ptr,  # BF16 values [rows, columns]
    num_rows,
    num_columns,
):
    """Decodes code bytes [rows, columns] with UE8M0 scales [rows / 32, columns]."""
    rows, columns = tile_of_blocks(32)
    mask = (rows < num_rows) & (columns < num_columns)
    offsets = rows.to(tl.int64) * num_columns + columns
    byte = tl.load(codes_ptr + offsets, mask, 0).to(tl.int32)
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + row * num_columns + columns, columns < num_columns, 0).to(tl.int32)
    magnitude = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    code = (magnitude.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + offsets, (code * power_of_two(scale)).to(tl.bfloat16), mask)


@triton.jit
def tile_of_blocks(BLOCK: tl.constexpr):
    """Row and column indices of a program's tile of BLOCK x 128, as [rows, blocks, columns of a block]."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    block = tl.program_id(1) * (128 // BLOCK) + tl.arange(0, 128 // BLOCK)[None, :, None]
    return rows, block * BLOCK + tl.arange(0, BLOCK)[None, None, :]


@triton.jit
def power_of_two(scale):
    """FP32 values of UE8M0 codes; 255 is NaN."""
    bits = tl.where(scale == 0, 0x400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
