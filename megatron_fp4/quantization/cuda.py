"""The 4-bit quantizers on an NVIDIA GPU: what the fused kernels take, and their launches.

`quantize_both` makes the two GEMM operands of a tensor [rows, columns] from one read (two with the tensor maximum of
NVFP4): one with its dot product along the columns, one along the rows. The numbers are those of `quantize_nvfp4` and
`quantize_mxfp4` on a CPU, bit for bit, stochastic rounding included. `kernels_unavailable` and `Side.fused` say where
the kernels do not apply; PyTorch on the GPU then computes the same numbers, slowly.

Triton is imported when first needed: a machine without an NVIDIA GPU never needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
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
_MEASURE_PROGRAMS, _QUANTIZE_PROGRAMS, _MAX_TILES = 8, 12, 4  # programs per multiprocessor; row tiles per program


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
    """One operand that `quantize_both` is to make.

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
        kernels = _kernels()
        block = BLOCKS[self.format]
        rows, columns = self.shape
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.codes.device)
        groups, warps = _shape(block)
        grid = (-(-columns // block // groups), rows // block)
        with torch.cuda.device(values.device):
            kernels.unpack_kernel[grid](
                self.codes, self.scales, values.view(torch.int32), rows, columns // block,
                BLOCK=block, GROUPS=groups, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
        return values


@dataclass(frozen=True)
class FusedOperands:
    """What `quantize_both` returns; parts that were not asked for are None.

    along_columns: BF16 values [rows, columns]. along_rows: the same, or `PackedColumns`.
    columns_scale, rows_scale: FP32 0-dim factors from values to real values (None for mxfp4, which has none).
    """

    along_columns: Tensor | None
    columns_scale: Tensor | None
    along_rows: Tensor | PackedColumns | None
    rows_scale: Tensor | None


def quantize_both(
    x: Tensor,
    columns: Side | None,
    rows: Side | None,
    *,
    pack_rows: bool = False,
    amax_group: ProcessGroup | None = None,
) -> FusedOperands:
    """The operands of `x` [rows, columns] with the dot product along its columns, and along its rows.

    x: BF16, or FP32 that counts as rounded to BF16; both sizes multiples of the block. columns, rows: what to make, of
    one format. pack_rows: keep the operand along the rows as 4-bit codes. amax_group: ranks that hold the other shards.
    Raises ValueError for sizes that do not divide.
    """
    form = (columns or rows).format  # type: ignore[union-attr]
    block = BLOCKS[form]
    if x.shape[0] % block or x.shape[1] % block:
        raise ValueError(f"{form}: shape {tuple(x.shape)} is not a multiple of {block} in both dimensions")
    kernels = _kernels()
    x = x.contiguous() if x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)
    num_rows, num_columns = x.shape
    pairs = x.view(torch.int32 if x.dtype == torch.bfloat16 else torch.int64)
    hadamard = rows is not None and rows.hadamard > 0
    columns_key, rows_key = (None if side is None else side.key for side in (columns, rows))
    groups, warps = _shape(block)
    transform: dict[str, Any] = {
        "HADAMARD": hadamard,
        "SIGNS": _sign_bits(block) if rows is not None and hadamard and rows.signs == "fixed" else 0,
        "FACTOR": 1.0 / math.sqrt(block),
        "FP32": x.dtype == torch.float32,
        "GROUPS": groups,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    column_programs, row_tiles = -(-num_columns // block // groups), num_rows // block
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    amax, hashes = pairs, pairs  # stand-ins that the kernels do not read
    with torch.cuda.device(x.device):
        if form == "nvfp4":
            amax = torch.zeros(2, dtype=torch.int32, device=x.device)
        if columns_key is not None or rows_key is not None:
            hashes = torch.empty(2 * (num_rows + num_columns), dtype=torch.int32, device=x.device)
        if amax is not pairs or hashes is not pairs:
            row_programs = max(1, min(row_tiles, _MEASURE_PROGRAMS * processors // column_programs))
            kernels.measure_kernel[column_programs, row_programs](
                pairs, amax, hashes, num_rows, num_columns // block,
                # The operand along the rows has the tensor's columns as its rows.
                *_hash_starts(columns_key), *reversed(_hash_starts(rows_key)),
                BLOCK=block, AMAX=form == "nvfp4", HASH_0=columns_key is not None, HASH_1=rows_key is not None,
                **transform,
            )  # fmt: skip
        if form == "nvfp4" and amax_group is not None:
            # As integers NaN is the largest of all; as floats a reduction may lose it.
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=amax_group)
        decode = torch.empty(2, dtype=torch.float32, device=x.device)
        values = None if columns is None else torch.empty_like(x, dtype=torch.bfloat16)
        other: Tensor | PackedColumns | None = None
        if rows is not None and pack_rows:
            other = PackedColumns(
                torch.empty(row_tiles, block // 4, num_columns // 2, dtype=torch.int32, device=x.device),
                torch.empty(row_tiles, num_columns // 2, dtype=torch.int16, device=x.device),
                form,
            )
        elif rows is not None:
            other = torch.empty_like(x, dtype=torch.bfloat16)
        tiles = max(1, min(_MAX_TILES, row_tiles * column_programs // (_QUANTIZE_PROGRAMS * processors)))
        kernels.quantize_kernel[column_programs, -(-row_tiles // tiles)](
            pairs,
            pairs if values is None else values.view(torch.int32),
            pairs if other is None else other.codes if isinstance(other, PackedColumns) else other.view(torch.int32),
            other.scales if isinstance(other, PackedColumns) else pairs,
            amax.view(torch.float32), decode, hashes, num_rows, num_columns // block, tiles,
            BLOCK=block, ROW=0 if columns is None else columns.block_rows, ROW_STOCHASTIC=columns_key is not None,
            COLUMN=rows is not None, COLUMN_STOCHASTIC=rows_key is not None, COLUMN_PACKED=pack_rows, **transform,
        )  # fmt: skip
    scales = (decode[0], decode[1 if hadamard else 0]) if form == "nvfp4" else (None, None)
    return FusedOperands(values, None if columns is None else scales[0], other, None if rows is None else scales[1])


def scale_and_cast(x: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """`(x * alpha).to(dtype)` of contiguous FP32 `x` in one pass, `alpha` FP32 0-dim on the device."""
    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device(x.device):
        _kernels().scale_cast_kernel[(-(-x.numel() // 4096),)](x, alpha, out, x.numel(), SIZE=4096, num_warps=8)
    return out


def _kernels() -> Any:
    from megatron_fp4.quantization import triton_kernels

    return triton_kernels


def _shape(block: int) -> tuple[int, int]:
    """Groups of `block` columns, and warps, of one program."""
    return (64, 4) if block == 16 else (16, 4)


@functools.cache
def _sign_bits(size: int) -> int:
    return sum(1 << i for i, sign in enumerate(fixed_signs(size).tolist()) if sign < 0)


def _hash_starts(key: RoundingKey | None) -> tuple[int, int]:
    """First arguments of the hashes of rows and of columns, as signed 32-bit integers (see `rounding.py`)."""
    if key is None:
        return 0, 0
    starts = (key.row_offset * _GOLDEN + key.key, key.column_offset * _GOLDEN + (key.key >> 32))
    return tuple(((start & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for start in starts)  # type: ignore[return-value]
