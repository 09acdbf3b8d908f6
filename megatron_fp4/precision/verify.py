"""Whether a backend computes what its recipe says: compared with the reference in `megatron_fp4.quantization`.

The self-test (`require`) runs before the first step of a run whose backend is not emulated, for the shapes and recipes
of its own plan. Native kernels were wrong before in ways that a loss curve shows late or never: stochastic rounding
that returned zeros on one GPU generation, scales blocked along the wrong dimension. For each linear's shape and recipe:

    codes      every operand, rounded to nearest: codes, block scales and tensor maximum, bit for bit but for the sign
               of a zero
    draws      operands with draws of ours: bit for bit as well. Draws of another library's by their statistics
               (fairness.py)
    maximum    where ranks share a tensor's maximum: every operand is scaled by that of all of them
    products   fprop, dgrad and wgrad at full size from the backend's own operands, against FP64 on 256 rows; and wgrad
               added to the gradient of earlier micro-batches
    poison     NaN and inf in x, W or dy reach the products

The tensors are random, with outlier columns, one block of zeros and rows that are a hundred times smaller. Their values
are multiples of one power of two, so that a Hadamard transform is exact in FP32 in any order of summation: on other
values two correct transforms may differ in the last bit of BF16, and then in a code.

The recheck (`Recheck`) meets the run's own tensors, on a machine that may have begun to compute wrongly: every N steps
one linear is computed again by the reference.

    recheck = Recheck(interval, linears, device)
    with recheck.watching(step):
        result = train_step(...)
    rechecked = recheck.collect()           # None unless the step was due

In the due step a watcher stands between the linear and its backend. Of the step's first micro-batch it compares every
operand as the linear really used it with the reference quantizer's, and rows of the products with FP64; of the next one
wgrad's product that is added to the gradient. It changes nothing: it draws from no generator and writes no tensor of
the run, so losses and weights keep their bits.

The linears take turns in the plan's order: which one is due is a function of the step alone, the same on all ranks and
after a resume. Each data-parallel rank checks it on its own micro-batch, each tensor-parallel rank on its own shard; a
fault on one rank is known to all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups
from megatron_fp4.precision.emulated import operand_rows, shared_amax
from megatron_fp4.precision.fairness import Draws, dependence_fault, rounding_faults
from megatron_fp4.precision.linear import LinearCall, LinearContext
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import SLOTS, SLOTS_OF, Gemm, Operand, OperandSlot, Recipe, rounded_to_nearest
from megatron_fp4.precision.reference import quantized
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.elements import E2M1_MAX, E2M1_VALUES, FP32_MAX, e2m1_values, unpack_codes
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# ------------------------------------------------------------------------------------------------------------ operands

# Elements that are compared at once, in whole blocks of every format: bounds the memory of the reference.
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**22, 128
# One step of BF16 where it is widest, relative; and what FP32 sums of 16 may be off near zero, in units of the E2M1
# grid, whose largest value is that of the tile.
_BF16_STEP, _NEAR_ZERO = 2.0**-7, 2.0**-14


def operand_fault(made: BackendOperand, x: Tensor, request: OperandRequest, *, exact: bool = False) -> str:
    """What of the operand `made` differs from the reference, or an empty string; a collective of the request's
    `amax_group` (nvfp4).

    x: [n, k], what it was made of, before the transform.

    It must be the reference's bit for bit, draws included. Transformer Engine's draws are its own: there every code
    must be one of its value's two neighbours. And after a Hadamard transform two correct sums of a run's values may
    round to neighbouring BF16 numbers (`exact`: the values avoid that): there amax may be off by one such step, a block
    scale by one E4M3 step, and codes must follow from values within one step, under the operand's own scales.
    """
    chunks = list(_row_chunks(x))
    amax = functools.reduce(torch.maximum, (operand_rows(x[chunk], request).abs().amax() for chunk in chunks))
    amax = amax.to(torch.float32)
    amax = shared_amax(amax, request.amax_group) if format_of(request.operand.format).tensor_scale else amax
    if not amax.isfinite():
        poisoned = any(part is not None and not part.isfinite().all() for part in (made.scale, made.unpacked()))
        return "" if poisoned else "is finite although it was made of NaN or inf"
    decoded = None if made.decoded is None else made.decoded()
    values, scale = made.unpacked() if decoded is None else None, made.scale
    for chunk in chunks:
        rows = operand_rows(x[chunk], request)
        # Codes with an amax are Transformer Engine's.
        if isinstance(decoded, NVFP4Tensor) and (request.key is not None or (request.rht and not exact)):
            fault = _native_fault(decoded, chunk, rows, request, amax, bool(request.rht) and not exact)
        else:
            key = _from_row(request.key, chunk.start)
            right = quantized(rows, request.operand, key, amax)
            fault = _parts_fault(
                _parts_of(decoded, values, scale, chunk), _reference_parts(right, decoded), chunk.start
            )
        if fault:
            return fault
    return ""


def _row_chunks(x: Tensor) -> Iterator[slice]:
    """The rows of a matrix, some at a time: whole blocks of every format."""
    size = max(_CHUNK_ROWS, _CHUNK_ELEMENTS // x.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    return (slice(start, start + size) for start in range(0, x.shape[0], size))


def _from_row(key: RoundingKey | None, rows: int) -> RoundingKey | None:
    """The draws of a tensor from its row `rows` on."""
    return None if key is None else replace(key, row_offset=key.row_offset + rows)


def _parts_of(
    decoded: QuantizedTensor | None, values: Tensor | None, scale: Tensor | None, rows: slice
) -> dict[str, Tensor]:
    """Rows of an operand in comparable parts: codes and scales where it has them (`decoded`), else values."""
    if decoded is None:
        assert values is not None
        parts = {"values": values[rows].to(torch.float32) + 0.0}
    else:
        parts = _code_parts(QuantizedTensor(decoded.codes[rows], decoded.scales[rows], decoded.block))
    if isinstance(decoded, NVFP4Tensor):
        parts["amax"] = decoded.amax
    elif scale is not None:
        parts["tensor scale"] = scale
    return parts


def _reference_parts(right: QuantizedTensor, decoded: QuantizedTensor | None) -> dict[str, Tensor]:
    """The reference in the same parts.

    A zero's sign is free: no product sees it, the emulation does not keep it, and hardware that rounds to E2M1 keeps
    the sign of a number that becomes zero (code 8), of an exact -0.0 perhaps as well, where the reference has code 0.
    """
    parts = {"values": right.block_values() + 0.0} if decoded is None else _code_parts(right)
    if isinstance(right, NVFP4Tensor):
        native = isinstance(decoded, NVFP4Tensor)
        parts |= {"amax": right.amax} if native else {"tensor scale": right.decode_scale()}
    return parts


def _code_parts(of: QuantizedTensor) -> dict[str, Tensor]:
    codes = _unsigned_zeros(of.codes) if of.codes.dtype == torch.uint8 else of.codes
    return {"codes": codes, "scales": of.scales.view(torch.uint8) if of.scales.element_size() == 1 else of.scales}


def _unsigned_zeros(codes: Tensor) -> Tensor:
    """Packed E2M1 codes (uint8, two a byte) with code 8, the negative zero, as code 0."""
    low = torch.where((codes & 0x0F) == 0x08, codes & 0xF0, codes)
    return torch.where((low & 0xF0) == 0x80, low & 0x0F, low)


def _parts_fault(found: Mapping[str, Tensor], right: Mapping[str, Tensor], first_row: int) -> str:
    """The first part in which they differ, and where."""
    assert found.keys() == right.keys(), "an operand without what its format has"
    for part, value in right.items():
        if fault := difference(found[part], value, first_row):
            return f"{part} {fault}"
    return ""


def difference(actual: Tensor, expected: Tensor, first_row: int = 0) -> str:
    """Where two tensors differ in any bit, in words; empty if nowhere."""
    if actual.shape != expected.shape:
        return f"have shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    unequal = torch.ne(*(t.contiguous().view(sizes[t.element_size()]) for t in (actual, expected)))
    if not unequal.any():
        return ""
    at = unequal.nonzero()[0].tolist()
    found, right = (t[tuple(at)].to(torch.float32).item() for t in (actual, expected))
    where = [at[0] + first_row, *at[1:]] if at else "the tensor"
    return f"differ in {int(unequal.sum())} of {unequal.numel()}, first at {where}: {found:g} instead of {right:g}"


def _native_fault(
    decoded: NVFP4Tensor, chunk: slice, rows: Tensor, request: OperandRequest, amax: Tensor, off_by_a_step: bool
) -> str:
    """Codes with Transformer Engine's draws or after its transform, which exist in NVFP4 alone. off_by_a_step: `rows`
    may be the neighbouring BF16 numbers."""
    step = _BF16_STEP if off_by_a_step else 0.0
    if not (decoded.amax - amax).abs() <= step * amax:
        return f"amax is {decoded.amax.item():g} instead of {amax.item():g}"
    right = quantized(rows, request.operand, None, decoded.amax)
    scales = decoded.scales[chunk]
    apart = (scales.view(torch.uint8).to(torch.int16) - right.scales.view(torch.uint8).to(torch.int16)).abs()
    if (apart > int(off_by_a_step)).any():
        return f"scales {difference(scales, right.scales, chunk.start)}"

    scales = scales.to(torch.float32)
    codes = e2m1_values(unpack_codes(decoded.codes[chunk]))
    encode = (scales * encode_tensor_scale(decoded.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    positions = (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)
    slack = positions.abs() * step + (_NEAR_ZERO if off_by_a_step else 0.0)
    bounds = [(positions + side).clamp(-E2M1_MAX, E2M1_MAX) for side in (-slack, slack)]
    find = _nearest if request.key is None else _neighbour
    least, most = (find(bound, up=up) for bound, up in zip(bounds, (False, True), strict=True))
    # Under a scale of zero the codes do not show.
    strangers = ((codes < least) | (codes > most)) & (scales > 0).repeat_interleave(16, dim=1)
    if not strangers.any():
        return ""
    row, column = strangers.nonzero()[0].tolist()
    return (
        f"codes differ in {int(strangers.sum())} of {strangers.numel()}, first at {[row + chunk.start, column]}: "
        f"{codes[row, column].item():g} for {positions[row, column].item():g}"
    )


def _grid(device: torch.device) -> Tensor:
    return torch.tensor([*(-value for value in E2M1_VALUES[:0:-1]), *E2M1_VALUES], device=device)


def _neighbour(positions: Tensor, up: bool) -> Tensor:
    """The E2M1 value at or above (`up`), or at or below, FP32 |positions| <= 6."""
    grid = _grid(positions.device)
    index = torch.searchsorted(grid, positions.contiguous(), right=not up) - (0 if up else 1)
    return grid[index.clamp(0, grid.numel() - 1)]


def _nearest(positions: Tensor, up: bool) -> Tensor:
    """The nearest E2M1 value of FP32 |positions| <= 6, of two equally near the one above (`up`) or below."""
    grid = _grid(positions.device)
    return grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, positions.contiguous(), right=up)]


# ----------------------------------------------------------------------------------------------------------- products

# Largest relative error of a product (Frobenius norm), and of one element in units of the root mean square: BF16
# rounds by 2^-9; Hopper's FP8 tensor cores add 128 products with 14 bits.
PRODUCT_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
ELEMENT_ERROR = {torch.bfloat16: 0.05, torch.float32: 0.01}
_ROWS = 256
_PRODUCT_ELEMENTS = 2**24


@dataclass(frozen=True)
class ProductErrors:
    """How far rows of a product are from FP64.

    total: relative, Frobenius norm. worst: of one element, in units of the root mean square of all. peak: the largest
    element in these units. condition: how much larger sums of magnitudes are than sums of random signs would have them
    (1 or less where nothing cancels beyond that); computed only for products beyond the plain bounds.
    """

    total: float
    worst: float
    peak: float
    condition: float
    dtype: torch.dtype

    @property
    def fault(self) -> str:
        """What is beyond the bounds, or an empty string. NaN passes no comparison, and so is a fault."""
        factor = max(1.0, self.condition)
        element = factor * ELEMENT_ERROR[self.dtype] + 2**-8 * self.peak
        if self.total <= factor * PRODUCT_ERROR[self.dtype] and self.worst <= element:
            return ""
        return f"relative error {self.total:.2e}, worst element {self.worst:.2e} of the root mean square"


def product_rows(product: Tensor, count: int = _ROWS) -> Tensor:
    """Evenly spaced rows of a product, `count` at most."""
    return torch.linspace(0, product.shape[0] - 1, min(count, product.shape[0]), device=product.device).long()


def product_errors(
    product: Tensor,
    a: BackendOperand,
    b: BackendOperand,
    rows: Tensor,
    *,
    groups: RowGroups | None = None,
    before: Tensor | None = None,
    cancelling: bool = False,
) -> ProductErrors:
    """`rows` of the product a b^T against FP64 on the operands' own values.

    groups: of the rows of `a`, of which the product has those that count. before: what these rows were before the
    product was added to them; None: zeros. cancelling: the tensors are a run's, and sums may cancel further than those
    of random numbers.
    """
    left, right = a.unpacked()[rows if groups is None else groups.padded_indices(rows)].to(torch.float64), b.unpacked()
    scale = math.prod(1.0 if made.scale is None else made.scale.to(torch.float64) for made in (a, b))
    expected = _in_fp64(left, right) * scale
    if product.shape[1] != expected.shape[1]:
        return ProductErrors(math.inf, math.inf, 0.0, 1.0, product.dtype)
    expected = expected if before is None else expected + before.to(torch.float64)
    finite = expected.isfinite()
    if not finite.all():
        # A step that is not finite is for others to handle; here NaN and inf must only not disappear.
        lost = math.inf if product[rows][~finite].isfinite().any() else 0.0
        return ProductErrors(lost, lost, 0.0, 1.0, product.dtype)
    error = product[rows].to(torch.float64) - expected
    norm, root = expected.norm().item(), expected.square().mean().sqrt().item()
    if norm == 0:
        total = worst = 0.0 if not error.any() else math.inf
        return ProductErrors(total, worst, 0.0, 1.0, product.dtype)
    total, worst = error.norm().item() / norm, error.abs().amax().item() / root
    found = ProductErrors(total, worst, expected.abs().amax().item() / root, 1.0, product.dtype)
    if not cancelling or not found.fault:
        return found
    magnitudes = (_in_fp64(left.abs(), right.abs()) * scale).norm().item()
    return replace(found, condition=magnitudes / norm / left.shape[1] ** 0.5)


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    """left right^T for FP64 [m, k] and [n, k] of any type, converted piece by piece."""
    size = max(1, _PRODUCT_ELEMENTS // right.shape[1])
    return torch.cat([left @ part.to(torch.float64).t() for part in right.split(size)], dim=1)


# ----------------------------------------------------------------------------------------------------------- self-test

_DRAWS = 16
_DRAW_ELEMENTS = 2**21


class SelfTestError(RuntimeError):
    """A backend computes something else than the reference."""


@dataclass(frozen=True)
class Case:
    """The local shape of a linear on this rank (output features unpadded) and its recipe.

    in_shards, out_shards: ranks among which input or output features are sharded; None: not sharded.
    """

    tokens: int
    inputs: int
    outputs: int
    num_groups: int
    recipe: Recipe
    in_shards: ProcessGroup | None = None
    out_shards: ProcessGroup | None = None

    def __str__(self) -> str:
        return f"{self.recipe.name}, {self.tokens} tokens, {self.inputs} -> {self.outputs}"

    def context(self, backend: Backend, step: int = 0) -> LinearContext:
        """Of its linear, without the other ranks."""
        return LinearContext("selftest", self.recipe, StepState(seed=7, step=step), backend, self.num_groups)


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, what differs (empty: nothing), and of products the relative error."""

    case: Case
    what: str
    fault: str
    measured: float | None = None

    def __str__(self) -> str:
        return f"{self.case}: {self.what}: {self.fault or 'as the reference'}"


