"""The 4-bit quantizers on an NVIDIA GPU: what the fused kernels take, and their launches.

`Measured` makes the two GEMM operands of a tensor [rows, columns]: one with its dot product along the columns, one
along the rows. The numbers are those of `quantize_nvfp4` and `quantize_mxfp4` on a CPU, bit for bit, stochastic
rounding included. `kernels_unavailable` and `Side.fused` say where the kernels do not apply; PyTorch on the GPU then
computes the same numbers, slowly.

Triton is imported when first needed: a machine without an NVIDIA GPU never needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.quantization.hadamard import fixed_signs
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BLOCKS = {"nvfp4": 16, "mxfp4": 32}
_GOLDEN = 0x9E3779B9
_KERNELS = "megatron_fp4.quantization.triton_kernels"

# Sizes of programs, found on an H200: blocks side by side, programs per multiprocessor, tiles of rows per program.
_MEASURE_GROUPS = {"nvfp4": 32, "mxfp4": 16}
_COLUMNS_GROUPS = {"nvfp4": 32, "mxfp4": 16}
_ROWS_GROUPS = {"nvfp4": 16, "mxfp4": 8}
_MEASURE_PROGRAMS, _QUANTIZE_PROGRAMS, _MAX_TILES = 16, 24, 4
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


@functools.cache
def kernels_unavailable(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on `device`, or None if they can: compute capability 8.0 and Triton."""
    if device.type != "cuda":
        return f"{device.type} is not an NVIDIA GPU"
    if torch.version.hip is not None:
        return "AMD GPUs are not supported by the kernels"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


@dataclass(frozen=True)
class Side:
    """One operand that `Measured` is to make.

    format: `nvfp4` or `mxfp4`. block_rows: 1, or the block's size for square blocks.
    hadamard: size of the transform along the dot product, 0 for none. signs: `fixed` or `none`.
    key: of the draws of stochastic rounding; None rounds to nearest. Its row and column are those of the operand, whose
        columns are the dot product.
    """

    format: str
    block_rows: int = 1
    hadamard: int = 0
    signs: str = "fixed"
    key: RoundingKey | None = None

    def fused(self, along: str) -> bool:
        """Whether the kernels can make this operand along `columns` or along `rows`."""
        if self.format not in BLOCKS:
            return False
        if along == "columns":
            return self.hadamard == 0
        return self.block_rows == 1 and self.hadamard in (0, BLOCKS[self.format]) and self.signs in ("fixed", "none")


