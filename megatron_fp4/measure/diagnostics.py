"""What quantization does to the operands and the three products of linears, measured while they train.

    probe = Probe()
    with probe.attached(linears):
        ...                                     train one step
    record = diagnostics_record(probe.collect(list(linears)))

A `Probe` is attached to every linear's context. In the first micro-batch, the linear's autograd function passes it the
unquantized x, W and dy and the results y, dx and dW. The probe quantizes each operand again, with the same draws and
the same tensor maxima, and computes each product again from the unquantized tensors with FP32 accumulation. It compares
the *actual* results with these, so it also detects a backend that computes wrong products. (y and dx are in BF16, so in
BF16 training their errors are at least about 0.002, from that last rounding.) A measured step has the same bits as any
other: the probe draws from no generator, and it never waits for the device.

    snr_db      10 log10( sum x^2 / sum (q - x)^2 ), x: the quantizer's input (after a Hadamard transform), q: the
                quantized x
    zeroed      share of the nonzero x that became zero
    saturated   share of the nonzero x above the largest value that their block's scale can express; elements of a block
                with scale zero count only as zeroed
    scale_spread  log2 of the largest over the smallest block scale that is not zero
    amax, rms   largest magnitude and root mean square before the transform; crest = amax / rms
    *_rht       the same three after the transform, which is meant to make the crest smaller
    residual_rms  root mean square of the residual stream after each block
    error       ||q - exact|| / ||exact|| of a product (Frobenius norms)
    gradient_to_noise   ||dW exact|| / ||dW - dW exact|| of a linear or a block, for one micro-batch and its actual dy:
                the noise that this wgrad adds. (gradient_noise.py measures the noise of a whole step.)

Everything is a sum or a maximum over elements, in FP64, so chunks, micro-batches and ranks can be combined. A tensor
that several ranks hold is counted once for each rank, which changes no ratio. The linears of experts are measured one
by one, each segment of tokens as a lone linear, and added up. Partial products of tensor-parallel ranks are added up
before they are compared. The weight gradient is that of one rank's micro-batch.

A large operand is measured on a sample: at least half a million elements, in bands of rows spread evenly over the
tensor, quantized with the maximum of the whole tensor and with other draws. The SNR is then accurate to a few
hundredths of a decibel, unless a few rows have most of the tensor's energy.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron_fp4.precision import recipe as recipes
from megatron_fp4.precision.emulated import EMULATED, GemmOperand, amax_of, shared_amax, transform_signs
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.operands import GroupedCall, LinearCall, LinearContext, same_weight_codes
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform
from megatron_fp4.quantization.rounding import RoundingKey, Span
from megatron_fp4.quantization.tensor import scale_values

# The sums of an operand, in FP64. Those of a product, over its elements: exact^2, error^2, exact error.
OPERAND_SUMS = ("signal", "error", "nonzero", "zeroed", "saturated", "raw_signal", "raw_count")
_OPERANDS = {slot.name: slot for slot in recipes.SLOTS}
PARTS = (*_OPERANDS, *recipes.GEMMS)

# Block scales are rounded, so an element within this factor of the largest value does not count as above it.
_ON_THE_LIMIT = 1.0 + 2.0**-20
LARGE = 2**21  # elements; larger operands are measured on a sample
SAMPLE = 2**19  # least number of elements of a sample
_BAND_ROWS = 128  # the rows of the largest block
# FP32 elements of a chunk: few enough to save memory, enough to fill a GPU.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class LinearMeasurement:
    """What a probe measured at one linear, over all ranks.

    recipe: its name. operands: name -> statistics (see the top of this file), of quantized operands only.
    products: GEMM -> sums over the elements of its result: exact^2, error^2, exact error; of GEMMs with a quantized
    operand only.
    """

    recipe: str
    operands: dict[str, dict[str, float]]
    products: dict[str, tuple[float, float, float]]

    @property
    def errors(self) -> dict[str, float]:
        """GEMM -> relative error of its result."""
        return {gemm: relative_error(*self.products[gemm][:2]) for gemm in recipes.GEMMS if gemm in self.products}

    def bias(self, part: str) -> float:
        """<error, exact> / ||exact||^2 of a product; NaN if the exact one is zero."""
        signal, _, projection = self.products[part]
        return projection / signal if signal else math.nan


def diagnostics_record(found: Mapping[str, LinearMeasurement]) -> dict[str, Any]:
    """The fields of a record in `metrics.jsonl`, besides `kind` and `step`.

    linears: name -> recipe, operands (name -> statistics), gemms (fprop, dgrad, wgrad -> relative error) and
    gradient_to_noise. blocks: name -> gradient_to_noise over the block's linears. Linears and GEMMs without a quantized
    operand are left out, and so is gradient_to_noise where wgrad is not quantized.
    """
    linears: dict[str, Any] = {}
    sums_of_blocks: dict[str, list[tuple[float, float]]] = {}
    for name, of in found.items():
        linears[name] = {"recipe": of.recipe, "operands": of.operands, "gemms": of.errors}
        if "wgrad" in of.products:
            sums = of.products["wgrad"][:2]
            linears[name]["gradient_to_noise"] = _ratio(*sums)
            block = ".".join(name.split(".")[:2])  # blocks.3 of blocks.3.mixer.in_proj
            sums_of_blocks.setdefault(block, []).append(sums)
    ratios = {block: _ratio(*map(sum, zip(*sums, strict=True))) for block, sums in sums_of_blocks.items()}
    return {"linears": linears, "blocks": {block: {"gradient_to_noise": ratio} for block, ratio in ratios.items()}}


def diagnostics_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record as a few curves for TensorBoard and wandb: `quantization_<quantity>/<operand or GEMM>_<median or worst>`
    over all linears. Gradient-to-noise ratios have a median and a worst over linears, and over blocks.

    The numbers of each linear are in `metrics.jsonl`; `scripts/report.py` draws them.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for linear in record["linears"].values():
        for operand, statistics in linear["operands"].items():
            for quantity in ("snr_db", "zeroed", "saturated", "crest", "scale_spread"):
                found[quantity, operand].append(statistics[quantity])
            if "crest_rht" in statistics:
                found["crest", f"{operand}_rht"].append(statistics["crest_rht"])
        for product, error in linear["gemms"].items():
            found["error", product].append(error)
    for part in ("linears", "blocks"):
        ratios = [of["gradient_to_noise"] for of in record[part].values() if "gradient_to_noise" in of]
        found["gradient_to_noise", part] += ratios
    scalars = {f"residual_rms/{block}": rms for block, rms in record.get("residual_rms", {}).items()}
    for (quantity, name), every in found.items():
        if numbers := [number for number in every if not math.isnan(number)]:
            worst = min if quantity in ("snr_db", "gradient_to_noise") else max
            scalars[f"quantization_{quantity}/{name}_median"] = median(numbers)
            scalars[f"quantization_{quantity}/{name}_worst"] = worst(numbers)
    return scalars


def _ratio(signal: float, noise: float) -> float:
    """Square root of signal over noise, both squared norms; infinite without noise."""
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return math.sqrt(signal / noise)


class Probe:
    """Measures the calls of the linears that it is attached to.

    once: measure only the first call of each linear (one micro-batch), not all.
    """

    parts: tuple[str, ...] = PARTS

    def __init__(self, once: bool = True) -> None:
        self.once = once
        self._recipes: dict[str, recipes.Recipe] = {}
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[tuple[str, str], Tensor] = {}
        self._repeated: dict[tuple[str, str], str] = {}

    @contextmanager
    def attached(self, linears: Mapping[str, LinearContext]) -> Iterator[Probe]:
        """Inside, the probe is attached to `linears` (name -> context)."""
        for context in linears.values():
            context.probe = self
        try:
            yield self
        finally:
            for context in linears.values():
                context.probe = None

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> ProbedCall | _ProbedSegments | None:
        """Measure the forward pass; returns what measures the backward pass, or None if this call is not measured.

        x: [tokens, in]. y: [tokens, out], the linear's local result. Collective over tensor-parallel ranks.
        """
        name = call.context.name
        if not call.recipe.quantized or (self.once and name in self._recipes):
            return None
        self._recipes[name], self._device = call.recipe, x.device
        if isinstance(call, GroupedCall):
            return _ProbedSegments(self, call, x.detach(), y.detach())
        probed = self.of_call(call, x.detach())
        probed.forward(y.detach())
        return probed

    def of_call(self, call: LinearCall, x: Tensor) -> ProbedCall:
        """What measures one call of a linear."""
        return ProbedCall(self, call, x)

    def collect(self, names: list[str]) -> dict[str, LinearMeasurement]:
        """The measurements of the linears in `names`, over all ranks, if measured. A collective, and a host sync.

        All ranks give the same names in the same order, and have measured the same linears. A rank whose experts got no
        tokens has measured nothing of them.
        """
        for (name, slot), of in self._repeated.items():
            if (name, of) in self._sums:
                self._sums[name, slot], self._maxima[name, slot] = self._sums[name, of], self._maxima[name, of]
        measured = [name for name in names if name in self._recipes]
        if not measured:
            return {}
        keys = [(name, part) for name in measured for part in self.parts]
        zeros = torch.zeros(len(OPERAND_SUMS), dtype=torch.float64, device=self._device)
        unmeasured = torch.full_like(zeros[:4], -math.inf)
        rows = [self._sums.get(key, zeros) for key in keys]
        sums = torch.stack([F.pad(row, (0, len(zeros) - len(row))) for row in rows])
        maxima = torch.stack([self._maxima.get(key, unmeasured) for key in keys])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        totals = dict(zip(keys, zip(sums.tolist(), maxima.tolist(), strict=True), strict=True))
        found = {}
        for name in measured:
            recipe = self._recipes[name]
            of_parts = {part: totals[name, part] for part in self.parts if totals[name, part][1][0] != -math.inf}
            operands = {
                part: operand_statistics(*of_parts[part], bool(recipe.gemms[slot.gemm].rht))
                for part, slot in _OPERANDS.items()
                if part in of_parts
            }
            products = {part: (of[0], of[1], of[2]) for part, (of, _) in of_parts.items() if part not in _OPERANDS}
            found[name] = LinearMeasurement(recipe.name, operands, products)
        return found

    def add(self, name: str, part: str, sums: Tensor, maxima: Tensor | None = None) -> None:
        """Add the sums of one operand (with its maxima) or of one GEMM, from one call of linear `name`."""
        key, maxima = (name, part), sums.new_zeros(4) if maxima is None else maxima
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums
        self._maxima[key] = torch.maximum(self._maxima[key], maxima) if key in self._maxima else maxima

    def repeat(self, name: str, slot: recipes.OperandSlot, of: recipes.OperandSlot) -> None:
        """The operand at `slot` of linear `name` has the same codes as the one at `of`, and so the same sums."""
        self._repeated[name, slot.name] = of.name


class ResidualStream:
    """Measures the residual stream after every block in the first micro-batch of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @contextmanager
    def attached(self, blocks: Iterable[nn.Module]) -> Iterator[ResidualStream]:
        """Inside, it measures the results h [tokens, hidden] of `blocks`, with or without an auxiliary loss."""

        def measure(name: str, module: nn.Module, inputs: Any, h: Tensor | tuple[Tensor, ...]) -> None:
            if name not in self._sums:
                h = (h if isinstance(h, Tensor) else h[0]).detach()
                square = _sums_of_squares(h)
                self._sums[name] = torch.cat((square, torch.full_like(square, h.numel())))

        named = [(f"blocks.{i}", block) for i, block in enumerate(blocks)]
        handles = [block.register_forward_hook(functools.partial(measure, name)) for name, block in named]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def collect(self) -> dict[str, float]:
        """Block -> root mean square, over all ranks. A collective, and a host sync."""
        sums = torch.stack([*self._sums.values()])
        dist.all_reduce(sums)
        return {name: math.sqrt(total / count) for name, (total, count) in zip(self._sums, sums.tolist(), strict=True)}