def cases_of(plans: Iterable[Plan], linears: Mapping[str, LinearContext], tokens: int) -> list[Case]:
    """The different quantized linears of the plans, as this rank computes them. tokens: of a micro-batch."""

    def size(group: ProcessGroup | None) -> int:
        return 1 if group is None else dist.get_world_size(group)

    cases: dict[Case, None] = {}
    for plan in plans:
        for row in plan.rows:
            context, linear = linears[row.linear.name], row.linear
            if row.recipe.quantized:
                inputs, outputs = linear.in_features // size(context.in_shards), linear.out_features
                outputs //= size(context.out_shards)
                shards = (context.in_shards, context.out_shards)
                cases[Case(tokens, inputs, outputs, context.num_groups, row.recipe, *shards)] = None
    return list(cases)


def require(backend: Backend, cases: Iterable[Case], device: torch.device) -> str:
    """Test `backend` on this rank's device; returns a line for the log. A collective.

    Raises SelfTestError on all ranks if any rank found a fault, with its own faults where there are some.
    """
    findings = [finding for case in cases for finding in _findings(backend, case, device)]
    faults = [str(finding) for finding in findings if finding.fault]
    count = torch.tensor(len(faults), device=device)
    dist.all_reduce(count)
    if faults:
        heading = f"self-test of the backend {backend.name} on {device}, without which precision.backend=emulated does:"
        raise SelfTestError("\n  ".join((heading, *faults)))
    if count.item():
        raise SelfTestError(f"self-test of the backend {backend.name}: faults on other ranks, none on this one")
    return f"self-test of {backend.name}: {len(findings)} comparisons with the reference, no difference"


