"""MS-EDEN on an NVIDIA GPU: operands rotated, quantized and corrected by the kernels of `triton_ms_eden.py`.

The numbers are those of `encode_ms_eden` behind `random_hadamard_transform` on a CPU, bit for bit. The kernels work
along the rows of a tensor; an operand along its columns is that of its transpose, which is made first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.code_buffers import new_pair
from megatron_fp4.quantization.cuda import Fused, Side, launch
from megatron_fp4.quantization.elements import E2M1_MAX
from megatron_fp4.quantization.fp4_cuda import PackedColumns, hash_starts
from megatron_fp4.quantization.ms_eden import BLOCK, GRID_LARGEST, GROUP, SCALE_MAX
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FACTOR = 1.0 / math.sqrt(GROUP)
_TOP = SCALE_MAX * E2M1_MAX
_SHARE = float(torch.tensor(GRID_LARGEST, dtype=torch.float32).reciprocal())
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_COLUMNS, _TILE = 128, 64  # of a program; the side of what is transposed at once
_MEASURE_PROGRAMS = 16  # per multiprocessor


class FusedMSEden(Fused):
    """A tensor [rows, columns], rows (columns) being whole groups where there is an operand along them."""

    def __init__(
        self, x: Tensor, columns: Side | None, rows: Side | None, *, amax_group: ProcessGroup | None = None
    ) -> None:
        """As `Fused` has it. Raises ValueError for sizes that do not divide."""
        super().__init__(x.to(torch.bfloat16).contiguous(), columns, rows, amax_group=amax_group)
        self._along_columns = self._along_rows = None
        if columns is not None:
            self._along_columns = _Rows(_transposed(self.x), columns, amax_group)
            self.columns_scale = self._along_columns.scale
        if rows is not None:
            self._along_rows = _Rows(self.x, rows, amax_group)
            self.rows_scale = self._along_rows.scale

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """MS-EDEN, behind its transform with signs that are drawn."""
        return side.ms_eden and side.hadamard == GROUP and side.signs == "fresh" and side.block == (1, BLOCK)

    def along_columns(self, *, keep: bool = False) -> Tensor:
        """BF16 values [n, k = m] in any case, once: the transpose is gone then."""
        made, self._along_columns = self._along_columns, None
        assert made is not None, "made before, or not asked for"
        return made.values()

    def along_rows(self, *, keep: bool = False) -> Tensor | PackedColumns:
        """BF16 values [m, k = n], or with `keep` their codes."""
        assert self._along_rows is not None
        return self._along_rows.packed() if keep else self._along_rows.values()

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """Codes uint8 [rows, k / 2], the even column in the low nibble, and scale bytes [rows, k / block]."""
        made = self._along_columns if along == "columns" else self._along_rows
        assert made is not None
        return made.packed().transposed()


class _Rows:
    """The operand [columns, k = rows] of a contiguous BF16 tensor whose maximum behind the transform is known."""

    def __init__(self, x: Tensor, side: Side, amax_group: ProcessGroup | None) -> None:
        if x.shape[0] % GROUP or x.shape[1] % BLOCK:
            raise ValueError(f"MS-EDEN: shape {tuple(x.shape)} is not a multiple of {GROUP} rows and {BLOCK} columns")
        assert side.key is not None and side.signs_key is not None
        self.x, self.key = x, side.key
        self.tiles, self.columns = x.shape[0] // GROUP, x.shape[1]
        self.scale = torch.empty((), device=x.device)
        self.signs = torch.empty(4, dtype=torch.int32, device=x.device)
        launch(
            "triton_ms_eden.signs_kernel",
            (1,),
            (self.signs, *_device_key(side.signs_key, self.signs)),
            {"DEVICE_KEY": side.signs_key.device is not None, **_OPTIONS},
        )
        self.amax = cuda.gpu.zeros(x.device)
        across = -(-self.columns // _COLUMNS)
        down = max(1, _MEASURE_PROGRAMS * cuda.gpu.multiprocessors(x.device) // across)
        launch(
            "triton_ms_eden.measure_kernel",
            (across, min(down, self.tiles)),
            (x.view(torch.int16), self.signs, self.amax, self.columns, self.tiles),
            {"FACTOR": _FACTOR, "COLUMNS": _COLUMNS, **_OPTIONS},
        )
        if amax_group is not None:
            # As integers NaN is the largest of all; as floats a reduction may lose it.
            dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=amax_group)

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]."""
        values = torch.empty_like(self.x)
        self._quantize(values, values, values, packed=False)
        return values.t()

    def packed(self) -> PackedColumns:
        """The same as 4-bit codes."""
        blocks, width = self.tiles * GROUP // BLOCK, self.columns // 2
        sizes = ((blocks, BLOCK // 4, width), torch.int32), ((blocks, width), torch.int16)
        codes, scales = new_pair(*sizes, self.x.device)
        self._quantize(self.x, codes.view(torch.int16), scales.view(torch.uint8), packed=True)
        return PackedColumns(codes, scales)

    def _quantize(self, values: Tensor, codes: Tensor, scales: Tensor, packed: bool) -> None:
        key = _device_key(self.key, self.amax)
        launch(
            "triton_ms_eden.quantize_kernel",
            (-(-self.columns // _COLUMNS) * self.tiles,),
            (
                self.x.view(torch.int16),
                self.signs,
                values,
                codes,
                scales,
                self.amax.view(torch.float32),
                self.scale,
                *key,
                self.columns,
            ),
            {
                "FACTOR": _FACTOR,
                "TOP": _TOP,
                "SHARE": _SHARE,
                "PACKED": packed,
                "DEVICE_KEY": self.key.device is not None,
                "COLUMNS": _COLUMNS,
                **_OPTIONS,
            },
        )


def _device_key(key: RoundingKey, stand_in: Tensor) -> tuple[Tensor, int, int]:
    """What kernels take of a key: where it lies on the device, and what the hashes of rows and of pairs start from."""
    start_row, start_column = hash_starts(key, columns_apart=BLOCK)
    return stand_in if key.device is None else key.device, start_row, start_column


def _transposed(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
    grid = (-(-x.shape[0] // _TILE) * -(-x.shape[1] // _TILE),)
    arguments = (x.view(torch.int16), out.view(torch.int16), *x.shape)
    launch("triton_ms_eden.transpose_kernel", grid, arguments, {"ROWS": _TILE, "COLUMNS": _TILE, **_OPTIONS})
    return out
