"""A weight kept as 4-bit codes, as an operand of the emulation: 0.56 bytes a parameter where values take 2.

fprop and dgrad multiply by one weight W [out, in] and its transpose. Square blocks rounded to nearest have the same
codes along both dimensions (`quantization/square_blocks.py`), so one packed copy serves both, for all micro-batches of
a step. A GEMM unpacks it to BF16 values, which are exact and gone behind it; a matrix product reads either orientation
as it lies. Unpacking reads and writes 2.6 bytes an element, some percent of the time of a GEMM of thousands of tokens.

Who makes the codes: `pack_weight` from the whole weight of this rank, or FSDP gathers the codes that ranks made of
their shards (`parallel/gathered_codes.py`). Both are the same bits.

On a CPU, and where the kernels do not run, values are kept instead (`keeps_codes`): unpacking is slow there in relation
to the products. The numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.elements import E4M3_MAX
from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows
from megatron_fp4.quantization.tensor import tensor_decode_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WeightPacking:
    """How codes and scales of a weight are to be read: as `blocks` say, of the whole weight; exchanged: transposed."""

    blocks: RowBlocks
    exchanged: bool = False

    def __call__(self, codes: Tensor, scales: Tensor) -> PackedWeight:
        """The weight that they are."""
        return PackedWeight(codes, scales, self)


@dataclass(frozen=True)
class PackedWeight:
    """Codes uint8 [out, in / 2] and scales uint8 [out, in / block] of a weight without its padding, contiguous."""

    codes: Tensor
    scales: Tensor
    packing: WeightPacking

    def values(self) -> Tensor:
        """BF16 `code * scale` [padded out, in], or exchanged [in, padded out]."""
        values = unpack_rows(self.codes, self.scales, self.packing.blocks)
        return values.t() if self.packing.exchanged else values

    def t(self) -> PackedWeight:
        """The same codes with rows and columns exchanged."""
        return PackedWeight(self.codes, self.scales, WeightPacking(self.packing.blocks, not self.packing.exchanged))


@dataclass(frozen=True)
class CodesOfWeight:
    """What was gathered instead of a weight [out, in]: codes and scales as `PackedWeight` has them, its `blocks`, and
    FP32 0-dim the factor of its values (None: 1)."""

    codes: Tensor
    scales: Tensor
    blocks: RowBlocks
    scale: Tensor | None


def hang_codes(weight: Tensor, codes: CodesOfWeight) -> None:
    """Let `weight`, which has no values, be known by its codes."""
    _local(weight)._codes_of_weight = codes  # type: ignore[attr-defined]


def codes_of(weight: Tensor) -> CodesOfWeight | None:
    """What `hang_codes` hung on `weight`; None: it has values."""
    return getattr(_local(weight), "_codes_of_weight", None)


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def keeps_codes(device: torch.device) -> bool:
    """Whether weights are kept as codes on `device`, not as values."""
    return cuda.gpu.available(device)


def packs(request: OperandRequest) -> bool:
    """Whether `quantization/square_blocks.py` makes this operand."""
    operand, size = request.operand, BLOCKS.get(request.operand.format)
    plain = not request.rht and request.key is None and not operand.four_over_six
    return plain and operand.rounding == "nearest" and operand.block == (size, size)


def pack_weight(
    w: Tensor, request: OperandRequest, group_rows: int, padded_group_rows: int, amax_group: ProcessGroup | None
) -> tuple[PackedWeight, Tensor | None]:
    """The weight `w` [out, in], BF16 or FP32 that counts as rounded to BF16, and the factor of its values.

    group_rows, padded_group_rows: of its groups of rows, see `RowBlocks`. amax_group: ranks that hold the other shards
    and share the maximum.
    """
    blocks = RowBlocks(request.operand.format, group_rows, padded_group_rows, 0, w.shape[0])
    maxima = block_maxima(w, blocks)
    amax = scale = None
    if blocks.format == "nvfp4":
        # As integers NaN is the largest of all; as floats a reduction may lose it.
        bits = maxima.view(torch.int32).amax()
        if amax_group is not None:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=amax_group)
        amax = bits.view(torch.float32)
        scale = tensor_decode_scale(amax, E4M3_MAX)
    return PackedWeight(*quantize_rows(w, blocks, maxima, amax), WeightPacking(blocks)), scale
