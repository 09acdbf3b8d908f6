"""An operand of an emulated GEMM: values or packed codes, and how it is turned, saved and gathered from ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fp4.precision.packed_weight import PackedWeight
from megatron_fp4.precision.token_messages import Gather
from megatron_fp4.quantization.cuda import Packed
from megatron_fp4.quantization.fp4 import PackedColumns, PackedRows
from megatron_fp4.quantization.fp8 import BlockScaled

Packing = Callable[[Tensor, Tensor], Packed]


@dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM, the dot product along the last dimension.

    values: [rows, k]. For a quantized operand `code * block scale` without the tensor scale (FP32 for FP8 under FP32
    scales, else BF16), or codes of such values with their scales; otherwise the tensor itself.
    scale: FP32 0-dim factor from `values` to real values, or None for 1.
    quantized: whether `values` came out of a quantizer; two unquantized sides are an ordinary GEMM.
    """

    values: Tensor | Packed
    scale: Tensor | None = None
    quantized: bool = False
    decoded = None  # its values are compared

    def transposed(self) -> GemmOperand:
        """The same codes with rows and columns exchanged."""
        assert isinstance(self.values, Tensor | BlockScaled | PackedWeight)
        return GemmOperand(self.values.t(), self.scale, self.quantized)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What an autograd function has to save: three tensors, some of them None."""
        if isinstance(self.values, Tensor):
            return self.values, None, self.scale
        return self.values.codes, self.values.scales, self.scale

    @property
    def layout(self) -> tuple[Packing | None, bool]:
        """Non-tensor metadata: what makes codes and scales an operand (None: plain values), and `quantized`."""
        values = self.values
        if isinstance(values, Tensor):
            return None, self.quantized
        return values.packing if isinstance(values, PackedWeight) else type(values), self.quantized

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor | None], layout: tuple[Packing | None, bool]) -> GemmOperand:
        """The operand again from its `tensors()` and its `layout`."""
        (values, scales, scale), (packing, quantized) = tensors, layout
        assert values is not None
        if packing is None:
            return GemmOperand(values, scale, quantized)
        assert scales is not None
        return GemmOperand(packing(values, scales), scale, quantized)

    def gathered(self, gather: Gather, *, transposed: bool) -> Callable[[], GemmOperand]:
        """From that of a slice of the tokens: starts `gather`; what is returned waits, and gives that of all tokens.

        transposed: the dot product runs over tokens.
        """
        values, scale, quantized = self.values, self.scale, self.quantized
        if isinstance(values, PackedRows | PackedColumns):
            message, joined = gather(values.message()), values.joined()
            return lambda: GemmOperand(joined(message.wait()), scale, quantized)
        if isinstance(values, Tensor):
            whole, in_one_piece = _gathered(values, gather, transposed), values.is_contiguous()
            return lambda: GemmOperand(whole().contiguous() if in_one_piece else whole(), scale, quantized)
        # Other packed codes have the tokens first in any case.
        turned = transposed and isinstance(values, BlockScaled)
        packing: Packing = type(values)
        codes, scales = (_gathered(part, gather, turned) for part in (values.codes, values.scales))
        return lambda: GemmOperand(packing(codes(), scales()), scale, quantized)

    def unpacked(self) -> Tensor:
        """The values as a tensor [rows, k]."""
        return self.values if isinstance(self.values, Tensor) else self.values.values()


def _gathered(part: Tensor, gather: Gather, turned: bool) -> Callable[[], Tensor]:
    """What waits for all ranks' `part`, one behind the other along its first dimension, or `turned` its second."""
    message = gather(part.t() if turned else part)
    return lambda: message.wait().t() if turned else message.wait()
