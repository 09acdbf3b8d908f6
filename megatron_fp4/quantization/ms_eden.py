"""MS-EDEN: unbiased NVFP4 that rounds elements to nearest and only block scales stochastically.

Source: Quartet II (arXiv 2601.22813). Rounding to nearest shrinks a tensor; stochastic rounding of the elements does
not, but doubles the error. MS-EDEN rounds a *randomly* rotated tensor to nearest, measures how much each group of
elements has shrunk, and corrects this in the group's block scales. These are E4M3 numbers, rounded stochastically, so
that the correction is right in the mean. Below, z [rows, cols] is already rotated, by a 128-point Hadamard transform
with random signs (`hadamard.py`) along the dot product. Blocks are 1x16; a *group* is the 128 elements (eight blocks)
that one transform mixes. In FP32, in this order:

    S       = min(M * 256 / amax, FLT_MAX), or 1 where that is 0        M = 6 / (17/16 * 0.93) = 6.0721
    scale   = e4m3(block_amax * (S * (1/M)))                            to nearest
    encode  = min(1 / (scale * (1/S)), FLT_MAX), or 0 where scale is 0
    u       = z * encode
    code    = e2m1(clamp(u, -6, 6))                                     to nearest, ties to the even code
    c       = sum(u * u) / sum(u * code), or 1 where the divisor is 0   both sums over the group
    scale'  = e4m3(scale * c)                                           stochastically, a draw for each block
    value   = code * scale' * amax / (M * 256)

A sum over a group first adds the 16 elements of each block one after another, then the eight blocks by halves (first
half plus second half, three times). A block's largest element is mapped to about M, not to 6, because the error after
the correction is smallest there; what exceeds 6 saturates, and c corrects that too. 256, not E4M3's 448, leaves room
for the corrected scale: |u| / code is at most 1.53, and above 1.24 only in blocks with subnormal scales.

Edge cases: Zeros, and blocks whose scale underflows, have zero codes and a zero scale. If the tensor has NaN or inf, so
has amax, and no value is finite. If amax is below M * 256 / FLT_MAX = 4.6e-36, the edge cases of `nvfp4.py` apply.

On an NVIDIA GPU, `FusedMSEden` rotates, quantizes and corrects with the kernels of `kernels/ms_eden.py`, with the same
bits. They work along the rows of a tensor. For an operand along the columns, the tensor is transposed first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda, rounding
from megatron_fp4.quantization.cuda import Fused, Kernel, Side, launch
from megatron_fp4.quantization.family import GRIDS
from megatron_fp4.quantization.fp4 import PackedColumns, hash_starts, new_pair
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.tensor import NVFP4Tensor, all_reduce_maxima, block_amax, scale_blocks

BLOCK, GROUP = 16, 128
GRID_LARGEST = 6.0 / (17 / 16 * 0.93)
_TOP = float(torch.tensor(256.0 * GRID_LARGEST, dtype=torch.float32))  # M * 256
SCALE_MAX = _TOP / rounding.E2M1_MAX  # `encode_tensor_scale` and `NVFP4Tensor` multiply it by 6

_FACTOR = 1.0 / math.sqrt(GROUP)
_SHARE = float(torch.tensor(GRID_LARGEST, dtype=torch.float32).reciprocal())
_COLUMNS = 128  # of a program
_MEASURE_PROGRAMS = 16  # per multiprocessor
_DRAW_SIGNS, _MEASURE = Kernel("ms_eden.signs_kernel"), Kernel("ms_eden.measure_kernel")
_QUANTIZE = Kernel("ms_eden.quantize_kernel")


def encode_ms_eden(rows: Tensor, key: rounding.RoundingKey, *, amax: Tensor | None = None) -> NVFP4Tensor:
    """Quantize rotated FP32 [rows, cols] by MS-EDEN; cols is a multiple of 128.

    key: for rounding the corrected scales, whose columns are a row's blocks. amax: 0-dim; None: of `rows`.
    """
    amax = rows.abs().amax() if amax is None else amax.to(torch.float32)
    tensor_scale = encode_tensor_scale(amax, SCALE_MAX)
    scale_factor = tensor_scale * torch.full_like(tensor_scale, GRID_LARGEST).reciprocal()
    scales = rounding.to_e4m3((block_amax(rows, (1, BLOCK)) * scale_factor).clamp(max=rounding.FP32_MAX)).to(
        torch.float32
    )
    encode = (scales * tensor_scale.reciprocal()).reciprocal().clamp(max=rounding.FP32_MAX)
    scaled = scale_blocks(rows, torch.where(scales == 0, torch.zeros_like(encode), encode))
    codes = rounding.round_e2m1_nearest(scaled.clamp(-rounding.E2M1_MAX, rounding.E2M1_MAX))
    corrected = scales * _correction(scaled, codes).repeat_interleave(GROUP // BLOCK, dim=1)
    block_key = key.at(rounding.Place(key.place.rows, key.place.columns.blocks(BLOCK)))
    scales = GRIDS["e4m3"].round(corrected.clamp(max=rounding.E4M3_MAX), block_key).to(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scales, (1, BLOCK), rows < 0, amax=amax, scale_max=SCALE_MAX)


def _correction(scaled: Tensor, codes: Tensor) -> Tensor:
    """c, FP32 [rows, groups]: the factor by which rounding to nearest has shrunk each group."""
    divisor = _group_sums(scaled * codes)
    correction = _group_sums(scaled * scaled) / divisor
    return torch.where(divisor == 0, torch.ones_like(correction), correction)


def _group_sums(values: Tensor) -> Tensor:
    blocks = values.unflatten(-1, (-1, GROUP // BLOCK, BLOCK))
    total = blocks[..., 0]
    for column in range(1, BLOCK):
        total = total + blocks[..., column]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


class FusedMSEden(Fused):
    """MS-EDEN kernels for a tensor [rows, columns]. Rows (columns) with an operand along them are a multiple of 128."""

    def __init__(
        self, x: Tensor, columns: Side | None = None, rows: Side | None = None, place: rounding.Place = rounding.WHOLE
    ) -> None:
        super().__init__(x.to(torch.bfloat16).contiguous(), columns, rows, place)
        self._operands: dict[str, _OperandAlongRows] = {}
        for along, side in self.sides.items():
            at_rows = (self.x, place) if along == "rows" else (self.x.t().contiguous(), place.t())
            self._operands[along] = _OperandAlongRows(*at_rows, side)
            self.scales[along] = self._operands[along].scale

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """MS-EDEN in blocks of one row, after a 128-point transform with drawn signs."""
        return side.ms_eden and side.hadamard == GROUP and side.signs == "fresh" and side.block == (1, BLOCK)

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedColumns:
        """BF16 values, or along the rows with `keep` codes. Along the columns it can be made once."""
        if along == "columns":
            return self._operands.pop(along).values()
        return self._operands[along].packed() if keep else self._operands[along].values()

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """Codes uint8 [rows, k / 2], the even column in the low nibble, and scale bytes [rows, k / block]."""
        return self._operands[along].packed().transposed()


class _OperandAlongRows:
    """The operand [columns, k = rows] of a contiguous BF16 tensor [rows, columns]. The constructor draws the signs of
    the transform and measures amax after it."""

    def __init__(self, x: Tensor, place: rounding.Place, side: Side) -> None:
        assert x.shape[0] % GROUP == x.shape[1] % BLOCK == 0, f"MS-EDEN: {tuple(x.shape)}"
        assert side.key is not None and side.signs_key is not None
        self.x, self.key = x, side.key.at(place.t())
        self.tiles, self.columns = x.shape[0] // GROUP, x.shape[1]
        self.scale = torch.empty((), device=x.device)
        self.signs = torch.empty(4, dtype=torch.int32, device=x.device)
        launch(
            _DRAW_SIGNS,
            (1,),
            (self.signs, *_key_arguments(side.signs_key, self.signs)),
            {"DEVICE_KEY": side.signs_key.device is not None},
        )
        self.amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        column_programs = -(-self.columns // _COLUMNS)
        tile_programs = max(1, _MEASURE_PROGRAMS * cuda.gpu.multiprocessors(x.device) // column_programs)
        launch(
            _MEASURE,
            (column_programs, min(tile_programs, self.tiles)),
            (x.view(torch.int16), self.signs, self.amax, self.columns, self.tiles),
            {"FACTOR": _FACTOR, "COLUMNS": _COLUMNS},
        )
        all_reduce_maxima(self.amax, place.amax_groups)

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]."""
        values = torch.empty_like(self.x)
        self._quantize(values, values, values, packed=False)
        return values.t()

    def packed(self) -> PackedColumns:
        blocks, width = self.tiles * GROUP // BLOCK, self.columns // 2
        layouts = ((blocks, BLOCK // 4, width), torch.int32), ((blocks, width), torch.int16)
        codes, scales = new_pair(*layouts, self.x.device)
        self._quantize(self.x, codes.view(torch.int16), scales.view(torch.uint8), packed=True)
        return PackedColumns(codes, scales)

    def _quantize(self, values: Tensor, codes: Tensor, scales: Tensor, packed: bool) -> None:
        tensors = self.x.view(torch.int16), self.signs, values, codes, scales, self.amax.view(torch.float32), self.scale
        constants = {"FACTOR": _FACTOR, "TOP": _TOP, "SHARE": _SHARE, "PACKED": packed, "COLUMNS": _COLUMNS}
        indices = {"rows": self.key.place.rows.at, "columns": self.key.place.columns.at}
        index = next(((name, at) for name, at in indices.items() if isinstance(at, Tensor)), ("", self.amax))
        launch(
            _QUANTIZE,
            (-(-self.columns // _COLUMNS) * self.tiles,),
            (*tensors, *_key_arguments(self.key, self.amax), self.columns, index[1]),
            {**constants, "DEVICE_KEY": self.key.device is not None, "INDEX": index[0]},
        )


def _key_arguments(key: rounding.RoundingKey, placeholder: Tensor) -> tuple[Tensor, int, int]:
    """A kernel's arguments for a key: its device memory, and first arguments of the hashes of rows and block pairs."""
    start_row, start_column = hash_starts(key, columns_apart=BLOCK)
    return placeholder if key.device is None else key.device, start_row, start_column
