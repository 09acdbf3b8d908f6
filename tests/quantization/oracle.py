"""A second, independent implementation of the number formats, written from the papers and not from the package.

All of it is NumPy: FP32 where the formats are defined in FP32 (`np.float32` operations round once each), FP64 where a
result must be exact. The small formats are tables; rounding picks the nearest entry of the table, on a tie the even
code. Nothing is fast, and nothing is shared with the package.

Sources: arXiv 2509.25149 appendix B (NVFP4), B.4 and section 5 (MXFP4), A.1 (FP8 blocks), appendix C (Hadamard); arXiv
2512.02010 (four over six); the OCP microscaling specification 1.0 and arXiv 2506.08027 (MXFP8). Shapes: every function
takes a matrix [rows, columns]; blocks lie along the columns. Only `block_values` takes and returns torch's tensors.
"""

from dataclasses import dataclass

import numpy as np
import torch

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max

# The value of each E2M1 code (sign bit 8, exponent bits 6, mantissa bit 1).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# The 127 non-negative finite values of E4M3, indexed by code; 448 is the last, code 127 is NaN.
E4M3 = np.array(
    [(c / 8) * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)], dtype=np.float64
)


def nearest(magnitude: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the entry of the ascending table that is nearest to each magnitude; on a tie the even code."""
    distance = np.abs(magnitude.astype(np.float64)[..., None] - table)
    tied = distance == distance.min(axis=-1, keepdims=True)
    assert tied.sum(axis=-1).max(initial=1) <= 2
    return np.argmin(np.where(tied, np.arange(len(table)) % 2, 2), axis=-1).astype(np.uint8)


def e2m1(x: np.ndarray) -> np.ndarray:
    """E2M1 codes of values within +-6; a negative number that rounds to zero gets 8, +0 and -0 get 0."""
    return nearest(np.abs(x), E2M1[:8]) + np.where(x < 0, 8, 0).astype(np.uint8)


def e4m3(x: np.ndarray) -> np.ndarray:
    """Values within +-448 rounded to E4M3, in FP64."""
    return np.copysign(E4M3[nearest(np.abs(x), E4M3)], x)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """FP64 rounded once to BF16 (8 significant bits, smallest spacing 2^-133), ties to even."""
    x = np.asarray(x, dtype=np.float64)
    spacing = np.exp2(np.maximum(np.frexp(x)[1] - 8, -133))
    return np.rint(x / spacing) * spacing


@dataclass(frozen=True)
class Quantized:
    """codes: E2M1 codes or E4M3 values, [rows, columns]. scales: one per block of a row, [rows, blocks]. values: FP64,
    decoded."""

    codes: np.ndarray
    scales: np.ndarray
    amax: float
    values: np.ndarray


def _block_amax(x: np.ndarray, block_rows: int, width: int) -> np.ndarray:
    """Largest magnitude of each block, repeated for the block's rows: [rows, blocks]."""
    rows, columns = x.shape
    blocks = np.abs(x).reshape(rows // block_rows, block_rows, columns // width, width)
    return np.repeat(blocks.max(axis=(1, 3)), block_rows, axis=0)


def _spread(per_block: np.ndarray, width: int) -> np.ndarray:
    return np.repeat(per_block, width, axis=1)


def block_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 `code * block scale` [rows, columns] of NVFP4, exact. codes: uint8 [rows, columns / 2], the low nibble
    first. scales: E4M3 [rows, columns / 16]."""
    packed, table = codes.numpy(), np.append(E4M3, np.nan)
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)
    decoded = np.append(table, -table)[scales.view(torch.uint8).numpy()]
    return torch.from_numpy((E2M1[nibbles] * _spread(decoded, 16)).astype(F32))


def tensor_scale(amax: np.float32, cap: float = 448) -> np.float32:
    """Step 1: S, which maps the largest block scale to `cap`; a true division in FP32."""
    scale = min(F32(6 * cap) / amax, FLT_MAX)
    return F32(1) if scale == 0 else scale


def wanted_scale(block_amax: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
    """Step 2 before the rounding to E4M3; the 1/6 is first folded into the tensor scale."""
    return block_amax * (tensor_scale * (F32(1) / F32(6)))


def _encode(x: np.ndarray, scale: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
    """Steps 3 and 4: the codes of x for E4M3 block scales; encode = 1 / (scale * (1 / S)), a true division."""
    decode = scale.astype(F32) * (F32(1) / tensor_scale)
    scaled = x * _spread(np.minimum(F32(1) / decode, FLT_MAX), 16)
    assert scaled.dtype == np.float32
    return e2m1(np.clip(scaled, F32(-6), F32(6)))


def nvfp4(x: np.ndarray, block_rows: int = 1, four_over_six: bool = False, squared: bool = False) -> Quantized:
    """NVFP4 with 1x16 (block_rows = 1) or 16x16 blocks (appendix B, in FP32, in this order).

    four_over_six: the tensor scale maps to 256; each block keeps the scale that maps to 6 unless the scale that maps to
    4 (1.5 times as large) has the smaller sum of absolute (or `squared`) errors.
    """
    x = np.asarray(x, dtype=F32)
    cap = 256.0 if four_over_six else 448.0
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(initial=0).astype(F32)
        block_amax = _block_amax(x, block_rows, 16)
        factor = tensor_scale(amax, cap)
        # Transformer Engine folds the 1/6 into the tensor scale only without four over six.
        wanted = block_amax / F32(6) * factor if four_over_six else wanted_scale(block_amax, factor)
        wanted = np.minimum(wanted, FLT_MAX)
        assert wanted.dtype == np.float32
        scale = e4m3(np.clip(wanted, F32(-448), F32(448)))
        codes = _encode(x, scale, factor)
        if four_over_six:
            scale_4 = e4m3(np.clip(np.minimum(wanted * F32(1.5), FLT_MAX), F32(-448), F32(448)))
            codes_4 = _encode(x, scale_4, factor)
            error_6 = _fp32_error(x, codes, scale, amax, block_rows, squared)
            error_4 = _fp32_error(x, codes_4, scale_4, amax, block_rows, squared)
            scale = np.where(error_4 < error_6, scale_4, scale)
            codes = np.where(_spread(error_4 < error_6, 16), codes_4, codes)
    return Quantized(codes, scale, float(amax), E2M1[codes] * _spread(scale, 16) * (float(amax) / (6 * cap)))


def _fp32_error(
    x: np.ndarray, codes: np.ndarray, scale: np.ndarray, amax: np.float32, block_rows: int, squared: bool
) -> np.ndarray:
    """Sums of absolute or squared errors in the order of Transformer Engine: the columns of a block one after another,
    then its rows by halves. The roundings decide between choices whose exact errors are equal."""
    # A tensor whose errors would overflow is scaled down; a power of two changes no digit.
    unit = F32(2.0**-20 if 1e34 < amax < np.inf else 1)
    decoded = E2M1[codes].astype(F32) * _spread(scale, 16).astype(F32) * (amax * unit) / F32(6 * 256)
    error = np.abs(decoded - x * unit).reshape(len(x), -1, 16)
    if squared:
        error = np.square(error * F32(2.0 ** -np.floor(np.log2(amax))) if amax > 0 else error)
    assert error.dtype == np.float32
    per_row = np.zeros(error.shape[:2], dtype=F32)
    for column in range(16):
        per_row = per_row + error[..., column]
    if block_rows == 1:
        return per_row
    tiles = per_row.reshape(len(x) // 16, 16, -1)
    for half in (8, 4, 2, 1):
        tiles = tiles[:, :half] + tiles[:, half : 2 * half]
    return np.repeat(tiles[:, 0], 16, axis=0)


def _power_of_two_up(wanted: np.ndarray) -> np.ndarray:
    """The smallest powers of two in 2^-127 .. 2^127 that are not below `wanted` (FP64)."""
    powers = np.exp2(np.arange(-127, 128, dtype=np.float64))
    return powers[np.minimum(np.searchsorted(powers, wanted), len(powers) - 1)]


def mxfp4(x: np.ndarray, block_rows: int = 1) -> Quantized:
    """MXFP4 with 1x32 or 32x32 blocks: the smallest power of two s in 2^-127 .. 2^127 with amax <= 6 s."""
    x = np.asarray(x, dtype=F32)
    scale = _power_of_two_up(_block_amax(x, block_rows, 32).astype(np.float64) / 6)
    codes = e2m1(np.clip(x / _spread(scale, 32), -6, 6))
    return Quantized(codes, scale, float(np.abs(x).max(initial=0)), E2M1[codes] * _spread(scale, 32))


def mxfp8(x: np.ndarray, block_rows: int = 1) -> Quantized:
    """MXFP8 with 1x32 or 32x32 blocks: the smallest power of two s in 2^-127 .. 2^127 with amax * (1/448) <= s, a
    product in FP32. `codes` are the E4M3 values."""
    x = np.asarray(x, dtype=F32)
    wanted = _block_amax(x, block_rows, 32) * (F32(1) / F32(448))
    assert wanted.dtype == np.float32
    scale = _power_of_two_up(wanted.astype(np.float64))
    values = e4m3(np.clip(x.astype(np.float64) / _spread(scale, 32), -448, 448))
    return Quantized(values, scale, float(np.abs(x).max(initial=0)), values * _spread(scale, 32))


def fp8(x: np.ndarray, block_rows: int = 1, power_of_two: bool = False) -> Quantized:
    """E4M3 with 1x128 or 128x128 blocks: encode = 448 / amax, optionally rounded down to a power of two; decode =
    1 / encode. `codes` are the E4M3 values, `scales` the FP32 decode scales. A block of zeros has zero codes for any
    scale."""
    x = np.asarray(x, dtype=F32)
    block_amax = _block_amax(x, block_rows, 128)
    with np.errstate(all="ignore"):
        encode = np.minimum(F32(448) / block_amax, FLT_MAX)
        if power_of_two:
            encode = np.exp2(np.frexp(encode)[1].astype(np.float64) - 1).astype(F32)
        decode = F32(1) / encode
        scaled = x * _spread(encode, 128)
        assert scaled.dtype == np.float32 and decode.dtype == np.float32
    values = e4m3(np.clip(scaled, F32(-448), F32(448)))
    return Quantized(values, decode, float(block_amax.max(initial=0)), values * _spread(decode, 128).astype(np.float64))


PAPER_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float64)


def rht(x: np.ndarray, signs: np.ndarray = PAPER_SIGNS) -> np.ndarray:
    """(x diag(signs) H) / sqrt(size) on tiles of size len(signs) along the last dimension, in FP64; H is Sylvester's
    matrix."""
    size = len(signs)
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    tiles = np.asarray(x, dtype=np.float64).reshape(-1, size)
    return ((tiles * signs) @ hadamard / np.sqrt(size)).reshape(x.shape)


# The family: (exponent bits, mantissa bits, number of non-negative values). 8-bit formats have no value for the last
# code, e5m2 none for the last exponent; scales use the sign's bit for nothing.
FLOATS = {
    "e2m1": (2, 1, 8), "e1m2": (1, 2, 8), "e3m2": (3, 2, 32), "e2m3": (2, 3, 32), "e1m6": (1, 6, 127),
    "e2m5": (2, 5, 127), "e3m4": (3, 4, 127), "e4m3": (4, 3, 127), "e5m2": (5, 2, 124), "e6m1": (6, 1, 127),
    "e5m3": (5, 3, 255),
}  # fmt: skip


def values_of(name: str) -> np.ndarray:
    """The non-negative values of a format of `FLOATS`, by code."""
    exponent, mantissa, count = FLOATS[name]
    code, bias = np.arange(count), 2 ** (exponent - 1) - 1
    fraction, field = (code % 2**mantissa) / 2**mantissa, code >> mantissa
    return np.where(field == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (field - bias))


def _within(x: np.ndarray, scope: str) -> np.ndarray:
    """The largest magnitude of each element's scope, of the shape of x."""
    if scope == "column":
        return np.broadcast_to(np.abs(x).max(axis=0), x.shape)
    rows = {"tensor": x.reshape(1, -1), "row": x, "128": x.reshape(-1, 128)}[scope]
    return np.broadcast_to(np.abs(rows).max(axis=1, keepdims=True), rows.shape).reshape(x.shape)


def family(x: np.ndarray, name: str, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A format of quantization/family.py: (clamped x * encode, FP32; signed code values; decoded values, FP64)."""
    parts = name.split("_")
    element, scope = parts[0], next((part for part in parts if part in ("tensor", "row", "column", "128")), "")
    scale = parts[1] if parts[1] != scope else ""
    table, largest = values_of(element), F32(values_of(element).max())
    if scope == "column" and scale:
        with np.errstate(all="ignore"):
            top = largest * F32(values_of(scale).max())
            scaled, codes, values = family(
                x * np.minimum(top / _within(x, scope), FLT_MAX), f"{element}_{scale}", block
            )
        return scaled, codes, values * (_within(x, scope) / float(top))
    with np.errstate(all="ignore"):
        if not scale:
            encode = np.minimum(largest / _within(x, scope), FLT_MAX)
            encode = np.where(_within(x, scope) == 0, F32(1), encode)
            decode = (F32(1) / encode).astype(np.float64)
        else:
            amax = _spread(_block_amax(x, *block), block[1])
            top = F32(2.0**127 if scale == "e8m0" else values_of(scale).max())
            factor = np.minimum(largest * top / _within(x, scope), FLT_MAX) if scope else np.ones_like(x)
            if scale == "e8m0":
                scales = _power_of_two_up(amax.astype(np.float64) / float(largest))
            else:
                wanted = np.minimum(amax * (factor * (F32(1) / largest)) if scope else amax / largest, top)
                scales = values_of(scale)[nearest(wanted, values_of(scale))]
            encode = np.minimum(F32(1) / (scales.astype(F32) * (F32(1) / factor)), FLT_MAX)
            decode = scales * (_within(x, scope).astype(np.float64) / float(largest * top) if scope else 1)
        scaled = np.clip(x * encode, -largest, largest)
    assert scaled.dtype == np.float32
    codes = np.copysign(table[nearest(np.abs(scaled), table)], x)
    return scaled, codes, codes * decode
