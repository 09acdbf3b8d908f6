"""What a model remembers of the tokens before, so that a text goes on without being computed again.

    memory = model.new_memory(batch, max_length)
    logits = model(tokens, memory=memory, counts=counts)    rows bring a prompt, a piece of one, or one token

A memory has `batch` rows, one for each text, which know nothing of each other. What a row remembers is its mixers'
matter: attention keeps keys and values of all tokens, Mamba-2 the last inputs of its convolution and the state of its
scan (FP32), an FFN nothing (models/mixer.py: `new_memory`, `decode`).

Rows need not bring equally many tokens: of the s columns of a call, row i brings the first counts[i], and the others
are padding. Padding stands behind the tokens: causal mixers never look at it, keys and values of it are not kept, and
for Mamba-2 it is a step of size zero. So what a row gives does not depend on how long the others are, but for the
rounding of GEMMs, whose kernels go by the number of tokens.

Shapes: b batch, s columns of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.rope import rope_at


class NewTokens:
    """Which tokens a call brings.

    counts: int64 [b], how many of the `length` columns of each row are no padding. positions: int64 [b, s], the place
    of each token in its text. valid: bool [b, s], false for padding. last: int64 [b], the place among the b * s tokens
    of each row's last one (of a row without any: its first column). end: no text is longer, these tokens included.

    No tuple and no dataclass on purpose, as `Documents`: FSDP looks into those.
    """

    def __init__(self, before: Sequence[int], counts: Sequence[int], length: int, device: torch.device) -> None:
        self.length, self.end = length, max(b + n for b, n in zip(before, counts, strict=True))
        # One copy to the device.
        before_b, self.counts = torch.tensor([before, counts], dtype=torch.int64, device=device)
        column = torch.arange(length, device=device)
        self.positions = before_b[:, None] + column
        self.valid = column < self.counts[:, None]
        self.last = torch.arange(len(counts), device=device) * length + (self.counts - 1).clamp_(min=0)
        self._tables: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}

    def rope_tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, FP32 [b, s, head_dim / 2]; see models/rope.py."""
        if (head_dim, base) not in self._tables:
            self._tables[head_dim, base] = rope_at(self.positions, head_dim, base)
        return self._tables[head_dim, base]


class Memory:
    """Of a whole model. mixers: what each block's mixer remembers, in order. max_length: the most tokens a row holds.

    lengths: how many tokens each row has had.
    """

    def __init__(self, mixers: Sequence[Any], batch: int, max_length: int) -> None:
        self.mixers, self.max_length = list(mixers), max_length
        self.lengths = [0] * batch

    def expect(self, counts: Sequence[int], length: int, device: torch.device) -> NewTokens:
        """The tokens of a call of `length` columns, of which row i brings `counts[i]`.

        Raises ValueError for counts that are not one a row, do not fit the columns, or make a row too long.
        """
        if len(counts) != len(self.lengths) or not all(0 <= count <= length for count in counts):
            raise ValueError(
                f"counts {list(counts)} do not say for {len(self.lengths)} rows how many of {length} columns are tokens"
            )
        if (longest := max(n + count for n, count in zip(self.lengths, counts, strict=True))) > self.max_length:
            raise ValueError(f"a text of {longest} tokens does not fit a memory of max_length {self.max_length}")
        return NewTokens(self.lengths, counts, length, device)

    def advance(self, counts: Sequence[int]) -> None:
        """The mixers have seen the tokens."""
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
