"""NVFP4 and MXFP4 on an NVIDIA GPU, by the kernels of `kernels/fp4.py`.

The numbers are those of `encode_nvfp4` and `encode_mxfp4` on a CPU, bit for bit, stochastic rounding included.
`FusedFP4.makes` says where the kernels do not apply; PyTorch on the GPU then computes the same numbers, slowly.

Codes and block scales of an operand lie side by side in one buffer: ranks send each other one message, not two. A
tensor of several ranks' slices is then [ranks, codes | scales], and codes and scales are views of it whose first
dimension is the rank; the kernels that unpack them read them where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Fused, Kernel, Side, launch
from megatron_fp4.quantization.hadamard import FIXED_SIGNS
from megatron_fp4.quantization.rounding import GOLDEN, RoundingKey
from megatron_fp4.quantization.square_blocks import aligned, unpack_parts
from megatron_fp4.quantization.tensor import all_reduce_maxima

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Sizes of programs, found on an H200: columns side by side, programs per multiprocessor, tiles of rows per program.
_MEASURE_COLUMNS, _QUANTIZE_COLUMNS, _QUANTIZE_SQUARES, _UNPACK_COLUMNS = 512, 1024, 512, 1024
_QUANTIZE_ROWS_COLUMNS = {16: 256, 32: 128}  # by the block, of which a thread has all rows
_MEASURE_PROGRAMS, _QUANTIZE_PROGRAMS, _MAX_TILES = 16, 24, 4
_ROWS = 8  # of a tile of blocks of one row
_FOUR_OVER_SIX_BLOCKS = 128  # of a program, one in a thread

_U8, _I16, _I32, _F32 = torch.uint8, torch.int16, torch.int32, torch.float32
_MEASURE = Kernel("fp4.measure_kernel", types=(None, _I32, _I32, *([1] * 6), _I32, _I32))
_QUANTIZE_ALONG_COLUMNS = Kernel(
    "fp4.quantize_columns_kernel", types=(None, _I32, _U8, _U8, _F32, _F32, _I32, *([1] * 3))
)
_QUANTIZE_ALONG_ROWS = Kernel(
    "fp4.quantize_rows_kernel", num_warps=2, types=(None, _I32, _I16, _F32, _F32, _I32, *([1] * 3))
)
_UNPACK = Kernel("fp4.unpack_kernel", types=(_I32, _I16, _I32, *([1] * 4)))
_FOUR_OVER_SIX = Kernel("fp4.four_over_six_kernel")


Layout = tuple[Sequence[int], torch.dtype]  # shape and dtype


def new_pair(codes: Layout, scales: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scales in one buffer; both begin on 16 bytes if the codes are whole 16 bytes."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in (codes, scales))
    first, second = _split(torch.empty(1, size, dtype=torch.uint8, device=device), codes, scales)
    return first[0], second[0]


def _split(messages: Tensor, codes: Layout, scales: Layout) -> tuple[Tensor, Tensor]:
    """Codes and scales [ranks, ...] as views of uint8 [ranks, bytes]; codes, scales: on one rank."""
    parts, start = [], 0
    for shape, dtype in (codes, scales):
        end = start + math.prod(shape) * dtype.itemsize
        parts.append(messages[:, start:end].view(dtype).unflatten(1, tuple(shape)))
        start = end
    return parts[0], parts[1]


@dataclass(frozen=True)
class _Packed:
    """An operand as 4-bit codes; or those of several ranks' slices, whose first dimension is then the rank."""

    codes: Tensor
    scales: Tensor

    def message(self) -> Tensor:
        """uint8 [1, bytes]: codes and scales one after the other, without a copy if `new_pair` made them."""
        first, second = (part.view(torch.uint8).flatten() for part in (self.codes, self.scales))
        size = first.numel() + second.numel()
        neighbours = second.storage_offset() == first.storage_offset() + first.numel()
        if neighbours and first.untyped_storage()._cdata == second.untyped_storage()._cdata:
            return first.as_strided((1, size), (size, 1))
        return torch.cat((first, second))[None]

    def joined(self) -> Callable[[Tensor], Any]:
        """What makes the ranks' messages, uint8 [ranks, bytes], the operand of all tokens."""
        codes, scales = ((part.shape, part.dtype) for part in (self.codes, self.scales))
        packing = type(self)
        return lambda messages: packing(*_split(messages, codes, scales))


class PackedRows(_Packed):
    """The operand along the columns of a tensor [rows, columns].

    codes: uint8 [rows, columns / 2], the even column in the low nibble; scales: uint8 [rows, columns / block]. Or of
    several ranks, [ranks, rows / ranks, ...], each rank's in one piece.
    """

    def values(self) -> Tensor:
        """BF16 [rows, k = columns]: `code * block scale`."""
        several = self.codes.dim() == 3
        return unpack_parts(*(part if several else part[None] for part in (self.codes, self.scales)))


