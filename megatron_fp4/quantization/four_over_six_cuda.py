"""NVFP4 four over six on an NVIDIA GPU: blocks of one row along the columns (`triton_four_over_six.py`).

The codes are those of `quantize_nvfp4(..., four_over_six=True)` on a CPU, bit for bit. The kernel writes codes; values
are unpacked from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.code_buffers import new_pair
from megatron_fp4.quantization.cuda import Side, launch
from megatron_fp4.quantization.fp4_cuda import FusedFP4, PackedRows

_BLOCKS = 128  # of a program, one in a thread


class FusedFourOverSix(FusedFP4):
    """`FusedFP4` for its operand along the columns."""

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Untransformed blocks of one row, rounded to nearest, along the columns."""
        plain = side.four_over_six and not side.hadamard and side.key is None
        return plain and side.block[0] == 1 and along == "columns"

    def along_columns(self, *, keep: bool = False) -> Tensor | PackedRows:
        """BF16 values [rows, k = columns], or with `keep` their codes."""
        packed = PackedRows(*self.packed_columns())
        return packed if keep else packed.values()

    def packed_columns(self) -> tuple[Tensor, Tensor]:
        """Code bytes [rows, columns / 2], the even column in the low nibble, and scale bytes [rows, columns / 16]."""
        assert self.columns is not None and self.columns_scale is not None
        rows, columns = self.x.shape
        sizes = ((rows, columns // 2), torch.uint8), ((rows, columns // 16), torch.uint8)
        codes, scales = new_pair(*sizes, self.x.device)
        blocks = self.x.numel() // 16
        launch(
            "triton_four_over_six.quantize_kernel",
            (-(-blocks // _BLOCKS),),
            (
                self.x.to(torch.bfloat16).view(torch.int32),
                codes.view(torch.int64),
                scales,
                self._amax.view(torch.float32),
                self.columns_scale,
                blocks,
            ),
            {
                "SQUARED": self.columns.four_over_six_error == "squared",
                "BLOCKS": _BLOCKS,
                "num_warps": 4,
                "enable_fp_fusion": False,
            },
        )
        return codes, scales