class ProbedCall:
    """One call of one linear under measurement; keeps x for the backward pass."""

    def __init__(self, probe: Probe, call: LinearCall, x: Tensor) -> None:
        self.probe, self.call = probe, call
        self.x: Tensor | None = x

    def forward(self, y: Tensor) -> None:
        """Measure fprop, its operands, and dgrad's weight. y: [tokens, out], local."""
        call, x = self.call, self.x
        assert x is not None
        weight = call.padding.pad_weight(call.weight)
        self._operand(recipes.FPROP_ACTIVATION, call.padding.pad_tokens(x), x.numel())
        self._operand(recipes.FPROP_WEIGHT, weight, call.weight.numel())
        if call.recipe[recipes.DGRAD_WEIGHT].source == "codes" or same_weight_codes(call.recipe):
            self.probe.repeat(call.context.name, recipes.DGRAD_WEIGHT, of=recipes.FPROP_WEIGHT)
        else:
            source, unit = self._source(recipes.DGRAD_WEIGHT, weight)
            self._operand(recipes.DGRAD_WEIGHT, source.t(), call.weight.numel(), unit)
        self._product("fprop", x, call.weight, y, self._ranks_that_shard_weight(1))

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """Measure dgrad and wgrad, and drop x. dy: [tokens, out], dx: [tokens, in], dw: [out, in], the local parts."""
        assert self.x is not None, "a second backward pass through one graph cannot be measured"
        self.gradients(dy, dx, wgrad=dw is not None)
        if dw is not None:
            self.weight_gradient(dy, self.x, dw)
        self.x = None

    def gradients(self, dy: Tensor, dx: Tensor | None, wgrad: bool) -> None:
        """Measure dgrad and, with `wgrad`, its operands."""
        call, x = self.call, self.x
        assert x is not None
        padded = call.padding.pad(dy)
        if dx is not None:
            self._operand(recipes.DGRAD_GRADIENT, padded, dy.numel())
            self._product("dgrad", dy, call.weight.t(), dx, self._ranks_that_shard_weight(0))
        if wgrad:
            self._operand(recipes.WGRAD_GRADIENT, padded.t(), dy.numel())
            if call.recipe[recipes.WGRAD_ACTIVATION].source == "codes":
                self.probe.repeat(call.context.name, recipes.WGRAD_ACTIVATION, of=recipes.FPROP_ACTIVATION)
            else:
                source, unit = self._source(recipes.WGRAD_ACTIVATION, call.padding.pad_tokens(x))
                self._operand(recipes.WGRAD_ACTIVATION, source.t(), x.numel(), unit)

    def weight_gradient(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        self._product("wgrad", dy.t(), x.t(), local_part(dw), None)

    def _source(self, slot: recipes.OperandSlot, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tensor that the operand at `slot` is quantized from, and its unit, FP32 0-dim (None: 1). It is `x`
        [rows, cols], or the values of fprop's codes of it: `code * block scale`, in units of fprop's tensor scale."""
        call = self.call
        if call.recipe[slot].source != "forward":
            return x, None
        # The probe gets x of all tokens, also where the linear quantizes slices.
        of = recipes.SLOTS_OF[slot.tensor][0]
        make, _ = call.backend.operands(x, call.place(slot.tensor, all_tokens=True), call.request(of), None)
        assert make is not None
        made = make()
        return made.unpacked().to(torch.bfloat16), made.scale  # exact, as for `LinearCall.from_fprop_operand`

    def _operand(self, slot: recipes.OperandSlot, x: Tensor, count: int, unit: Tensor | None = None) -> None:
        """x: [rows, k] as it is quantized, in units of `unit` (see `_source`); `count` elements are no padding."""
        call = self.call
        operand, rht = call.recipe[slot], call.recipe.gemms[slot.gemm].rht
        if not operand.quantized:
            return
        large = x.numel() > LARGE
        part = sample_rows(x, x.shape[1]) if large else x
        amax = raw_amax = x.abs().amax().to(torch.float32)
        if rht:
            fixed = call.recipe.rht_signs == "fixed"
            signs = _device_signs(rht, x.device) if fixed else transform_signs(call.request(slot), x.device)
            transform = functools.partial(random_hadamard_transform, size=rht, signs=signs)
            part = transform(part.to(torch.bfloat16))
            amax = part.abs().amax().to(torch.float32)
            if large:
                amax = torch.maximum(amax, _transformed_amax(x, transform(torch.eye(rht, device=x.device))))
        maxima = torch.stack((raw_amax, amax)).to(torch.float64)
        place = call.place(slot.tensor, all_tokens=True)
        key, form = call.rounding_key_of(slot), format_of(operand.format)
        at, part = place.t() if slot.transposed else place, part.to(torch.float32)
        if large:
            positions = at.rows.positions(len(x), x.device)
            at = replace(at, rows=Span(sample_rows(positions, x.shape[1]), at.rows.ranks))
        shared = shared_amax(amax, place.amax_groups) if form.tensor_scale else amax_of(part, at, form)
        sums, exponents = operand_sums(part, operand, key and key.at(at), shared)
        # The transform is orthogonal: apart from rounding to BF16, it does not change the sum of squares.
        raw_signal = _sums_of_squares(x) if rht and not large else sums[:1]
        sums = torch.cat((sums, raw_signal, torch.full_like(raw_signal, count * part.numel() / x.numel())))
        if unit is not None:
            maxima, square = maxima * unit, unit.to(torch.float64).square()
            sums = torch.cat((sums[:2] * square, sums[2:5], sums[5:6] * square, sums[6:]))  # not the counts
        self.probe.add(call.context.name, slot.name, sums, torch.cat((maxima, exponents)))

    def _product(self, name: str, a: Tensor, b: Tensor, result: Tensor, group: ProcessGroup | None) -> None:
        """name: of the part. a: [m, k], b: [n, k], result: [m, n]. group: ranks whose partial products add up."""
        if name in recipes.GEMMS and not self.call.recipe.gemms[name].quantized:
            return
        sums = torch.zeros(3, dtype=torch.float64, device=a.device)
        size = max(1, _CHUNK_ELEMENTS // result.shape[1])
        for start in range(0, result.shape[0], size):
            chunk = slice(start, start + size)
            exact = EMULATED.gemm(GemmOperand(a[chunk]), GemmOperand(b), torch.float32)
            actual = result[chunk]
            if group is not None:
                both = torch.stack((exact, actual.to(torch.float32)))
                dist.all_reduce(both, group=group)
                exact, actual = both.unbind()
            error = actual - exact
            sums += torch.cat((_sums_of_squares(exact, error), (exact * error).sum(dtype=torch.float64)[None]))
        self.probe.add(self.call.context.name, name, sums)

    def _ranks_that_shard_weight(self, dim: int) -> ProcessGroup | None:
        spec = self.call.gradient_spec  # a gradient is placed as its weight
        if spec is None:
            return None
        axes = [axis for axis, placement in enumerate(spec.placements) if placement.is_shard(dim)]
        return next((spec.mesh.get_group(axis) for axis in axes if spec.mesh.size(axis) > 1), None)


class _ProbedSegments:
    """One call of the linears of experts under measurement: a `ProbedCall` for each segment with tokens, except for dW,
    which is an expert's."""

    def __init__(self, probe: Probe, call: GroupedCall, x: Tensor, y: Tensor) -> None:
        self.x, self.segments, y = x, call.segments, call.segments.sort(y)
        self.calls: list[tuple[int, slice, ProbedCall]] = []
        for number, (rows, _) in enumerate(call.segments.sizes):
            if rows.start < rows.stop:
                self.calls.append((number, rows, probe.of_call(call.lone(number, x[rows]), x[rows])))
                self.calls[-1][2].forward(y[rows])

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        dx = None if dx is None else self.segments.sort(dx)
        for _, rows, probed in self.calls:
            probed.gradients(dy[rows], None if dx is None else dx[rows], wgrad=dw is not None)
        if dw is not None:
            for expert in range(self.segments.num_experts):
                of_expert = [one for one in self.calls if one[0] % self.segments.num_experts == expert]
                if of_expert:
                    dy_x = [torch.cat([of[rows] for _, rows, _ in of_expert]) for of in (dy, self.x)]
                    of_expert[0][2].weight_gradient(dy_x[0], dy_x[1], local_part(dw)[expert])
        self.calls.clear()


def sample_rows(x: Tensor, columns: int) -> Tensor:
    """Bands of rows spread evenly over `x` [rows, ...]: at least `SAMPLE` elements of a tensor [rows, columns], which
    it must have."""
    band = math.gcd(x.shape[0], _BAND_ROWS)
    num_bands = x.shape[0] // band
    wanted = -(-SAMPLE // (band * columns))
    return x.unflatten(0, (-1, band))[:: num_bands // wanted][:wanted].flatten(0, 1)


def _transformed_amax(x: Tensor, transform: Tensor) -> Tensor:
    """The largest magnitude of `x` [rows, cols] after a Hadamard transform: FP32 0-dim. transform: as a matrix.

    A BF16 product with +-1 moves a seventh of the bytes of the exact butterflies; the last bit may differ.
    """
    size, signs = transform.shape[0], transform.sign().to(torch.bfloat16)
    chunks = x.split(max(1, _CHUNK_ELEMENTS // x.shape[1]))
    products = (rows.to(torch.bfloat16).unflatten(-1, (-1, size)) @ signs for rows in chunks)
    return torch.stack([product.abs().amax() for product in products]).amax().to(torch.float32) / math.sqrt(size)


@functools.cache
def _device_signs(size: int, device: torch.device) -> Tensor:
    """`fixed_signs`, cached: making them copies from the host, which waits for the device."""
    return fixed_signs(size, device)


def operand_sums(
    x: Tensor, operand: recipes.Operand, key: RoundingKey | None, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first five of `OPERAND_SUMS` for `x`, FP32 [rows, k], quantized as `operand` says: FP64 [5]. (The other two
    are about the tensor before a transform.) And FP64 [2]: log2 of the largest block scale, and minus that of the
    smallest that is not zero; -inf if all are. key: of stochastic rounding. amax: as `Format.amax`, of all."""
    encoded = operand.encode(x, key, amax)
    values, limits, scale = encoded.block_values(), scale_values(encoded.scales), encoded.decode_scale()
    if scale is not None:
        values, limits = values.mul_(scale), limits * scale
    exponents = torch.where(limits > 0, limits, math.nan).to(torch.float64).log2()
    spread = torch.stack((exponents, -exponents)).nan_to_num(nan=-math.inf).flatten(1).amax(1)
    limits = limits * format_of(operand.format).largest  # [rows, k / block]: what each block's scale can express
    magnitude = x.abs().unflatten(-1, (limits.shape[-1], -1))
    reach = torch.where(limits > 0, limits * _ON_THE_LIMIT, math.inf)
    saturated = torch.count_nonzero(magnitude > reach[..., None])
    counts = torch.stack((torch.count_nonzero(x), torch.count_nonzero(values), saturated)).to(torch.float64)
    # Zeros stay zeros in every format, so the difference of the counts is what became zero.
    counts[1] = counts[0] - counts[1]
    return torch.cat((_sums_of_squares(x, values - x), counts)), spread


def operand_statistics(sums: Sequence[float], maxima: Sequence[float], transformed: bool) -> dict[str, float]:
    """The statistics that the top of this file lists.

    sums: totals in the order of `OPERAND_SUMS`. maxima: before and after the transform, and the exponents of block
    scales, as `operand_sums`. transformed: whether there was a Hadamard transform; without one, the `*_rht` are left
    out. A tensor of zeros has an SNR of infinity and shares of 0.
    """
    signal, error, nonzero, zeroed, saturated, raw_signal, raw_count = sums
    raw_amax, amax, largest_scale, smallest_scale = maxima
    statistics = {
        "snr_db": _decibels(signal, error),
        "zeroed": zeroed / max(nonzero, 1.0),
        "saturated": saturated / max(nonzero, 1.0),
        "amax": raw_amax,
        "rms": (rms := math.sqrt(raw_signal / raw_count)),
        "crest": raw_amax / rms if rms > 0 else 0.0,
        "scale_spread": max(0.0, largest_scale + smallest_scale),
    }
    if transformed:
        rms_rht = math.sqrt(signal / raw_count)
        crest_rht = amax / rms_rht if rms_rht > 0 else 0.0
        statistics |= {"amax_rht": amax, "rms_rht": rms_rht, "crest_rht": crest_rht}
    return statistics


def relative_error(signal: float, error: float) -> float:
    """||result - exact|| / ||exact||, from their squares; 0 where both are 0."""
    if signal == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / signal)


def _sums_of_squares(*tensors: Tensor) -> Tensor:
    # FP32 norms (1e-4 exact, which is 0.001 dB) squared in FP64; FP64 copies would cost several times as much.
    norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]
    return torch.stack(norms).to(torch.float64).square_()


def _decibels(signal: float, error: float) -> float:
    if signal > 0 and error > 0:
        return 10 * (math.log10(signal) - math.log10(error))
    if math.isnan(signal) or math.isnan(error):
        return math.nan
    return -math.inf if error > 0 else math.inf