def _findings(backend: Backend, case: Case, device: torch.device) -> list[Finding]:
    try:
        return list(check(backend, case, device))
    except (RuntimeError, ValueError) as error:  # what a kernel that this chip cannot run ends in
        return [Finding(case, "kernels", f"failed: {str(error).splitlines()[0]}")]


def check(backend: Backend, case: Case, device: torch.device) -> Iterator[Finding]:
    """All comparisons for one case; a collective of the case's groups."""
    x, w, dy = sample_tensors(case, device)
    recipe = rounded_to_nearest(case.recipe)
    call = LinearCall(replace(case, recipe=recipe).context(backend), w, x)
    tensors = {"activation": call.pad_tokens(x), "weight": call.pad_rows(w), "gradient": call.pad(dy)}
    made = {}
    for slot, make, source in makers(call, tensors):
        made[slot] = make()
        if recipe[slot].quantized:
            fault = operand_fault(made[slot], source, call.request(slot), exact=True)
            yield Finding(case, f"{slot.name} codes", fault)
    for name, gemm in recipe.gemms.items():
        if gemm.quantized:
            left, right = (made[slot] for slot in SLOTS if slot.gemm == name)
            product = backend.gemm(left, right, torch.float32 if name == "wgrad" else torch.bfloat16)
            errors = product_errors(product, left, right, product_rows(product))
            yield Finding(case, f"{name} product", errors.fault, errors.total)
            if name == "wgrad" and backend.accumulates:
                yield _accumulated_finding(backend, case, call, left, right)
    if backend.draws_ours:
        yield from _drawn_findings(backend, case, tensors)
    else:
        yield from _rounding_findings(backend, case, tensors)
    yield from _maximum_findings(backend, case, tensors)
    yield Finding(case, "NaN and inf", _poison_fault(backend, case, x, w, dy))