@dataclass(frozen=True)
class PackedColumns:
    """An operand along the rows as 4-bit codes, in the kernels' own order (see `triton_kernels.py`).

    codes: int32 [rows / block, block / 4, columns / 2]; scales: int16 [rows / block, columns / 2].
    """

    codes: Tensor
    scales: Tensor
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the tensor that the codes stand for."""
        tiles, quarters, width = self.codes.shape
        return tiles * quarters * 4, width * 2

    def values(self) -> Tensor:
        """BF16 [rows, columns]: `code * block scale`."""
        block = BLOCKS[self.format]
        rows, columns = self.shape
        groups = _ROWS_GROUPS[self.format]
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.codes.device)
        grid = (-(-columns // block // groups) * (rows // block),)
        arguments = (self.codes, self.scales, values, rows, columns // block)
        _launch("unpack_kernel", grid, arguments, (block, groups))
        return values


class Measured:
    """A tensor [rows, columns] whose maxima are known: makes its operands, each when it is asked for.

    columns_scale, rows_scale: FP32 0-dim factors from values to real values (None for mxfp4, which has none); they are
    written when the operand is made.
    """

    def __init__(
        self, x: Tensor, columns: Side | None, rows: Side | None, *, amax_group: ProcessGroup | None = None
    ) -> None:
        """x: BF16, or FP32 that counts as rounded to BF16; both sizes multiples of the block. columns, rows: what will
        be made along its columns and along its rows, of one format. amax_group: ranks that hold the other shards.

        Raises ValueError for sizes that do not divide.
        """
        self.form = (columns or rows).format  # type: ignore[union-attr]
        self.block = BLOCKS[self.form]
        if x.shape[0] % self.block or x.shape[1] % self.block:
            shape = tuple(x.shape)
            raise ValueError(f"{self.form}: shape {shape} is not a multiple of {self.block} in both dimensions")
        x = x.contiguous()
        self.x = x.clone() if x.data_ptr() % 16 else x  # the kernels load 16 bytes at a time
        self.columns, self.rows = columns, rows
        self.size = (x.shape[0], x.shape[1] // self.block)
        hadamard = rows is not None and rows.hadamard > 0
        signs = _sign_bits(self.block) if rows is not None and hadamard and rows.signs == "fixed" else 0
        self._transform = (hadamard, signs, 1.0 / math.sqrt(self.block))
        self._fp32 = x.dtype == torch.float32
        self._amax = self._hashes = self.x  # stand-ins that no kernel reads
        scaled = self.form == "nvfp4"
        self.columns_scale = torch.empty((), device=x.device) if scaled and columns is not None else None
        self.rows_scale = torch.empty((), device=x.device) if scaled and rows is not None else None
        self._measure(*(None if side is None else side.key for side in (columns, rows)))
        if self.form == "nvfp4" and amax_group is not None:
            # As integers NaN is the largest of all; as floats a reduction may lose it.
            dist.all_reduce(self._amax, op=dist.ReduceOp.MAX, group=amax_group)

    def _measure(self, columns_key: RoundingKey | None, rows_key: RoundingKey | None) -> None:
        stochastic = columns_key is not None or rows_key is not None
        if self.form == "nvfp4":
            self._amax = torch.zeros(2, dtype=torch.int32, device=self.x.device)
        elif not stochastic:
            return
        if stochastic:
            # Operand 0: rows, pairs of columns; operand 1: pairs of rows, columns.
            rows, columns = self.x.shape
            self._hashes = torch.empty(3 * (rows + columns) // 2, dtype=torch.int32, device=self.x.device)
        groups = _MEASURE_GROUPS[self.form]
        column_programs = -(-self.size[1] // groups)
        row_programs = max(1, _MEASURE_PROGRAMS * _processors(self.x.device) // column_programs)
        # The operand along the rows has the tensor's columns as its rows.
        starts = (*_hash_starts(columns_key), *reversed(_hash_starts(rows_key)))
        hashed = (columns_key is not None, rows_key is not None)
        _launch(
            "measure_kernel",
            (column_programs, min(row_programs, self.size[0] // self.block)),
            (self.x, self._amax, self._hashes, *self.size, *starts),
            (self.block, self.form == "nvfp4", *self._transform, *hashed, self._fp32, groups),
        )

    def along_columns(self) -> Tensor:
        """BF16 values [rows, columns] with the dot product along the columns."""
        assert self.columns is not None
        values = torch.empty_like(self.x, dtype=torch.bfloat16)
        grid, tiles = self._grid(groups := _COLUMNS_GROUPS[self.form])
        _launch(
            "quantize_columns_kernel",
            grid,
            (self.x, values, self._amax, self._or_x(self.columns_scale), self._hashes, *self.size, tiles),
            (self.block, self.columns.block_rows, self.columns.key is not None, self._fp32, groups),
        )
        return values

    def along_rows(self) -> Tensor:
        """BF16 values [rows, columns] with the dot product along the rows."""
        values = torch.empty_like(self.x, dtype=torch.bfloat16)
        self._quantize_rows(values, values, packed=False)
        return values

    def packed_rows(self) -> PackedColumns:
        """The same as 4-bit codes."""
        tiles, width, device = self.x.shape[0] // self.block, self.x.shape[1] // 2, self.x.device
        codes = torch.empty(tiles, self.block // 4, width, dtype=torch.int32, device=device)
        scales = torch.empty(tiles, width, dtype=torch.int16, device=device)
        self._quantize_rows(codes, scales, packed=True)
        return PackedColumns(codes, scales, self.form)

    def _quantize_rows(self, out: Tensor, scales: Tensor, packed: bool) -> None:
        assert self.rows is not None
        grid, tiles = self._grid(groups := _ROWS_GROUPS[self.form])
        _launch(
            "quantize_rows_kernel",
            grid,
            (self.x, out, scales, self._amax, self._or_x(self.rows_scale), self._hashes, *self.size, tiles),
            (self.block, self.rows.key is not None, packed, *self._transform, self._fp32, groups),
        )

    def _or_x(self, scale: Tensor | None) -> Tensor:
        return self.x if scale is None else scale

    def _grid(self, groups: int) -> tuple[tuple[int], int]:
        """The grid of a quantizing kernel, and how many tiles of rows each program does."""
        column_programs, row_tiles = -(-self.size[1] // groups), self.size[0] // self.block
        programs = _QUANTIZE_PROGRAMS * _processors(self.x.device)
        tiles = max(1, min(_MAX_TILES, row_tiles * column_programs // programs))
        return (column_programs * -(-row_tiles // tiles),), tiles


def scale_and_cast(x: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """`(x * alpha).to(dtype)` of contiguous FP32 `x` in one pass, `alpha` FP32 0-dim on the device."""
    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device(x.device):
        kernel = importlib.import_module(_KERNELS).scale_cast_kernel
        kernel[(-(-x.numel() // 4096),)](x, alpha, out, x.numel(), SIZE=4096, num_warps=8)
    return out


def _launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """Launch the kernel `name` with its run-time arguments and its constants, both in the order of its signature.

    Raises ValueError for more programs than CUDA starts.
    """
    for programs, most in zip(grid, _MOST_PROGRAMS, strict=False):
        if programs > most:
            raise ValueError(f"{name}: {programs} programs along one axis, and CUDA starts at most {most}")
    _start(name, grid, arguments, constants)


def _start(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """What `_launch` does once it has looked at the grid.

    Triton's own launch looks at every argument to choose among compiled variants, which takes longer than the smaller
    kernels run. Here the constants alone choose: the kernels specialize on no integer, and every pointer is aligned.
    """
    device = arguments[0].device
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        compiled = _compiled(name, device.index, arguments[0].dtype == torch.float32, constants)
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


@functools.cache
def _compiled(name: str, device_index: int, fp32: bool, constants: tuple[Any, ...]) -> Any:
    """The kernel `name` compiled for the current device, whose index is a key like the constants."""
    pairs, (i16, i32, f32) = torch.int64 if fp32 else torch.int32, (torch.int16, torch.int32, torch.float32)
    signatures = {
        "measure_kernel": (pairs, i32, i32, *([1] * 6)),
        "quantize_columns_kernel": (pairs, i32, f32, f32, i32, *([1] * 3)),
        "quantize_rows_kernel": (pairs, i32, i16, f32, f32, i32, *([1] * 3)),
        "unpack_kernel": (i32, i16, i32, *([1] * 2)),
    }
    kernel = getattr(importlib.import_module(_KERNELS), name)
    return kernel.warmup(*signatures[name], *constants, grid=(1,), num_warps=4, enable_fp_fusion=False)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _sign_bits(size: int) -> int:
    return sum(1 << i for i, sign in enumerate(fixed_signs(size).tolist()) if sign < 0)


def _hash_starts(key: RoundingKey | None) -> tuple[int, int]:
    """First arguments of the hashes of rows and of columns, as signed 32-bit integers (see `rounding.py`)."""
    if key is None:
        return 0, 0
    starts = (key.row_offset * _GOLDEN + key.key, key.column_offset // 2 * _GOLDEN + (key.key >> 32))
    return tuple(((start & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for start in starts)  # type: ignore[return-value]
