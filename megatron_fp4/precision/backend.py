"""What a backend is: it makes the operands of GEMMs and multiplies them; the autograd function does the rest.

Two exist: `emulated` (exact arithmetic on any device) and `transformer_engine` (native kernels of Blackwell and
Hopper). A linear holds the one that the plan gave it, and hands each operand only to the backend that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.precision.demands import Demands
from megatron_fp4.precision.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_fp4.precision.emulated import OperandRequest


class BackendOperand(Protocol):
    """One side of a GEMM, the dot product along the last dimension; what it holds is its backend's business."""

    @property
    def quantized(self) -> bool:
        """Whether it came out of a quantizer."""

    @property
    def kind(self) -> Any:
        """What is left of it without its tensors."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What an autograd function has to save: three tensors, some of them None."""

    def transposed(self) -> Any:
        """The same codes with rows and columns exchanged; only of a backend that borrows codes."""


Maker = Callable[[], BackendOperand]


class Backend(Protocol):
    """See the two classes.

    name: as in `precision.backend`. borrows_codes: whether codes made along one dimension may serve a GEMM along the
    other; tensor cores want scales along the dot product.
    """

    @property
    def name(self) -> str: ...

    @property
    def borrows_codes(self) -> bool: ...

    def demands(self, recipe: Recipe) -> Demands:
        """What its kernels demand of a linear's local sizes under `recipe`."""

    def operands(
        self,
        x: Tensor,
        columns: OperandRequest | None,
        rows: OperandRequest | None,
        *,
        dtype: torch.dtype,
        keep_rows: bool = False,
        amax_group: ProcessGroup | None = None,
    ) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """What makes `x` [n, m] an operand [n, k = m] (`columns`), and transposed an operand [m, k = n] (`rows`).

        Each is to be called once, the first before the second; what need not be made at once can wait for that.

        dtype: the compute dtype; x may be FP32 where it is BF16, and counts as rounded then (weights). keep_rows: the
        second waits for the backward pass. amax_group: ranks that hold the other shards and share the maximum.
        """

    def gemm(self, a: Any, b: Any, out_dtype: torch.dtype) -> Tensor:
        """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, rounded once to `out_dtype`."""

    def restored(self, tensors: Sequence[Tensor | None], kind: Any) -> Any:
        """An operand again from its `tensors()` and its `kind`."""
