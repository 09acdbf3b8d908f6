"""Where a run stands, as far as numerics depend on it, and the keys of draws in device memory.

A key is a function of the run's seed, step, micro-batch, linear and operand (quantization/rounding.py), computed on the
host. A captured CUDA graph would keep the numbers of the micro-batch that it was captured in. So its kernels read their
keys from a table, one row for each operand that needs one, and before every replay the host computes all rows and sends
them in one copy: the same keys, and so the same codes, with graphs and without.

Transformer Engine draws from a generator of torch instead. Of such a generator a graph reads seed and offset from
device memory too, where every replay puts those of the host. So each of its draws has a generator of its own, which is
seeded by its key together with the table.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron_fp4.precision.recipe import SLOTS, Recipe
from megatron_fp4.quantization.rounding import RoundingKey


@dataclass
class StepState:
    """The one mutable object that all linears of a model share; the training step advances it.

    seed: the run's seed. step: the optimizer step being computed, from 0. micro_batch: the *global* micro-batch index
    within the step's batch (the same whichever rank computes it). weights_version: changes whenever weights do;
    quantized weights are kept while it stands still. keys: where draws take their keys from, filled for `step` and
    `micro_batch`; None: the host computes them from these numbers.
    """

    seed: int
    step: int = 0
    micro_batch: int = 0
    weights_version: int = 0
    keys: DeviceKeys | None = field(default=None, compare=False, repr=False)


class DeviceKeys:
    """A table of keys, int32 [operands, 4], of the operands of `recipes` (by the linear's name) on `device`.

    A row is low half, high half and two zeros: 16 bytes, on which kernels may rely.
    generators: those that draws have asked for so far, which a graph has to know before it is captured.
    """

    def __init__(self, recipes: Mapping[str, Recipe], device: torch.device) -> None:
        self._rows = {name: i for i, name in enumerate(keyed_operands(recipes))}
        self.table = torch.zeros(len(self._rows), 4, dtype=torch.int32, device=device)
        self._generators: dict[tuple[int, int, int, int], torch.Generator] = {}
        self._asked: Counter[tuple[int, int, int]] = Counter()  # how often in this micro-batch, by place

    @property
    def generators(self) -> list[torch.Generator]:
        return [*self._generators.values()]

    def fill(self, seed: int, step: int, micro_batch: int) -> None:
        """Write the keys of a micro-batch, in the order of the current stream. The numbers are those of `StepState`."""
        if not self._rows:
            return
        where = (seed, step, micro_batch)
        digests = [hashlib.blake2b(repr((*where, *name)).encode(), digest_size=8).digest() for name in self._rows]
        on_gpu = self.table.is_cuda
        # Pinned memory of its own each time: PyTorch does not hand it out again before the copy has read it.
        staging = torch.zeros(self.table.shape, dtype=torch.int32, pin_memory=on_gpu)
        staging[:, :2] = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32).view(-1, 2)
        self.table.copy_(staging, non_blocking=on_gpu)
        self._asked.clear()
        for (row, rows, columns, _), generator in self._generators.items():
            generator.manual_seed(RoundingKey(int.from_bytes(digests[row], "little"), rows, columns).seed)

    def of(self, linear: str, operand: str, key: RoundingKey) -> RoundingKey:
        """`key`, read from its row of the table when draws are made."""
        row = self._rows[linear, operand]
        return replace(key, device=self.table[row], graph_generator=functools.partial(self._generator, row, key))

    def _generator(self, row: int, key: RoundingKey) -> torch.Generator:
        """The generator of a draw, another for each time that a micro-batch makes it: recomputation repeats draws."""
        place = (row, key.row_offset, key.column_offset)
        times, self._asked[place] = self._asked[place], self._asked[place] + 1
        if (*place, times) not in self._generators:
            self._generators[*place, times] = torch.Generator(self.table.device).manual_seed(key.seed)
        return self._generators[*place, times]


def keyed_operands(recipes: Mapping[str, Recipe]) -> list[tuple[str, str]]:
    """Names of linear and operand of everything that is drawn: rounding, fresh signs of transforms."""
    names = []
    for linear, recipe in recipes.items():
        names += [(linear, slot.name) for slot in SLOTS if recipe[slot].drawn]
        if recipe.rht_signs == "fresh":
            names += [(linear, f"{gemm}_signs") for gemm, of in recipe.gemms.items() if of.rht]
    return names
