"""NVFP4 and MXFP4 on an NVIDIA GPU, by the kernels of `kernels/fp4.py`.

The numbers are those of `encode_nvfp4` and `encode_mxfp4` on a CPU, bit for bit, stochastic rounding included.
`FusedFP4.makes` says which operands the kernels can make; PyTorch on the GPU computes the others, slowly.

Codes and block scales of an operand share one buffer, so that ranks send each other one message, not two. A tensor of
several ranks' slices is then [ranks, codes | scales]. Its codes and scales are views whose first dimension is the rank,
and the unpacking kernels read these views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Fused, Kernel, Side, launch
from megatron_fp4.quantization.hadamard import FIXED_SIGNS
from megatron_fp4.quantization.nvfp4 import FOUR_OVER_SIX_SCALE_MAX
from megatron_fp4.quantization.rounding import E4M3_MAX, GOLDEN, WHOLE, Place, RoundingKey, Span
from megatron_fp4.quantization.square_blocks import aligned, unpack_by_kernel
from megatron_fp4.quantization.tensor import all_reduce_maxima, tensor_decode_scale

# Sizes that were fastest on an H200: columns of a program, programs per multiprocessor, tiles of rows of a program.
_MEASURE_COLUMNS, _QUANTIZE_COLUMNS, _QUANTIZE_SQUARES, _UNPACK_COLUMNS = 512, 1024, 512, 1024
_QUANTIZE_ROWS_COLUMNS = {16: 256, 32: 128}  # by the size of a block, all rows of which belong to one thread
_MEASURE_PROGRAMS, _QUANTIZE_PROGRAMS, _MAX_TILES = 16, 24, 4
_ROWS = 8  # of a tile, if blocks have one row
_FOUR_OVER_SIX_BLOCKS = 128  # of a program; each thread has one

_U8, _I16, _I32, _I64, _F32 = torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32
_MEASURE = Kernel("fp4.measure_kernel", types=(None, _I32, _I32, *([1] * 6), _I32, _I32, _I64, _I64, _I64))
_QUANTIZE_ALONG_COLUMNS = Kernel(
    "fp4.quantize_columns_kernel", types=(None, _I32, _U8, _U8, _F32, _F32, _I32, *([1] * 3), _I64, _I64)
)
_QUANTIZE_ALONG_ROWS = Kernel(
    "fp4.quantize_rows_kernel", num_warps=2, types=(None, _I32, _I16, _F32, _F32, _I32, *([1] * 3), _I64, _I64, _I64)
)
_UNPACK = Kernel("fp4.unpack_kernel", types=(_I32, _I16, _I32, *([1] * 4)))
_FOUR_OVER_SIX = Kernel("fp4.four_over_six_kernel")


Layout = tuple[Sequence[int], torch.dtype]  # shape and dtype


def new_pair(codes: Layout, scales: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scales in one buffer; both start at multiples of 16 bytes if the codes end at one."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in (codes, scales))
    first, second = _split(torch.empty(1, size, dtype=torch.uint8, device=device), codes, scales)
    return first[0], second[0]


def _split(messages: Tensor, codes: Layout, scales: Layout) -> tuple[Tensor, Tensor]:
    """Codes and scales [ranks, ...] as views of uint8 [ranks, bytes]. codes, scales: their layout on one rank."""
    parts, start = [], 0
    for shape, dtype in (codes, scales):
        end = start + math.prod(shape) * dtype.itemsize
        parts.append(messages[:, start:end].view(dtype).unflatten(1, tuple(shape)))
        start = end
    return parts[0], parts[1]


@dataclass(frozen=True)
class _Packed:
    """An operand as 4-bit codes, or the slices of several ranks, whose first dimension is then the rank."""

    codes: Tensor
    scales: Tensor

    def message(self) -> Tensor:
        """uint8 [1, bytes]: codes, then scales; without a copy if `new_pair` made them."""
        codes, scales = (part.view(torch.uint8).flatten() for part in (self.codes, self.scales))
        size = codes.numel() + scales.numel()
        adjacent = scales.storage_offset() == codes.storage_offset() + codes.numel()
        if adjacent and codes.untyped_storage()._cdata == scales.untyped_storage()._cdata:
            return codes.as_strided((1, size), (size, 1))
        return torch.cat((codes, scales))[None]

    def joined(self) -> Callable[[Tensor], Any]:
        """A function from the messages of all ranks, uint8 [ranks, bytes], to the operand of all tokens."""
        codes, scales = ((part.shape, part.dtype) for part in (self.codes, self.scales))
        packed_class = type(self)
        return lambda messages: packed_class(*_split(messages, codes, scales))


class PackedRows(_Packed):
    """The operand along the columns of a tensor [rows, columns].

    codes: uint8 [rows, columns / 2], the even column in the low nibble; scales: uint8 [rows, columns / block]. If they
    are of several ranks: [ranks, rows / ranks, ...], each rank's part contiguous.
    """

    def values(self) -> Tensor:
        """BF16 [rows, k = columns]: `code * block scale`."""
        codes, scales = self.codes, self.scales
        if codes.dim() == 2:
            codes, scales = codes[None], scales[None]
        return unpack_by_kernel(codes, scales, codes.shape[1])


class PackedColumns(_Packed):
    """The operand along the rows of a tensor [rows, columns], in the kernels' order (`kernels/fp4.py`).

    codes: int32 [rows / block, block / 4, columns / 2]; scales: int16 [rows / block, columns / 2]. If they are of
    several ranks: [ranks, rows / ranks / block, ...], each rank's part contiguous.
    """

    def transposed(self) -> tuple[Tensor, Tensor]:
        """The transpose in bytes: codes uint8 [columns, rows / 2], the even row in the low nibble, and scale bytes.

        A half of a word has the codes of four rows in one column: as int16 codes are [rows / 4, columns].
        """
        codes = self.codes.view(torch.int16).flatten(0, -2).t().contiguous().view(torch.uint8)
        return codes, self.scales.view(torch.uint8).flatten(0, -2).t()

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]: `code * block scale`."""
        codes, scales = self.codes, self.scales
        if codes.dim() == 3:
            codes, scales = codes[None], scales[None]
        parts, tiles, quarters, width = codes.shape
        block, columns = quarters * 4, width * 2
        blocks = _UNPACK_COLUMNS // block
        values = torch.empty(parts * tiles * block, columns, dtype=torch.bfloat16, device=codes.device)
        grid = (-(-columns // block // blocks) * parts * tiles,)
        sizes = (columns // block, tiles, codes.stride(0), scales.stride(0))
        launch(_UNPACK, grid, (codes, scales, values, *sizes), {"BLOCK": block, "BLOCKS": blocks})
        return values.t()


class FusedFP4(Fused):
    """NVFP4 and MXFP4 kernels for a tensor [rows, columns], both multiples of the block's size. The constructor
    measures amax, of each segment if there are segments, and hashes positions for stochastic rounding."""

    in_segments = True
    _scale_max = E4M3_MAX

    def __init__(self, x: Tensor, columns: Side | None = None, rows: Side | None = None, place: Place = WHOLE) -> None:
        x = aligned(x)
        super().__init__(x, columns, rows, place)
        side = next(iter(self.sides.values()))
        self.block = side.block[1]
        self._segments = segments = place.segments
        self._shape, rows_at = x.shape, place.rows.at
        self._rows: tuple[Tensor, Tensor] = x, x  # placeholders that no kernel reads
        if segments is not None:
            self._shape, rows_at = torch.Size((segments.padded_rows, x.shape[1])), segments.padded_positions
            has_padding = x.shape[0] != segments.rows or segments.padded_rows == segments.rows
            source = torch.arange(len(x), device=x.device) if has_padding else segments.unpadded_row
            self._rows = source, segments.segment_of
            self.place = place = Place(Span(rows_at), place.columns)
        assert self._shape[0] % self.block == x.shape[1] % self.block == 0, f"{side.format}: {tuple(self._shape)}"
        self._size = self._shape[0], x.shape[1] // self.block  # rows, and blocks along the columns
        hadamard = rows is not None and rows.hadamard > 0
        has_signs = rows is not None and hadamard and rows.signs == "fixed"
        signs = FIXED_SIGNS & ((1 << self.block) - 1) if has_signs else 0
        self._transform = {"HADAMARD": hadamard, "SIGNS": signs, "FACTOR": 1.0 / math.sqrt(self.block)}
        self._fp32 = x.dtype == torch.float32
        self._amax = self._hashes = self._index = self.x  # placeholders that no kernel reads
        self._indexed = isinstance(rows_at, Tensor)
        if isinstance(rows_at, Tensor):
            self._index = rows_at
        assert isinstance(place.columns.at, int), "the kernels take an index of rows only"
        self._has_tensor_scale = side.format == "nvfp4"
        if self._has_tensor_scale:
            self.scales = {along: torch.empty((), device=x.device) for along in self.sides}
        self._measure(columns.key if columns else None, rows.key if rows else None)
        if self._has_tensor_scale:
            all_reduce_maxima(self._amax, place.amax_groups)
            if segments is not None:
                amax = self._amax[:-1].view(torch.float32).t()
                scales = torch.empty(amax.shape, device=x.device)
                tensor_decode_scale(amax, self._scale_max, out=scales)
                self.scales = {"columns": scales[0], "rows": scales[int(hadamard)]}

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Along the columns: untransformed operands. Along the rows: blocks of one row, perhaps with a transform of the
        block's size and fixed signs or none. Neither four over six nor MS-EDEN."""
        if side.four_over_six or side.ms_eden:
            return False
        if along == "columns":
            return side.hadamard == 0
        return side.block[0] == 1 and side.hadamard in (0, side.block[1]) and side.signs in ("fixed", "none")

    def _measure(self, columns_key: RoundingKey | None, rows_key: RoundingKey | None) -> None:
        stochastic = columns_key is not None or rows_key is not None
        if self._has_tensor_scale:
            # With segments also of the rows after all of them.
            size = (2,) if self._segments is None else (len(self._segments.counts) + 1, 2)
            self._amax = torch.zeros(size, dtype=torch.int32, device=self.x.device)
        elif not stochastic:
            return
        if stochastic:
            # Hashes of operand 0: rows, pairs of columns; of operand 1: pairs of rows (rows with an index), columns.
            count = 3 * sum(self._shape) // 2 + (self._shape[0] // 2 if self._indexed else 0)
            self._hashes = torch.empty(count, dtype=torch.int32, device=self.x.device)
        blocks = _MEASURE_COLUMNS // self.block
        num_rows, num_blocks = self._size
        column_programs = -(-num_blocks // blocks)
        row_programs = max(1, _MEASURE_PROGRAMS * cuda.gpu.multiprocessors(self.x.device) // column_programs)
        # The rows of the operand along the rows are the tensor's columns.
        columns_key, rows_key = columns_key and columns_key.at(self.place), rows_key and rows_key.at(self.place.t())
        starts = (*hash_starts(columns_key), *reversed(hash_starts(rows_key)))
        device_keys = [None if key is None else key.device for key in (columns_key, rows_key)]
        key_arguments = [self._hashes if key is None else key for key in device_keys]
        launch(
            _MEASURE,
            (column_programs, min(row_programs, num_rows // self.block)),
            (self.x, self._amax, self._hashes, *self._size, *starts, *key_arguments, self._index, *self._rows),
            {
                "BLOCK": self.block,
                "SEGMENTED": self._segments is not None,
                "AMAX": self._has_tensor_scale,
                **self._transform,
                "HASH_0": columns_key is not None,
                "HASH_1": rows_key is not None,
                "DEVICE_KEY_0": device_keys[0] is not None,
                "DEVICE_KEY_1": device_keys[1] is not None,
                "INDEXED": self._indexed,
                "FP32": self._fp32,
                "BLOCKS": blocks,
            },
        )

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedRows | PackedColumns:
        """BF16 values, or with `keep` packed codes and scales."""
        side = self.sides[along]
        return self._along_columns(side, keep) if along == "columns" else self._along_rows(side, keep)

    def _along_columns(self, side: Side, keep: bool) -> Tensor | PackedRows:
        rows, columns = self._shape
        if keep:
            layouts = ((rows, columns // 2), torch.uint8), ((rows, columns // self.block), torch.uint8)
            codes, scales = new_pair(*layouts, self.x.device)
            values = self.x  # a placeholder
        else:
            values = codes = scales = torch.empty(self._shape, dtype=torch.bfloat16, device=self.x.device)
        square = side.block[0] > 1
        blocks = (_QUANTIZE_SQUARES if square else _QUANTIZE_COLUMNS) // self.block
        tile_rows = self.block if square else _ROWS
        grid, tiles = self._grid(blocks, tile_rows)
        decode_scale = self.scales.get("columns", self.x)
        launch(
            _QUANTIZE_ALONG_COLUMNS,
            grid,
            (self.x, values, codes, scales, self._amax, decode_scale, self._hashes, *self._size, tiles, *self._rows),
            {
                "BLOCK": self.block,
                "SEGMENTED": self._segments is not None,
                "BLOCK_ROWS": side.block[0],
                "ROWS": tile_rows,
                "STOCHASTIC": side.key is not None,
                "PACKED": keep,
                "FP32": self._fp32,
                "BLOCKS": blocks,
            },
        )
        return PackedRows(codes, scales) if keep else values

    def _along_rows(self, side: Side, keep: bool) -> Tensor | PackedColumns:
        if keep:
            row_blocks, width = self._shape[0] // self.block, self._shape[1] // 2
            layouts = ((row_blocks, self.block // 4, width), torch.int32), ((row_blocks, width), torch.int16)
            out, scales = new_pair(*layouts, self.x.device)
        else:
            out = scales = torch.empty(self._shape, dtype=torch.bfloat16, device=self.x.device)
        blocks = _QUANTIZE_ROWS_COLUMNS[self.block] // self.block
        grid, tiles = self._grid(blocks, self.block)
        tensors = self.x, out, scales, self._amax, self.scales.get("rows", self.x), self._hashes
        launch(
            _QUANTIZE_ALONG_ROWS,
            grid,
            (*tensors, *self._size, tiles, self._index, *self._rows),
            {
                "BLOCK": self.block,
                "SEGMENTED": self._segments is not None,
                "STOCHASTIC": side.key is not None,
                "INDEXED": self._indexed,
                "PACKED": keep,
                **self._transform,
                "FP32": self._fp32,
                "BLOCKS": blocks,
            },
        )
        return PackedColumns(out, scales) if keep else out.t()

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """Codes uint8 [rows, k / 2], the even column in the low nibble, and scale bytes [rows, k / block]."""
        packed = self.operand(along, keep=True)
        assert not isinstance(packed, Tensor)
        return packed.transposed() if isinstance(packed, PackedColumns) else (packed.codes, packed.scales)

    def _grid(self, blocks: int, tile_rows: int) -> tuple[tuple[int], int]:
        """A quantizing kernel's grid, and how many tiles of `tile_rows` rows and `blocks` blocks a program does."""
        num_rows, num_blocks = self._size
        column_programs, num_tiles = -(-num_blocks // blocks), num_rows // tile_rows
        programs = _QUANTIZE_PROGRAMS * cuda.gpu.multiprocessors(self.x.device)
        tiles = max(1, min(_MAX_TILES, num_tiles * column_programs // programs))
        return (column_programs * -(-num_tiles // tiles),), tiles


class FusedFourOverSix(FusedFP4):
    """Four over six along the columns. The kernel writes only codes; values are unpacked from them."""

    _scale_max = FOUR_OVER_SIX_SCALE_MAX

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Four over six in untransformed blocks of one row, rounded to nearest, along the columns."""
        plain = not side.hadamard and side.key is None and side.block[0] == 1
        return plain and side.four_over_six != "" and along == "columns"

    def _along_columns(self, side: Side, keep: bool) -> Tensor | PackedRows:
        rows, columns = self._shape
        layouts = ((rows, columns // 2), torch.uint8), ((rows, columns // 16), torch.uint8)
        codes, scales = new_pair(*layouts, self.x.device)
        pairs, segmented = self.x.to(torch.bfloat16).view(torch.int32), self._segments is not None
        blocks, programs = (columns // 16, rows) if segmented else (rows * (columns // 16), 1)
        tensors = codes.view(torch.int64), scales, self._amax.view(torch.float32), self.scales["columns"]
        launch(
            _FOUR_OVER_SIX,
            (-(-blocks // _FOUR_OVER_SIX_BLOCKS) * programs,),
            (pairs, *tensors, blocks, *self._rows),
            {"SEGMENTED": segmented, "SQUARED": side.four_over_six == "squared", "BLOCKS": _FOUR_OVER_SIX_BLOCKS},
        )
        packed = PackedRows(codes, scales)
        return packed if keep else packed.values()


def hash_starts(key: RoundingKey | None, columns_apart: int = 1) -> tuple[int, int]:
    """First arguments of the hashes of rows and of pairs of columns, as int32 (see `rounding.py`). If the key is in
    device memory, the kernel adds it; and so it does with an index of positions."""
    if key is None:
        return 0, 0
    bits = 0 if key.device is not None else key.key
    row, column = (span.at if isinstance(span.at, int) else 0 for span in (key.place.rows, key.place.columns))
    starts = (row * GOLDEN + bits, column // (2 * columns_apart) * GOLDEN + (bits >> 32))
    return tuple(((start & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for start in starts)  # type: ignore[return-value]
