"""Looking at linears while they run: what quantization does to their operands and to their three products.

A `Probe` hangs on `LinearContext.probe`. The linear's autograd function shows it the raw x, W and dy and the results
y, dx and dW; the probe quantizes each operand again, with the same draws and the same tensor maxima as the linear
did (of a large one only a sample with other draws, see samples.py), and computes each product again from the
unquantized tensors with FP32 accumulation. The *actual* results are
compared with those, so a backend that computes something else than it should is seen here too. (y and dx are in
BF16, so with BF16 training their errors have a floor of about 0.002 from that last rounding.)

What it keeps is sums, in FP64, on the device; x alone is held from a linear's forward to its backward pass. It writes
nothing that the run reads, draws from no generator, and never waits for the device.

Over ranks: sums are added up, so the numbers are those of the global tensors. Tensors that several ranks hold whole
are counted once for each, which changes no ratio. Where a linear's result is a partial sum over tensor-parallel
ranks, result and exact product are added up before they are compared. The weight gradient is that of one rank's
micro-batch: squared norms are averaged over data-parallel ranks, not the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.measure import samples
from megatron_fp4.measure.samples import Samples
from megatron_fp4.measure.statistics import (
    OPERAND_MAXIMA,
    OPERAND_SUMS,
    PRODUCT_SUMS,
    operand_statistics,
    operand_sums,
    product_sums,
    relative_error,
    sum_of_squares,
    sums_in_units,
)
from megatron_fp4.precision.emulated import GemmOperand, gemm
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.recipe import (
    DGRAD_GRADIENT,
    DGRAD_WEIGHT,
    FPROP_ACTIVATION,
    FPROP_WEIGHT,
    GEMMS,
    SLOTS,
    SLOTS_OF,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
    OperandSlot,
)
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.hadamard import random_hadamard_transform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_fp4.precision.linear import LinearCall, LinearContext

# FP32 elements of a product that are compared together: bounds the memory, fills a GPU.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class LinearMeasurement:
    """What a probe found at one linear, over all ranks.

    recipe: its name. operands: name -> statistics (see measure/statistics.py), quantized operands only.
    errors: GEMM -> relative error of its result, GEMMs with a quantized operand only.
    wgrad_sums: squared norms of the exact weight gradient and of its error, or None without an error of wgrad.
    """

    recipe: str
    operands: dict[str, dict[str, float]]
    errors: dict[str, float]
    wgrad_sums: tuple[float, float] | None


@dataclass
class Probe:
    """Measures the calls of the linears it hangs on.

    once: measure only the first call of each linear (one micro-batch), not all.
    """

    once: bool = True
    samples: Samples = field(default_factory=Samples)
    _recipes: dict[str, str] = field(default_factory=dict)
    _sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _maxima: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _transformed: set[tuple[str, str]] = field(default_factory=set)
    _repeated: dict[tuple[str, str], str] = field(default_factory=dict)

    @contextmanager
    def attached(self, linears: Mapping[str, LinearContext]) -> Iterator[Probe]:
        """Hang on `linears` (name -> context) inside a `with`."""
        for context in linears.values():
            context.probe = self
        try:
            yield self
        finally:
            for context in linears.values():
                context.probe = None

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> ProbedCall | None:
        """Measure the forward pass; returns whom to tell about the backward pass, None if the call is of no interest.

        x: [tokens, in]. y: [tokens, out], the linear's local result. Collective over tensor-parallel ranks.
        """
        name = call.context.name
        if not call.recipe.quantized or (self.once and name in self._recipes):
            return None
        self._recipes[name] = call.recipe.name
        probed = ProbedCall(self, call, x.detach())
        probed.forward(y.detach())
        return probed

    def collect(self, names: list[str]) -> dict[str, LinearMeasurement]:
        """The measurements of those of `names` that were measured, over all ranks. A collective, and a host sync.

        All ranks must give the same names in the same order and have measured the same linears.
        """
        self.samples.flush()
        for (name, operand), of in self._repeated.items():
            if (name, of) in self._sums:
                self._sums[name, operand], self._maxima[name, operand] = self._sums[name, of], self._maxima[name, of]
        measured = [name for name in names if name in self._recipes]
        if not measured:
            return {}
        device = next(iter(self._sums.values())).device
        sums, maxima, parts = [], [], (*(slot.name for slot in SLOTS), *GEMMS)
        for name in measured:
            for part in parts:
                width = len(PRODUCT_SUMS) if part in GEMMS else len(OPERAND_SUMS)
                zeros = torch.zeros(width, dtype=torch.float64, device=device)
                sums.append(self._sums.get((name, part), zeros))
                if part not in GEMMS:
                    none = torch.zeros(len(OPERAND_MAXIMA), dtype=torch.float64, device=device)
                    maxima.append(self._maxima.get((name, part), none))
        flat_sums, flat_maxima = torch.cat(sums), torch.cat(maxima)
        dist.all_reduce(flat_sums)
        dist.all_reduce(flat_maxima, op=dist.ReduceOp.MAX)
        sum_values, maximum_values = iter(flat_sums.tolist()), iter(flat_maxima.tolist())
        found = {}
        for name in measured:
            operands, errors, wgrad_sums = {}, {}, None
            for part in parts:
                if part not in GEMMS:
                    totals = [next(sum_values) for _ in OPERAND_SUMS]
                    largest = [next(maximum_values) for _ in OPERAND_MAXIMA]
                    if (name, part) in self._sums:
                        operands[part] = operand_statistics(totals, largest, (name, part) in self._transformed)
                else:
                    totals = [next(sum_values) for _ in PRODUCT_SUMS]
                    if (name, part) in self._sums:
                        errors[part] = relative_error(totals)
                        wgrad_sums = (totals[0], totals[1]) if part == "wgrad" else wgrad_sums
            found[name] = LinearMeasurement(self._recipes[name], operands, errors, wgrad_sums)
        return found

    def add(self, name: str, part: str, sums: Tensor, maxima: Tensor | None = None, transformed: bool = False) -> None:
        """Take in the sums of one operand (with its maxima) or GEMM of one call of linear `name`."""
        key = (name, part)
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums
        if maxima is not None:
            self._maxima[key] = torch.maximum(self._maxima[key], maxima) if key in self._maxima else maxima
        if transformed:
            self._transformed.add(key)

    def repeat(self, name: str, slot: OperandSlot, of: OperandSlot) -> None:
        """The operand at `slot` of linear `name` has the codes of the one at `of`, and so its sums."""
        self._repeated[name, slot.name] = of.name


class ProbedCall:
    """One call of one linear under measurement; keeps x for the backward pass."""

    def __init__(self, probe: Probe, call: LinearCall, x: Tensor) -> None:
        self.probe, self.call = probe, call
        self.x: Tensor | None = x

    def forward(self, y: Tensor) -> None:
        """Measure fprop and its operands, and the weight as dgrad will see it. y: [tokens, out], local."""
        call, x = self.call, self.x
        assert x is not None
        weight = call.pad_rows(call.weight)
        self._operand(FPROP_ACTIVATION, call.pad_tokens(x), x.numel())
        self._operand(FPROP_WEIGHT, weight, call.weight.numel())
        if call.recipe[DGRAD_WEIGHT].reuse_fprop or call.same_weight_codes:
            self.probe.repeat(call.context.name, DGRAD_WEIGHT, of=FPROP_WEIGHT)
        else:
            source, unit = self._source(DGRAD_WEIGHT, weight)
            self._operand(DGRAD_WEIGHT, source.t(), call.weight.numel(), unit)
        self._product("fprop", x, call.weight, y, self._ranks_that_shard_weight(1))

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """Measure dgrad and wgrad. dy: [tokens, out], dx: [tokens, in], dw: [out, in], the local parts; then forget."""
        call, x = self.call, self.x
        assert x is not None, "a graph that is walked through twice cannot be measured"
        padded = call.pad(dy)
        if dx is not None:
            self._operand(DGRAD_GRADIENT, padded, dy.numel())
            self._product("dgrad", dy, call.weight.t(), dx, self._ranks_that_shard_weight(0))
        if dw is not None:
            self._operand(WGRAD_GRADIENT, padded.t(), dy.numel())
            if call.recipe[WGRAD_ACTIVATION].reuse_fprop:
                self.probe.repeat(call.context.name, WGRAD_ACTIVATION, of=FPROP_ACTIVATION)
            else:
                source, unit = self._source(WGRAD_ACTIVATION, call.pad_tokens(x))
                self._operand(WGRAD_ACTIVATION, source.t(), x.numel(), unit)
            self._product("wgrad", dy.t(), x.t(), local_part(dw), None)
        self.x = None

    def _source(self, slot: OperandSlot, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the operand at `slot` is made of, and its unit, FP32 0-dim (None: 1): `x` [rows, cols], or what fprop's
        codes of it stand for, which is `code * block scale` in units of fprop's tensor scale."""
        call = self.call
        if not call.requantizes(slot.tensor):
            return x, None
        # Of all tokens: x of a call is gathered, whether or not the linear quantizes slices. So are its draws.
        of = SLOTS_OF[slot.tensor][0]
        request = replace(call.request(of), key=call.draws(of), amax_group=call.context.amax_group(slot.tensor))
        make, _ = call.backend.operands(x, request, None)
        assert make is not None
        made = make()
        return made.unpacked().to(torch.bfloat16), made.scale  # exact, as for `LinearCall.derived`

    def _operand(self, slot: OperandSlot, x: Tensor, count: int, unit: Tensor | None = None) -> None:
        """x: [rows, k] as the linear quantizes it, `count` elements no padding; in units of `unit`, as `_source`."""
        call = self.call
        operand, rht = call.recipe[slot], call.recipe.gemms[slot.gemm].rht
        if not operand.quantized:
            return
        large = x.numel() > samples.LARGE
        raw_amax = amax = x.abs().amax().to(torch.float32)
        seen, factor = x, 1.0
        if rht:
            fixed = call.recipe.rht_signs == "fixed"
            signs = samples.device_signs(rht, x.device) if fixed else call.signs(slot.gemm)
            if large:
                seen, factor = samples.transformed(x, signs)
            else:
                seen = random_hadamard_transform(x.to(torch.bfloat16), rht, signs)
            amax = seen.abs().amax().to(torch.float32) * factor
        maxima = torch.stack((raw_amax, amax)).to(torch.float64)
        maxima = maxima if unit is None else maxima * unit
        group = call.context.amax_group(slot.tensor)
        if group is not None and format_of(operand.format).tensor_scale:
            amax = amax.clone()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        key = call.draws(slot)

        def add(sums: Tensor, raw_signal: Tensor | None = None) -> None:
            # The transform is orthogonal: but for its rounding to BF16 it changes no sum of squares.
            raw = sums[0] if raw_signal is None else raw_signal
            raw_count = torch.full_like(raw, count * min(1.0, samples.SAMPLE / x.numel()) if large else count)
            sums = torch.cat((sums, torch.stack((raw, raw_count))))
            sums = sums if unit is None else sums_in_units(sums, unit)
            self.probe.add(call.context.name, slot.name, sums, maxima, transformed=bool(rht))

        if large:
            part = samples.sample_rows(seen).to(torch.float32)
            self.probe.samples.put(part * factor if rht else part, operand, key, amax, add)
        else:
            part = seen.to(torch.float32)
            values, limits = samples.quantized_values(part, operand, key, amax)
            add(operand_sums(part, values, limits), sum_of_squares(x) if rht else None)

    def _product(self, name: str, a: Tensor, b: Tensor, result: Tensor, group: ProcessGroup | None) -> None:
        """a: [m, k], b: [n, k], result: [m, n]; group: ranks whose results and exact products add up, or None."""
        if not self.call.recipe.gemms[name].quantized:
            return
        sums = torch.zeros(len(PRODUCT_SUMS), dtype=torch.float64, device=a.device)
        for chunk in _chunks(result):
            exact = gemm(GemmOperand(a[chunk]), GemmOperand(b), torch.float32)
            actual = result[chunk]
            if group is not None:
                both = torch.stack((exact, actual.to(torch.float32)))
                dist.all_reduce(both, group=group)
                exact, actual = both.unbind()
            sums += product_sums(actual, exact)
        self.probe.add(self.call.context.name, name, sums)

    def _ranks_that_shard_weight(self, dim: int) -> ProcessGroup | None:
        spec = self.call.gradient_spec  # a gradient lies as its weight does
        if spec is not None:
            for axis, placement in enumerate(spec.placements):
                if placement.is_shard(dim) and spec.mesh.size(axis) > 1:
                    return spec.mesh.get_group(axis)
        return None


def _chunks(x: Tensor) -> Iterator[slice]:
    """All rows of `x` [rows, cols], in slices of at most `_CHUNK_ELEMENTS` elements."""
    size = max(1, _CHUNK_ELEMENTS // x.shape[1])
    for start in range(0, x.shape[0], size):
        yield slice(start, min(start + size, x.shape[0]))