class PackedColumns(_Packed):
    """The operand along the rows of a tensor [rows, columns], in the kernels' order (`kernels/fp4.py`).

    codes: int32 [rows / block, block / 4, columns / 2]; scales: int16 [rows / block, columns / 2]. Or of several ranks
    [ranks, rows / ranks / block, ...], each rank's in one piece.
    """

    def transposed(self) -> tuple[Tensor, Tensor]:
        """The transpose in bytes: codes uint8 [columns, rows / 2], the even row in the low nibble, and scale bytes
        [columns, rows / block].

        A half of a word is four rows' codes of one column, and the even column is the low half: as int16 in memory,
        [rows / 4, columns] to be transposed.
        """
        codes = self.codes.view(torch.int16).flatten(0, -2).t().contiguous().view(torch.uint8)
        return codes, self.scales.view(torch.uint8).flatten(0, -2).t()

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]: `code * block scale`."""
        several = self.codes.dim() == 4
        codes, scales = (part if several else part[None] for part in (self.codes, self.scales))
        parts, tiles, quarters, width = codes.shape
        block, columns = quarters * 4, width * 2
        groups = _UNPACK_COLUMNS // block
        values = torch.empty(parts * tiles * block, columns, dtype=torch.bfloat16, device=codes.device)
        grid = (-(-columns // block // groups) * parts * tiles,)
        sizes = (columns // block, tiles, codes.stride(0), scales.stride(0))
        launch(_UNPACK, grid, (codes, scales, values, *sizes), {"BLOCK": block, "GROUPS": groups})
        return values.t()


class FusedFP4(Fused):
    """A tensor [rows, columns], both whole blocks, whose maxima and hashes of draws are known."""

    def __init__(
        self, x: Tensor, columns: Side | None = None, rows: Side | None = None, amax_group: ProcessGroup | None = None
    ) -> None:
        x = aligned(x)
        super().__init__(x, columns, rows)
        of = columns or rows
        assert of is not None
        self.block = of.block[1]
        assert x.shape[0] % self.block == x.shape[1] % self.block == 0, f"{of.format}: {tuple(x.shape)}"
        self.size = (x.shape[0], x.shape[1] // self.block)
        hadamard = rows is not None and rows.hadamard > 0
        signs = FIXED_SIGNS & ((1 << self.block) - 1) if rows is not None and hadamard and rows.signs == "fixed" else 0
        self._transform = {"HADAMARD": hadamard, "SIGNS": signs, "FACTOR": 1.0 / math.sqrt(self.block)}
        self._fp32 = x.dtype == torch.float32
        self._amax = self._hashes = self.x  # stand-ins that no kernel reads
        self._scaled = of.format == "nvfp4"
        if self._scaled:
            self.scales = {along: torch.empty((), device=x.device) for along, side in self.sides.items() if side}
        self._measure(*(None if side is None else side.key for side in (columns, rows)))
        if self._scaled and amax_group is not None:
            all_reduce_maxima(self._amax, amax_group)

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Transforms of the block's size along the rows, blocks of one row there; no four-over-six, no MS-EDEN."""
        if side.four_over_six or side.ms_eden:
            return False
        if along == "columns":
            return side.hadamard == 0
        return side.block[0] == 1 and side.hadamard in (0, side.block[1]) and side.signs in ("fixed", "none")

    def _measure(self, columns_key: RoundingKey | None, rows_key: RoundingKey | None) -> None:
        stochastic = columns_key is not None or rows_key is not None
        if self._scaled:
            self._amax = cuda.gpu.zeros(self.x.device)
        elif not stochastic:
            return
        if stochastic:
            # Operand 0: rows, pairs of columns; operand 1: pairs of rows, columns.
            rows, columns = self.x.shape
            self._hashes = torch.empty(3 * (rows + columns) // 2, dtype=torch.int32, device=self.x.device)
        groups = _MEASURE_COLUMNS // self.block
        column_programs = -(-self.size[1] // groups)
        row_programs = max(1, _MEASURE_PROGRAMS * cuda.gpu.multiprocessors(self.x.device) // column_programs)
        # The operand along the rows has the tensor's columns as its rows.
        starts = (*hash_starts(columns_key), *reversed(hash_starts(rows_key)))
        on_device = [None if key is None else key.device for key in (columns_key, rows_key)]
        keys = [self._hashes if key is None else key for key in on_device]
        launch(
            _MEASURE,
            (column_programs, min(row_programs, self.size[0] // self.block)),
            (self.x, self._amax, self._hashes, *self.size, *starts, *keys),
            {
                "BLOCK": self.block,
                "AMAX": self._scaled,
                **self._transform,
                "HASH_0": columns_key is not None,
                "HASH_1": rows_key is not None,
                "DEVICE_KEY_0": on_device[0] is not None,
                "DEVICE_KEY_1": on_device[1] is not None,
                "FP32": self._fp32,
                "GROUPS": groups,
            },
        )

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedRows | PackedColumns:
        """BF16 values, or with `keep` their codes."""
        side = self.sides[along]
        assert side is not None
        return self._along_columns(side, keep) if along == "columns" else self._along_rows(side, keep)

    def _along_columns(self, side: Side, keep: bool) -> Tensor | PackedRows:
        rows, columns = self.x.shape
        if keep:
            sizes = ((rows, columns // 2), torch.uint8), ((rows, columns // self.block), torch.uint8)
            out = self.x, *new_pair(*sizes, self.x.device)
        else:
            out = (torch.empty_like(self.x, dtype=torch.bfloat16),) * 3
        square = side.block[0] > 1
        groups = (_QUANTIZE_SQUARES if square else _QUANTIZE_COLUMNS) // self.block
        tile_rows = self.block if square else _ROWS
        grid, tiles = self._grid(groups, tile_rows)
        launch(
            _QUANTIZE_ALONG_COLUMNS,
            grid,
            (self.x, *out, self._amax, self.scales.get("columns", self.x), self._hashes, *self.size, tiles),
            {
                "BLOCK": self.block,
                "BLOCK_ROWS": side.block[0],
                "ROWS": tile_rows,
                "STOCHASTIC": side.key is not None,
                "PACKED": keep,
                "FP32": self._fp32,
                "GROUPS": groups,
            },
        )
        return PackedRows(*out[1:]) if keep else out[0]

    def _along_rows(self, side: Side, keep: bool) -> Tensor | PackedColumns:
        if keep:
            blocks, width = self.x.shape[0] // self.block, self.x.shape[1] // 2
            sizes = ((blocks, self.block // 4, width), torch.int32), ((blocks, width), torch.int16)
            out, scales = new_pair(*sizes, self.x.device)
        else:
            out = scales = torch.empty_like(self.x, dtype=torch.bfloat16)
        groups = _QUANTIZE_ROWS_COLUMNS[self.block] // self.block
        grid, tiles = self._grid(groups, self.block)
        launch(
            _QUANTIZE_ALONG_ROWS,
            grid,
            (self.x, out, scales, self._amax, self.scales.get("rows", self.x), self._hashes, *self.size, tiles),
            {
                "BLOCK": self.block,
                "STOCHASTIC": side.key is not None,
                "PACKED": keep,
                **self._transform,
                "FP32": self._fp32,
                "GROUPS": groups,
            },
        )
        return PackedColumns(out, scales) if keep else out.t()

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """Codes uint8 [rows, k / 2], the even column in the low nibble, and scale bytes [rows, k / block]."""
        packed = self.operand(along, keep=True)
        assert not isinstance(packed, Tensor)
        return packed.transposed() if isinstance(packed, PackedColumns) else (packed.codes, packed.scales)

    def _grid(self, groups: int, rows: int) -> tuple[tuple[int], int]:
        """The grid of a quantizing kernel, and how many tiles of `rows` rows each program does."""
        column_programs, row_tiles = -(-self.size[1] // groups), self.size[0] // rows
        programs = _QUANTIZE_PROGRAMS * cuda.gpu.multiprocessors(self.x.device)
        tiles = max(1, min(_MAX_TILES, row_tiles * column_programs // programs))
        return (column_programs * -(-row_tiles // tiles),), tiles


class FusedFourOverSix(FusedFP4):
    """`FusedFP4` of four over six, for its operand along the columns: the kernel writes codes, and values are unpacked
    from them."""

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Untransformed blocks of one row, rounded to nearest, along the columns."""
        plain = not side.hadamard and side.key is None and side.block[0] == 1
        return plain and side.four_over_six != "" and along == "columns"

    def _along_columns(self, side: Side, keep: bool) -> Tensor | PackedRows:
        rows, columns = self.x.shape
        sizes = ((rows, columns // 2), torch.uint8), ((rows, columns // 16), torch.uint8)
        codes, scales = new_pair(*sizes, self.x.device)
        pairs, blocks = self.x.to(torch.bfloat16).view(torch.int32), self.x.numel() // 16
        launch(
            _FOUR_OVER_SIX,
            (-(-blocks // _FOUR_OVER_SIX_BLOCKS),),
            (pairs, codes.view(torch.int64), scales, self._amax.view(torch.float32), self.scales["columns"], blocks),
            {"SQUARED": side.four_over_six == "squared", "BLOCKS": _FOUR_OVER_SIX_BLOCKS},
        )
        packed = PackedRows(codes, scales)
        return packed if keep else packed.values()


def hash_starts(key: RoundingKey | None, columns_apart: int = 1) -> tuple[int, int]:
    """First arguments of the hashes of rows and of pairs of columns, as signed 32-bit integers (see `rounding.py`). The
    kernel adds a key that lies on the device. columns_apart: how many columns share a draw."""
    if key is None:
        return 0, 0
    low = 0 if key.device is not None else key.key
    pair = key.column_offset // columns_apart // 2
    starts = (key.row_offset * GOLDEN + low, pair * GOLDEN + (low >> 32))
    return tuple(((start & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for start in starts)  # type: ignore[return-value]
