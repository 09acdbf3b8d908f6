"""Where documents begin in a micro-batch, in the forms in which blocks want to know it.

Rows of training text hold several documents one after the other. With `data.documents=masked` no token sees another
document than its own: attention looks at nothing else, Mamba-2's state and its convolution begin anew, and positions
(RoPE) count from each document's first token. The logits of a document are then those of the document alone.

    numbers      int32 [b, s]        Mamba-2's scan and convolution, plain and fused (what the kernels call `seq_idx`)
    positions    int64 [b, s]        RoPE: the place of a token in its document
    begins, ends int32 [b, s]        attention in tiles: its document's first token, and the one behind its last
    boundaries   int32 [n + 1]       FlashAttention: where documents begin among the b * s tokens, and their end
    mask         bool [b, 1, s, s]   attention in plain PyTorch

Each is made when it is first asked for, once for all blocks. A document that goes on from one row into the next counts
as two: rows are samples, which know nothing of each other.

Shapes: b batch, s sequence, n documents in all rows together.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from models.rope import rope_tables

CONV_CHUNK = 64
"""Tokens of a chunk of causal-conv1d's kernel with the channels innermost."""


def count_documents(numbers_bs: Tensor) -> int:
    """How many documents the rows hold together. On a GPU's tensor this waits for the GPU."""
    return numbers_bs.shape[0] + int((numbers_bs[:, 1:] != numbers_bs[:, :-1]).sum())


class Documents:
    """numbers_bs: int32 [batch, sequence], the number of each token's document: not negative, never falling in a row.

    count: `count_documents` of them, if it is known; without it, `boundaries` waits for the GPU.

    No tuple and no dataclass on purpose: FSDP looks into those, and would round the tables to the compute dtype.
    """

    def __init__(self, numbers_bs: Tensor, count: int | None = None) -> None:
        assert numbers_bs.dtype == torch.int32 and numbers_bs.ndim == 2, "int32 [batch, sequence] is what kernels take"
        # causal-conv1d's forward kernel reads the numbers of its last chunk as if that were whole, also beyond the last
        # row (its issue 67), and uses none of these: there must be memory.
        extra = -numbers_bs.shape[1] % CONV_CHUNK
        flat = F.pad(numbers_bs.flatten(), (0, extra)) if extra else numbers_bs.contiguous()
        self.numbers = flat[: numbers_bs.numel()].view(numbers_bs.shape) if extra else flat
        self._count = count
        self._tables: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}

    @cached_property
    def begins(self) -> Tensor:
        """int32 [b, s], the place in its row of the first token of each token's document."""
        # Rows ascend, so the first place of a number is where its document begins.
        return torch.searchsorted(self.numbers, self.numbers, out_int32=True)

    @cached_property
    def ends(self) -> Tensor:
        """int32 [b, s], the place in its row behind the last token of each token's document."""
        return torch.searchsorted(self.numbers, self.numbers, out_int32=True, right=True)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [b, s], from 0 in each document."""
        return torch.arange(self.numbers.shape[1], device=self.numbers.device) - self.begins

    @cached_property
    def boundaries(self) -> Tensor:
        """int32 [n + 1], ascending from 0 to b * s."""
        count = count_documents(self.numbers) if self._count is None else self._count
        # The number of each token's document among those of all rows; a search needs no length that only a GPU knows.
        index = (self.positions == 0).flatten().cumsum(0) - 1
        return torch.searchsorted(index, torch.arange(count + 1, device=index.device), out_int32=True)

    @cached_property
    def mask(self) -> Tensor:
        """bool [b, 1, s, s]: whether a query (row) sees a key (column)."""
        same = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        return same.tril_()

    def rope_tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, FP32 [b, s, head_dim / 2]; see models/rope.py."""
        if (head_dim, base) not in self._tables:
            tables = rope_tables(self.numbers.shape[1], head_dim, base, self.numbers.device)
            cos, sin = (table[self.positions] for table in tables)
            self._tables[head_dim, base] = cos, sin
        return self._tables[head_dim, base]
