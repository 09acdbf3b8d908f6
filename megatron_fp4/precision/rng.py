"""The position of a run that numerics depend on, and the keys of random draws in device memory.

The host computes a key from the run's seed, the step, the micro-batch, the linear and the operand
(quantization/rounding.py). A captured CUDA graph would always use the keys of the micro-batch in which it was captured.
So its kernels read their keys from a table on the device, with one row for each operand that needs a key. Before every
replay the host computes all rows and sends them in one copy. So keys, and codes, are the same with and without graphs.

Transformer Engine draws from a torch generator instead. A graph reads a generator's seed and offset from device memory
too, and every replay writes the host's values there. So each draw has its own, which `fill` seeds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_fp4.precision.recipe import SLOTS, Recipe
from megatron_fp4.quantization.rounding import Place, RoundingKey, rounding_key


@dataclass
class StepState:
    """The one mutable object that all linears of a model share; the training step advances it.

    seed: the run's seed. step: the optimizer step being computed, from 0. micro_batch: the *global* micro-batch index
    within the step's batch (the same on whichever rank computes it). weights_version: changes whenever weights do;
    linears keep quantized weights until then. keys: the table of keys on the device, filled for `step` and
    `micro_batch`; None: the host computes each key.
    """

    seed: int
    step: int = 0
    micro_batch: int = 0
    weights_version: int = 0
    keys: DeviceKeys | None = field(default=None, compare=False, repr=False)

    @property
    def captured_micro_batch(self) -> int | Tensor:
        """`micro_batch`; in device memory if a CUDA graph may read it."""
        return self.micro_batch if self.keys is None else self.keys.micro_batch


class DeviceKeys:
    """A table of keys on `device`, int32 [operands + 1, 4], for operands with draws.

    recipes: by the linear's name. experts: the linears of experts; their keys are the same for all micro-batches of a
    step, because their tokens are numbered over all of these.
    A row is the key's low half, its high half and two zeros; kernels rely on its 16 bytes. The last row is the
    micro-batch. generators: those that draws have used so far; a graph must register them before its capture.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], device: torch.device, experts: Collection[str] = frozenset()
    ) -> None:
        self._rows, self._experts = {name: i for i, name in enumerate(keyed_operands(recipes))}, experts
        self.table = torch.zeros(len(self._rows) + 1, 4, dtype=torch.int32, device=device)
        self.micro_batch = self.table[-1, :2].view(torch.int64)[0]
        self._generators: dict[tuple[int, Place, int], torch.Generator] = {}
        self._num_draws: Counter[tuple[int, Place]] = Counter()  # in this micro-batch, by operand and place

    @property
    def generators(self) -> list[torch.Generator]:
        return [*self._generators.values()]

    def fill(self, seed: int, step: int, micro_batch: int) -> None:
        """Write the keys of a micro-batch, on the current stream. seed, step, micro_batch: as in `StepState`."""
        keys = [
            rounding_key(seed, step, 0 if linear in self._experts else micro_batch, linear, operand).key
            for linear, operand in self._rows
        ]
        on_gpu = self.table.is_cuda
        # New pinned memory each time: PyTorch does not reuse it before the copy has read it.
        staging = torch.zeros(self.table.shape, dtype=torch.int32, pin_memory=on_gpu)
        rows = torch.tensor([*keys, micro_batch], dtype=torch.uint64)
        staging[:, :2] = rows.view(torch.int32).view(-1, 2)
        self.table.copy_(staging, non_blocking=on_gpu)
        self._num_draws.clear()
        for (row, place, _), generator in self._generators.items():
            generator.manual_seed(RoundingKey(keys[row], place).seed)

    def of(self, linear: str, operand: str, key: RoundingKey) -> RoundingKey:
        """`key`, but kernels read it from the table when they draw."""
        row = self._rows[linear, operand]
        return replace(key, device=self.table[row], graph_generator=functools.partial(self._generator, row, key))

    def _generator(self, row: int, key: RoundingKey, place: Place) -> torch.Generator:
        """The generator of a draw. If a micro-batch repeats the draw, as recomputation does, each has its own."""
        draw = (row, place)
        repetition, self._num_draws[draw] = self._num_draws[draw], self._num_draws[draw] + 1
        if (*draw, repetition) not in self._generators:
            self._generators[*draw, repetition] = torch.Generator(self.table.device).manual_seed(key.at(place).seed)
        return self._generators[*draw, repetition]


def keyed_operands(recipes: Mapping[str, Recipe]) -> list[tuple[str, str]]:
    """(linear, operand) of everything that is drawn: stochastic rounding, and fresh signs of transforms."""
    names = []
    for linear, recipe in recipes.items():
        names += [(linear, slot.name) for slot in SLOTS if recipe[slot].drawn]
        if recipe.rht_signs == "fresh":
            names += [(linear, f"{gemm}_signs") for gemm, of in recipe.gemms.items() if of.rht]
    return names