def makers(call: LinearCall, tensors: Mapping[str, Tensor]) -> Iterator[tuple[OperandSlot, MakeOperand, Tensor]]:
    """Both operands of each tensor (by its name in `SLOTS_OF`): what makes it, and the rows that it is made of,
    [n, k], before the transform."""
    for name, tensor in tensors.items():
        for slot, make in zip(SLOTS_OF[name], call.prepare(*SLOTS_OF[name], tensor), strict=True):
            assert make is not None
            yield slot, make, tensor.t() if slot.transposed else tensor


def sample_tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, inputs], W [outputs, inputs] and dy [tokens, outputs] in BF16, the same every time."""
    generator = torch.Generator(device).manual_seed(case.tokens + 3 * case.inputs + 7 * case.outputs)

    def draw(rows: int, columns: int, exponent: int) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device=device)
        t[:, ::67] *= 20
        t[1::31] *= 1e-2
        t[:16, :16] = 0
        # Below 2^7.5 in units of 2^-11, and BF16 rounds to coarser ones: sums of 16 have at most 23 bits.
        return ((t * 2.0**11).round() * 2.0 ** (exponent - 11)).to(torch.bfloat16)

    return draw(case.tokens, case.inputs, 0), draw(case.outputs, case.inputs, -5), draw(case.tokens, case.outputs, -13)


def _accumulated_finding(backend: Backend, case: Case, call: LinearCall, left: Any, right: Any) -> Finding:
    """wgrad's product added to a gradient, without the rows that are padding."""
    padded, kept = call.padded_group_rows, call.group_rows
    groups = None if padded == kept else RowGroups(padded, kept)
    alone = backend.gemm(left, right, torch.float32, None, groups)
    total = alone.flip(0) * 0.75
    rows = product_rows(total)
    before = total[rows]
    found = backend.gemm(left, right, torch.float32, total, groups)
    errors = product_errors(found, left, right, rows, groups=groups, before=before)
    return Finding(case, "wgrad product added to a gradient", errors.fault, errors.total)


def _drawn_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands with draws of ours, against the reference with the same key."""
    call = LinearCall(case.context(backend), tensors["weight"], tensors["activation"])
    for slot, make, source in makers(call, tensors):
        if case.recipe[slot].quantized and case.recipe[slot].drawn:
            yield Finding(case, f"{slot.name} draws", operand_fault(make(), source, call.request(slot), exact=True))


def _rounding_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands that round stochastically by draws of another library's, by the statistics of some draws."""
    ungrouped = replace(case, num_groups=1)
    for name, slots in SLOTS_OF.items():
        stochastic = [slot for slot in slots if case.recipe[slot].rounding == "stochastic"]
        if not stochastic:
            continue
        tensor = tensors[name]
        count = max(128, min(tensor.shape[0], _DRAW_ELEMENTS // tensor.shape[1] // 128 * 128))
        tensor = tensor[: min(count, tensor.shape[0])]
        draw = functools.partial(drawn_operands, backend, ungrouped, name, tensor, tensors["weight"])
        call = LinearCall(ungrouped.context(backend), tensors["weight"], tensor)
        rows = {slot: operand_rows(tensor, call.request(slot), slot.transposed).contiguous() for slot in stochastic}
        for slot in stochastic:
            draws = Draws(lambda step, slot=slot, draw=draw: draw(step)[slot], _DRAWS)  # type: ignore[misc]
            source = tensor.t() if slot.transposed else tensor
            fault = operand_fault(draws.make(0), source, call.request(slot), exact=True)
            fault = fault or rounding_faults(rows[slot], draws, case.recipe[slot])
            yield Finding(case, f"{slot.name} rounding", fault)
        if len(stochastic) == 2:
            fault = dependence_fault(rows, draw, case.recipe)
            yield Finding(case, f"{' and '.join(slot.name for slot in slots)} draws", fault)


def drawn_operands(
    backend: Backend, case: Case, name: str, tensor: Tensor, weight: Tensor, step: int
) -> dict[OperandSlot, BackendOperand]:
    """Both operands of the tensor `name`, by the draws of a step."""
    call = LinearCall(case.context(backend, step), weight, tensor)
    return {slot: make() for slot, make, _ in makers(call, {name: tensor})}


def _maximum_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands of a tensor whose maximum is shared; each rank's is half as large as that of the one before."""
    nearest = replace(case, recipe=rounded_to_nearest(case.recipe), num_groups=1)
    context = replace(nearest.context(backend), in_shards=case.in_shards, out_shards=case.out_shards)
    call = LinearCall(context, tensors["weight"], tensors["activation"])
    for name in tensors:
        group = context.amax_group(name)
        if group is None:
            continue
        tensor = tensors[name] * 2.0 ** -dist.get_rank(group)
        for slot, make, source in makers(call, {name: tensor}):
            if case.recipe[slot].format == "nvfp4":
                fault = operand_fault(make(), source, call.request(slot), exact=True)
                yield Finding(case, f"{slot.name} of {dist.get_world_size(group)} ranks", fault)


def _poison_fault(backend: Backend, case: Case, x: Tensor, w: Tensor, dy: Tensor) -> str:
    """NaN and inf in each tensor must show in both products that it is in."""
    for value in (float("nan"), float("inf")):
        for broken, reached in ((0, (0, 2)), (1, (0, 1)), (2, (1, 2))):
            given = [t.clone() for t in (x, w, dy)]
            given[broken][5, 7] = value
            call = LinearCall(case.context(backend), given[1], given[0])
            w_fprop, w_dgrad = call.weight_operands()
            activations = call.prepare(*SLOTS_OF["activation"], call.pad_tokens(given[0]))
            gradients = call.prepare(*SLOTS_OF["gradient"], call.pad(given[2]))
            assert activations[0] and activations[1] and gradients[0] and gradients[1]
            products = (
                backend.gemm(activations[0](), w_fprop, torch.bfloat16),
                backend.gemm(gradients[0](), call.dgrad_weight(w_dgrad), torch.bfloat16),
                backend.gemm(gradients[1](), activations[1](), torch.float32),
            )
            for index in reached:
                if products[index].isfinite().all():
                    return f"{value} in {('x', 'W', 'dy')[broken]} disappears in {('fprop', 'dgrad', 'wgrad')[index]}"
    return ""


# ------------------------------------------------------------------------------------------------------------- recheck

# Of each product, other ones at each of a linear's turns.
_PRODUCT_ROWS = 64


class RecheckError(SelfTestError):
    """A linear of a running run computed something else than the reference; the message is the same on all ranks."""


@dataclass(frozen=True)
class Rechecked:
    """One linear in one step (from 0). comparisons: on this rank. faults: of all ranks, the same on all."""

    linear: str
    step: int
    comparisons: int
    faults: list[str]

    def __str__(self) -> str:
        what = f"{self.linear} in step {self.step + 1}"
        if not self.faults:
            return f"recheck of {what}: {self.comparisons} comparisons with the reference, no difference"
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"recheck of {what}: {self.faults[0]}{more}"


class Recheck:
    """Rechecks `linears` (name -> context, in the plan's order, the same on all ranks) every `interval` steps; 0:
    never. device: of this rank."""

    def __init__(self, interval: int, linears: Mapping[str, LinearContext], device: torch.device) -> None:
        self.interval, self.device = interval, device
        self._linears = dict(linears)
        self._watched: tuple[str, int, _Watcher] | None = None

    def due(self, step: int) -> tuple[str, int] | None:
        """The linear to recheck in `step` (from 0) and how many turns it had before; None if none is due."""
        names = [name for name, context in self._linears.items() if context.recipe.quantized]
        if not self.interval or step % self.interval or not names:
            return None
        turn, index = divmod(step // self.interval, len(names))
        return names[index], turn

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the training step `step`, in which a linear is watched if one is due."""
        due = self.due(step)
        if due is None:
            yield
            return
        context = self._linears[due[0]]
        # Codes that were kept from before would not be seen being made; made again they are the same.
        context.weight_cache = None
        context.watcher = watcher = _Watcher(due[1])
        self._watched = due[0], step, watcher
        try:
            yield
        finally:
            context.watcher = None

    def collect(self) -> Rechecked | None:
        """What the step found, over all ranks; None if none was due. A collective after a due step."""
        watched, self._watched = self._watched, None
        if watched is None:
            return None
        name, step, watcher = watched
        assert watcher.seen, f"nothing of {name} was seen"
        count = torch.tensor(len(watcher.faults), device=self.device)
        dist.all_reduce(count)
        faults: list[str] = []
        if count.item():
            mine = [f"rank {dist.get_rank()}: {fault}" for fault in watcher.faults]
            of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_ranks, mine)
            faults = [fault for found in of_ranks for fault in found]
        return Rechecked(name, step, len(watcher.seen), faults)


@dataclass
class _Watcher:
    """Compares the first operand of each slot and the first product of each GEMM of a linear: later micro-batches come
    by too, and recomputed blocks twice. turn: chooses rows."""

    turn: int
    faults: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def operands(
        self,
        x: Tensor,
        requests: tuple[OperandRequest | None, OperandRequest | None],
        makers: tuple[MakeOperand | None, MakeOperand | None],
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Operands that are compared when they are made."""

        def watched(make: MakeOperand, request: OperandRequest, transposed: bool) -> Any:
            made, slot = make(), request.slot
            assert slot is not None
            if made.quantized and slot.name not in self.seen:
                self._note(slot.name, operand_fault(made, x.t() if transposed else x, request))
            return made

        (columns, rows), (first, second) = requests, makers
        return (
            None if first is None or columns is None else functools.partial(watched, first, columns, False),
            None if second is None or rows is None else functools.partial(watched, second, rows, True),
        )

    def product(
        self,
        gemm: str,
        multiply: Callable[[], Tensor],
        sides: tuple[Any, Any],
        total: Tensor | None,
        rows: RowGroups | None,
    ) -> Tensor:
        """The backend's product, compared."""
        what = f"{gemm} product" if total is None else f"{gemm} product added to a gradient"
        if what in self.seen or not any(side.quantized for side in sides):
            return multiply()
        before = None if total is None else total[self._rows(total)]
        product = multiply()
        errors = product_errors(product, *sides, self._rows(product), groups=rows, before=before, cancelling=True)
        self._note(what, errors.fault)
        return product

    def _rows(self, product: Tensor) -> Tensor:
        size, count = product.shape[0], min(_PRODUCT_ROWS, product.shape[0])
        return (torch.arange(count, device=product.device) * size // count + self.turn) % size

    def _note(self, what: str, fault: str) -> None:
        self.seen.add(what)
        if fault:
            self.faults.append(f"{what}: {fault}")


# ------------------------------------------------------------------------------------------------------------- recipes

_X, _W, _DY = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16)), Operand("nvfp4", (1, 16), "stochastic")
_M8 = Operand("mxfp8", (1, 32))
_F8, _F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
_F8P, _F8P_W = replace(_F8, power_of_two_scales=True), replace(_F8_W, power_of_two_scales=True)
# What native backends are tried with where there is no run.
RECIPES = (
    Recipe("nvfp4", Gemm(_X, _W), Gemm(_DY, _W), Gemm(_DY, _X, 16)),
    Recipe("fp8_block", Gemm(_F8, _F8_W), Gemm(_F8, _F8_W), Gemm(_F8, _F8)),
    Recipe("fp8_block, powers of two", Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P)),
    Recipe("mxfp8", Gemm(_M8, _M8), Gemm(_M8, _M8), Gemm(_M8, _M8)),
)
