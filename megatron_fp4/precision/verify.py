"""Compare a backend with the reference quantizers and with FP64: does it compute what its recipe says?

The self-test (`require`) runs before the first step of a run whose backend is not emulated, with the shapes and recipes
of the run's plan. Native kernels have had faults that a loss curve shows late or never: stochastic rounding returned
zeros on one GPU generation, and scales lay along the wrong dimension. For each linear's shape and recipe it compares:

    codes      every operand, rounded to nearest: values and tensor scale, bit for bit
    draws      every stochastic operand: bit for bit if it uses the project's own draws; if it uses another library's,
               values and scales must be possible with some draws, and their statistics fair
    maximum    if ranks share a tensor's maximum: every operand must be scaled by the maximum of all ranks
    products   fprop, dgrad and wgrad at full size, from the backend's own operands, on 256 rows with FP64; and wgrad
               added to the gradient of earlier micro-batches
    bits       the products of NVFP4 in FP32, on 64 rows, bit for bit with Blackwell's order of sums (sums.py): a fault
               of the backend that says it computes in this order; of others the share of other bits is told
    gathered   operands that ranks gather as codes, weights and tokens: bit for bit; and their products
    poison     NaN and inf in x, W or dy must reach the products

For linears of experts, grouped kernels make the operands and products of two, and the second's are compared.

The recheck (`Recheck`) compares tensors of the run itself, because a machine may begin to compute wrongly. Every N
steps it watches one linear. In the step's first micro-batch it compares every operand that the linear uses with the
reference quantizer, and rows of the products with FP64; in the second one, wgrad's product that is added to the
gradient. It draws from no generator and writes no tensor of the run, so losses and weights keep their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups, first_line
from megatron_fp4.precision.emulated import PackedWeight, amax_of, operand_rows, packed_weight, rows_of, shared_amax
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.messages import Pending
from megatron_fp4.precision.operands import LinearCall, LinearContext, Sharding
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import (
    FPROP_WEIGHT,
    GEMMS,
    SLOTS,
    SLOTS_OF,
    Operand,
    OperandSlot,
    Recipe,
    rounded_to_nearest,
)
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.sums import fma, sums
from megatron_fp4.precision.transformer_engine import LoneExpert
from megatron_fp4.quantization import rounding
from megatron_fp4.quantization.formats import format_of, quantize_nvfp4
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.tensor import NVFP4Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# ------------------------------------------------------------------------------------------------------------ operands

# About so many elements are compared at once, to limit the reference's memory; the rows are a multiple of
# `_CHUNK_ROWS`, so that blocks of every format are complete.
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**22, 128
# The largest relative step of BF16; and the error of FP32 sums of 16 near zero, in units of the E2M1 grid.
_BF16_STEP, _NEAR_ZERO = 2.0**-7, 2.0**-14


def operand_fault(
    made: BackendOperand, x: Tensor, place: rounding.Place, request: OperandRequest, *, exact: bool = False
) -> str:
    """How the operand `made` differs from the reference; empty: not at all. For nvfp4, a collective of the place's
    `amax_groups`. x: [n, k], the tensor that `made` was made from, before the transform; place: its place.

    The operand must equal the reference bit for bit, draws included, except for the sign of zeros, which has no effect
    on products. Two differences are allowed. With Transformer Engine's own draws, every code must be a neighbour of its
    value. After a Hadamard transform two correct sums may round to neighbouring BF16 numbers, unless all sums of x are
    exact (`exact`). Then amax may differ by one such step and a block scale by one E4M3 step, and with the operand's
    own scales every code must be correct for a value within one step.
    """
    size = max(_CHUNK_ROWS, _CHUNK_ELEMENTS // x.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    chunks = [slice(start, start + size) for start in range(0, x.shape[0], size)]
    amax = functools.reduce(torch.maximum, (operand_rows(x[chunk], request).abs().amax() for chunk in chunks))
    amax, form = amax.to(torch.float32), format_of(request.operand.format)
    if form.tensor_scale:
        amax = shared_amax(amax, place.amax_groups)
    values, scale = made.unpacked(), made.scale
    if not amax.isfinite():
        poisoned = any(part is not None and not part.isfinite().all() for part in (scale, values))
        return "" if poisoned else "is finite, although its tensor has NaN or inf"
    decoded, inexact = made.decoded(), bool(request.rht) and not exact
    for chunk in chunks:
        rows = operand_rows(x[chunk], request)
        if isinstance(decoded, NVFP4Tensor) and (request.key is not None or inexact):
            fault = _allowed_codes_fault(decoded, chunk, rows, request, amax, inexact)
        else:
            key = request.key and request.key.at(replace(place, rows=place.rows.part(chunk)))
            rows = rows.to(torch.float32)
            expected = request.operand.encode(rows, key, amax if form.tensor_scale else amax_of(rows, place, form))
            actual = values[chunk].to(torch.float32)
            fault = difference("values", actual + 0.0, expected.block_values() + 0.0, chunk.start)
            if isinstance(expected, NVFP4Tensor) and not fault:
                assert scale is not None, "NVFP4 without a tensor scale"
                fault = difference("tensor scale", scale, expected.decode_scale())
        if fault:
            return fault
    return ""


def difference(what: str, actual: Tensor, expected: Tensor, first_row: int = 0) -> str:
    """A sentence, beginning with `what`, about where two tensors differ in any bit; empty if they do not."""
    actual_type, expected_type = (f"{list(t.shape)} ({t.dtype})" for t in (actual, expected))
    if actual_type != expected_type:
        return f"{what} are {actual_type} instead of {expected_type}"
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    unequal = torch.ne(*(t.contiguous().view(sizes[t.element_size()]) for t in (actual, expected)))
    if not unequal.any():
        return ""
    index = unequal.nonzero()[0].tolist()
    found, right = (t[tuple(index)].to(torch.float32).item() for t in (actual, expected))
    where = [index[0] + first_row, *index[1:]] if index else "the tensor"
    count = f"{int(unequal.sum())} of {unequal.numel()}"
    return f"{what} differ in {count}, first at {where}: {found:.9g} instead of {right:.9g}"


def _allowed_codes_fault(
    decoded: NVFP4Tensor, chunk: slice, rows: Tensor, request: OperandRequest, amax: Tensor, inexact: bool
) -> str:
    """As `operand_fault`, for NVFP4 codes with Transformer Engine's draws or after its transform. inexact: the values
    that were quantized may be BF16 neighbours of `rows`."""
    step = _BF16_STEP if inexact else 0.0
    if not (decoded.amax - amax).abs() <= step * amax:
        return f"amax is {decoded.amax.item():g} instead of {amax.item():g}"
    expected = request.operand.encode(rows.to(torch.float32), None, decoded.amax)
    scales = decoded.scales[chunk]
    e4m3_steps = (scales.view(torch.uint8).to(torch.int16) - expected.scales.view(torch.uint8).to(torch.int16)).abs()
    if (e4m3_steps > int(inexact)).any():
        return difference("scales", scales, expected.scales, chunk.start)
    scales = scales.to(torch.float32)
    codes, positions = (
        rounding.e2m1_values(rounding.unpack_codes(decoded.codes[chunk])),
        grid_positions(rows, scales, decoded.amax),
    )
    slack = positions.abs() * step + (_NEAR_ZERO if inexact else 0.0)
    least, most = (_grid_value(positions + (slack if up else -slack), request.key is None, up) for up in (False, True))
    # With a scale of zero every code decodes to zero.
    wrong = ((codes < least) | (codes > most)) & (scales > 0).repeat_interleave(16, dim=1)
    if not wrong.any():
        return ""
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"codes differ in {int(wrong.sum())} of {wrong.numel()}, first at {[row + chunk.start, column]}: "
        f"{codes[row, column].item():g} for {positions[row, column].item():g}"
    )


def _grid_value(positions: Tensor, nearest: bool, up: bool) -> Tensor:
    """The E2M1 values at or above (`up`) or at or below FP32 positions; or the nearest, at a tie above or below."""
    grid = torch.tensor(
        [*(-value for value in rounding.E2M1_VALUES[:0:-1]), *rounding.E2M1_VALUES], device=positions.device
    )
    positions = positions.clamp(-rounding.E2M1_MAX, rounding.E2M1_MAX).contiguous()
    if nearest:
        return grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, positions, right=up)]
    return grid[torch.searchsorted(grid, positions, right=not up) - (0 if up else 1)]


def grid_positions(rows: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """`rows` [n, k] in units of the E2M1 grid of their blocks, FP32. scales: FP32 [n, k / 16]. amax: of the tensor."""
    encode = (scales * encode_tensor_scale(amax).reciprocal()).reciprocal().clamp(max=rounding.FP32_MAX)
    return (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)


# ----------------------------------------------------------------------------------------------------------- products

# Limits by the product's dtype: the relative error of the product (Frobenius norm), and the error of one element in
# units of the root mean square. BF16 rounds by 2^-9; Hopper's FP8 tensor cores add 128 products with 14 bits.
PRODUCT_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
ELEMENT_ERROR = {torch.bfloat16: 0.05, torch.float32: 0.01}
_SELFTEST_ROWS, _RECHECK_ROWS = 256, 64
_PRODUCT_ELEMENTS = 2**24


def product_fault(
    product: Tensor,
    a: BackendOperand,
    b: BackendOperand,
    rows: Tensor,
    *,
    groups: RowGroups | None = None,
    before: Tensor | None = None,
    cancelling: bool = False,
) -> tuple[str, float]:
    """What exceeds the limits in `rows` of the product a b^T against FP64 ("": nothing), and the relative error.

    groups: the row groups of `a`, whose padding the product leaves out. before: the values of these rows before the
    product was added to them; None: zeros. cancelling: of a run, whose sums may cancel more than random ones.
    """
    left, right = a.unpacked()[rows if groups is None else groups.padded_indices(rows)].to(torch.float64), b.unpacked()
    scale = math.prod(1.0 if made.scale is None else made.scale.to(torch.float64) for made in (a, b))
    expected = _in_fp64(left, right) * scale
    expected = expected if before is None else expected + before.to(torch.float64)
    found = product[rows].to(torch.float64)
    finite = expected.isfinite()
    if not finite.all():
        # Elsewhere a run handles steps that are not finite. Here NaN and inf must not disappear.
        return ("loses NaN or inf" if found[~finite].isfinite().any() else ""), 0.0
    error, root = found - expected, max(expected.square().mean().sqrt().item(), 1e-300)
    total = (error.square().mean().sqrt() / root).item()
    worst, peak = (t.abs().amax().item() / root for t in (error, expected))

    def within_limits(condition: float) -> bool:  # comparisons with NaN are False
        limit = condition * ELEMENT_ERROR[product.dtype] + 2**-8 * peak
        return total <= condition * PRODUCT_ERROR[product.dtype] and worst <= limit

    if within_limits(1.0):
        return "", total
    if cancelling:
        # The condition number: sums of magnitudes divided by the sums, relative to this ratio for random signs.
        magnitudes = (_in_fp64(left.abs(), right.abs()) * scale).square().mean().sqrt().item()
        if within_limits(max(1.0, magnitudes / root / left.shape[1] ** 0.5)):
            return "", total
    return f"relative error {total:.2e}, worst element {worst:.2e} of the root mean square", total


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    """left right^T of FP64 [m, k] and [n, k] of any dtype, which is converted in pieces."""
    size = max(1, _PRODUCT_ELEMENTS // right.shape[1])
    return torch.cat([left @ part.to(torch.float64).t() for part in right.split(size)], dim=1)


def _spaced_rows(product: Tensor, most: int, turn: int = 0) -> Tensor:
    """Indices of at most `most` evenly spaced rows of a product, first and last included; each `turn` has others."""
    size, count = product.shape[0], min(most, product.shape[0])
    return (torch.arange(count, device=product.device) * (size - 1) // max(count - 1, 1) + turn) % size


# ----------------------------------------------------------------------------------------------------------- self-test

_DRAW_ELEMENTS = 2**21


class SelfTestError(RuntimeError):
    """A backend does not compute what the reference computes."""


@dataclass(frozen=True)
class Case:
    """A linear to test: its shape on this rank (output features without padding) and its recipe.

    in_shards, out_shards: ranks that shard the input or output features; None: they are not sharded. experts: whether
    it is one of several experts, whose kernels are Transformer Engine's.
    """

    tokens: int
    inputs: int
    outputs: int
    num_groups: int
    recipe: Recipe
    in_shards: ProcessGroup | None = None
    out_shards: ProcessGroup | None = None
    experts: bool = False

    def __str__(self) -> str:
        shape = f"{self.recipe.name}, {self.tokens} tokens, {self.inputs} -> {self.outputs}"
        return f"{shape}, experts" if self.experts else shape

    def context(self, backend: Backend, step: int = 0) -> LinearContext:
        """The context of this linear on a single rank."""
        sharding = Sharding(num_groups=self.num_groups)
        return LinearContext("selftest", self.recipe, StepState(seed=7, step=step), backend, sharding)


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, the fault (empty: none), and for products the relative error."""

    case: Case
    what: str
    fault: str
    measured: float | None = None

    def __str__(self) -> str:
        return f"{self.case}: {self.what}: {self.fault or 'as the reference'}"


def cases_of(plans: Iterable[Plan], linears: Mapping[str, LinearContext], tokens: int) -> list[Case]:
    """The quantized linears of the plans by their shape on this rank, without duplicates; not experts that the backend
    emulates. tokens: in a micro-batch."""
    cases: dict[Case, None] = {}
    for row in (row for plan in plans for row in plan.rows if row.recipe.quantized):
        context, linear = linears[row.linear.name], row.linear
        sharding = context.sharding
        shards = sharding.inputs.ranks, sharding.outputs.ranks
        ranks = [1 if group is None else dist.get_world_size(group) for group in shards]
        shape = linear.in_features // ranks[0], linear.out_features // ranks[1]
        backend, experts = context.backend, linear.experts > 1
        if not experts or backend.of_experts(row.recipe, *shape) is backend:
            cases[Case(tokens, *shape, sharding.num_groups, row.recipe, *shards, experts)] = None
    return list(cases)


def require(backend: Backend, cases: Iterable[Case], device: torch.device) -> str:
    """Test `backend` on this rank's device; returns a line for the log. A collective.

    Raises SelfTestError on all ranks if any rank finds a fault; the message has the rank's own faults.
    """
    findings = [finding for case in cases for finding in check(backend, case, device)]
    faults = [str(finding) for finding in findings if finding.fault]
    count = torch.tensor(len(faults), device=device)
    dist.all_reduce(count)
    if faults:
        heading = f"self-test of the backend {backend.name} on {device} failed; choose precision.backend=emulated:"
        raise SelfTestError("\n  ".join((heading, *faults)))
    if count.item():
        raise SelfTestError(f"self-test of the backend {backend.name} failed on other ranks, not on this one")
    return f"self-test of {backend.name}: {len(findings)} comparisons with the reference, no difference"


def check(backend: Backend, case: Case, device: torch.device, fairness: bool = False) -> list[Finding]:
    """All comparisons for one case, or the error that a kernel raised. A collective of the case's groups.

    fairness: also test the statistics of the project's own draws, which are compared bit for bit in any case.
    """
    backend = LoneExpert() if case.experts else backend
    try:
        return [Finding(case, *found) for found in _comparisons(backend, case, device, fairness)]
    except Exception as error:  # such as a kernel that this chip cannot run, or another release's names
        return [Finding(case, "kernels", f"failed: {first_line(error)}")]


def _comparisons(backend: Backend, case: Case, device: torch.device, fairness: bool) -> Iterator[tuple[Any, ...]]:
    recipe, tensors = case.recipe, padded_tensors(backend, case, device)
    nearest = replace(case, recipe=rounded_to_nearest(recipe)).context(backend)
    sharding = Sharding(rounding.Span(ranks=case.in_shards), rounding.Span(ranks=case.out_shards), case.num_groups)
    shared = replace(nearest, sharding=sharding)
    quantized = [slot for slot in SLOTS if recipe[slot].quantized]
    with_shared_amax = [s for s in quantized if recipe[s].format == "nvfp4" and shared.place(s.tensor).amax_groups]
    made: dict[OperandSlot, Any] = {}
    for what, context, slots in (
        ("maximum of all ranks", shared, with_shared_amax),
        ("draws", case.context(backend), [slot for slot in quantized if recipe[slot].drawn]),
        ("codes", nearest, quantized),
    ):
        for name, tensor in tensors.items() if slots else ():
            # Each rank's tensor is half as large as the previous rank's, so that maxima differ.
            for group in context.place(name).amax_groups:
                tensor = tensor * 2.0 ** -dist.get_rank(group)
            call = LinearCall(context, tensors["weight"], tensors["activation"])
            for slot, make, rows in makers_of(call, name, tensor):
                made[slot] = make()
                if slot in slots:
                    yield f"{slot.name} {what}", operand_fault(made[slot], *rows, call.request(slot), exact=True)
    gathered = dict(_gathered_operands(backend, case, nearest, made, device))
    call = LinearCall(nearest, tensors["weight"], tensors["activation"])
    for slot, operand in gathered.items():
        rows = rows_of(tensors[slot.tensor], call.place(slot.tensor), slot.transposed)
        fault = operand_fault(operand, *rows, call.request(slot), exact=True)
        yield f"{slot.name} gathered", fault
    if fairness or not backend.draws_ours:
        yield from fairness_of(backend, case, tensors)
    groups = None
    if backend.accumulates:
        x, w, _ = sample_tensors(case, device)
        groups = LinearCall(nearest, w, x).padding.row_groups
    yield from _product_comparisons(backend, recipe, made, gathered, groups)
    yield "NaN and inf", _poison_fault(backend, case, device)


def _product_comparisons(
    backend: Backend,
    recipe: Recipe,
    made: Mapping[OperandSlot, Any],
    gathered: Mapping[OperandSlot, Any],
    groups: RowGroups | None,
) -> Iterator[tuple[Any, ...]]:
    """Compare fprop, dgrad and wgrad of the backend's own operands with FP64. groups: padded output features."""
    for name in (name for name, gemm in recipe.gemms.items() if gemm.quantized):
        slots = [slot for slot in SLOTS if slot.gemm == name]
        left, right = (made[slot] for slot in slots)
        product = backend.gemm(left, right, torch.float32 if name == "wgrad" else torch.bfloat16)
        yield f"{name} product", *product_fault(product, left, right, _spaced_rows(product, _SELFTEST_ROWS))
        in_nvfp4 = all(operand.format == "nvfp4" for operand in recipe.gemms[name].operands)
        if in_nvfp4:
            in_fp32 = backend.gemm(left, right, torch.float32)
            yield f"{name} bits", *_bits_fault(backend, in_fp32, left, right)
        if not gathered.keys().isdisjoint(slots):
            a, b = (gathered.get(slot, made[slot]) for slot in slots)
            product = backend.gemm(a, b, product.dtype)
            found = product_fault(product, a, b, _spaced_rows(product, _SELFTEST_ROWS))
            yield f"{name} product of gathered operands", *found
        if name == "wgrad" and backend.accumulates:
            total = backend.gemm(left, right, torch.float32, None, groups).flip(0) * 0.75
            rows = _spaced_rows(total, _SELFTEST_ROWS)
            before, summed = total[rows], backend.gemm(left, right, torch.float32, total, groups)
            found = product_fault(summed, left, right, rows, groups=groups, before=before)
            yield "wgrad product added to a gradient", *found
            if in_nvfp4:
                before = in_fp32.flip(0) * 0.75
                summed = backend.gemm(left, right, torch.float32, before.clone())
                yield "wgrad bits, added to a gradient", *_bits_fault(backend, summed, left, right, before)


def _bits_fault(backend: Backend, product: Tensor, a: Any, b: Any, before: Tensor | None = None) -> tuple[str, float]:
    """Compare rows of an FP32 product of NVFP4 operands with Blackwell's order of sums: the fault, and the share of
    outputs with other bits. before: what the product was added to."""
    rows, alpha = _spaced_rows(product, _RECHECK_ROWS), _output_scale(a, b)
    exact = sums(a.unpacked()[rows], b.unpacked())
    expected = alpha * exact if before is None else fma(alpha, exact, before[rows])
    differing = int((product[rows] != expected).sum())
    promised = getattr(backend, "sums", "") == "blackwell"  # only the emulation promises it
    fault = f"{differing} of {exact.numel()} FP32 outputs have other bits than Blackwell's order of sums"
    return fault if differing and promised else "", differing / exact.numel()


def _output_scale(a: Any, b: Any) -> Tensor:
    """alpha of a GEMM: Transformer Engine multiplies both maxima first, PyTorch's GEMM both scales."""
    if (amax := getattr(a, "amax", None)) is None:
        return a.scale * b.scale  # type: ignore[no-any-return]
    return (amax * b.amax * (1 / (rounding.E2M1_MAX * rounding.E4M3_MAX) ** 2)).view(())  # type: ignore[no-any-return]


def _gathered_operands(
    backend: Backend, case: Case, context: LinearContext, made: Mapping[OperandSlot, Any], device: torch.device
) -> Iterator[tuple[OperandSlot, Any]]:
    """Operands from gathered codes, here gathered from a single rank: weights, and slices of the tokens."""
    if context.gathers_codes:
        x, w, _ = sample_tensors(case, device)
        call = LinearCall(context, w, x)
        packed = packed_weight(w, call.place("weight"), call.request(FPROP_WEIGHT), call.padding.groups)
        assert isinstance(packed.values, PackedWeight)
        codes = replace(packed.values, scale=packed.scale)
        yield from zip(SLOTS_OF["weight"], backend.weight_of_codes(codes, context.recipe[FPROP_WEIGHT]), strict=True)
    for slot, operand in made.items():
        if operand.quantized and slot.tensor != "weight":
            yield slot, operand.gathered(lambda sent: Pending(None, sent, sent), transposed=slot.transposed)()


def makers_of(
    call: LinearCall, name: str, tensor: Tensor
) -> Iterator[tuple[OperandSlot, MakeOperand, tuple[Tensor, rounding.Place]]]:
    """For both operands of a tensor (name: as in `SLOTS_OF`): the slot, a function that makes it, and the rows [n, k]
    that it is made from, before the transform, with their place."""
    for slot, make in zip(SLOTS_OF[name], call.operand_makers(tensor, *SLOTS_OF[name]), strict=True):
        assert make is not None
        yield slot, make, rows_of(tensor, call.place(name), slot.transposed)


def sample_tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, inputs], W [outputs, inputs] and dy [tokens, outputs] in BF16, the same in every call.

    They are random, with outlier columns, one block of zeros and rows that are a hundred times smaller. Values are
    multiples of one power of two, so that a Hadamard transform is exact in FP32 in any order of summation. On other
    values two correct transforms may differ in the last bit of BF16, and then in a code.
    """
    generator = torch.Generator(device).manual_seed(case.tokens + 3 * case.inputs + 7 * case.outputs)

    def draw(rows: int, columns: int, exponent: int) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device=device)
        t[:, ::67] *= 20
        t[1::31] *= 1e-2
        t[:16, :16] = 0
        # Values are below 2^7.5 in units of 2^-11 (BF16 rounds some to coarser units): sums of 16 have at most 23 bits.
        return ((t * 2.0**11).round() * 2.0 ** (exponent - 11)).to(torch.bfloat16)

    return draw(case.tokens, case.inputs, 0), draw(case.outputs, case.inputs, -5), draw(case.tokens, case.outputs, -13)


def padded_tensors(backend: Backend, case: Case, device: torch.device) -> dict[str, Tensor]:
    """The sample tensors as a linear pads them, by their names in `SLOTS_OF`."""
    x, w, dy = sample_tensors(case, device)
    padding = LinearCall(case.context(backend), w, x).padding
    return {"activation": padding.pad_tokens(x), "weight": padding.pad_weight(w), "gradient": padding.pad(dy)}


def _poison_fault(backend: Backend, case: Case, device: torch.device) -> str:
    """NaN and inf in each tensor must reach both products that it is a factor of; empty: they do."""
    for value in (float("nan"), float("inf")):
        for broken in SLOTS_OF:
            tensors = dict(zip(SLOTS_OF, sample_tensors(case, device), strict=True))
            tensors[broken][5, 7] = value
            x, w = tensors["activation"].requires_grad_(), tensors["weight"].requires_grad_()
            with torch.enable_grad():
                y = quantized_linear(x, w, case.context(backend))
                y.backward(tensors["gradient"])
            for (gemm, factors), product in zip(GEMMS.items(), (y, x.grad, w.grad), strict=True):
                if broken in factors and product is not None and product.isfinite().all():
                    return f"{value} in the {broken} disappears in {gemm}"
    return ""


# ------------------------------------------------------------------------------------------- fairness of its rounding

# Stochastic rounding must round a value up to the next value of the E2M1 grid (in magnitude) with a probability p equal
# to its position between its two neighbours, 0 to 1. Its excess is (1 if it was rounded up, otherwise 0) - p. Over
# several draws of an operand, these statistics of the excess are compared with those of independent fair draws:
#
#     bias         the mean: over all values, and over values with p in each of eight bins
#     variance     of one element, divided by that of a fair draw
#     sums         the variance of sums over a row, a column and a block of 16: it is larger if elements share draws or
#                  draws repeat, and smaller if draws balance each other
#     dependence   the correlation of elements of a tensor's two operands that might have used the same draw
_NUM_DRAWS = 16
# The largest deviations in addition to six standard errors; a generator of eight bits may have a bias of 1/512.
_BIAS, _BIN_BIAS, _VARIANCE, _SUMS, _CORRELATION = 0.004, 0.01, 0.03, 0.1, 0.02
_NUM_BINS = 8
# Two launches with different grids number their threads alike in the first rows and columns; so many are compared.
_CORNER = 128

_SUMS_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda excess: excess.sum(-1),
    "columns": lambda excess: excess.sum(-2),
    "blocks": lambda excess: excess.unflatten(-1, (-1, 16)).sum(-1),
}


def _corners(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (min(*sizes, _CORNER) for sizes in zip(one.shape[-2:], other.shape[-2:], strict=True))
    return one[..., :rows, :columns], other[..., :rows, :columns]


# Elements of a tensor's two operands, [n, k] and [k, n], that might have the same draw: those at the same place or
# index, if two launches use one state of the generator; both copies of an element, if they use one draw.
_PAIRED_BY: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "place": _corners,
    "index": lambda one, other: (one.flatten(-2), other.flatten(-2)),
    "element": lambda one, other: (one, other.mT),
}


def fairness_of(backend: Backend, case: Case, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Labels and faults (empty: none) of the draws of operands rounded stochastically to NVFP4. tensors: padded."""
    for name, slots in SLOTS_OF.items():
        stochastic = [slot for slot in slots if case.recipe[slot].rounding == "stochastic"]
        drawn = [slot for slot in stochastic if case.recipe[slot].format == "nvfp4"]
        num_rows = max(128, _DRAW_ELEMENTS // tensors[name].shape[1] // 128 * 128)
        tensor = tensors[name][:num_rows]

        def draw(step: int, name: str = name, tensor: Tensor = tensor) -> dict[OperandSlot, BackendOperand]:
            call = LinearCall(case.context(backend, step), tensors["weight"], tensor)
            return {slot: make() for slot, make, _ in makers_of(call, name, tensor)}

        if drawn:
            call = LinearCall(case.context(backend), tensors["weight"], tensor)
            stored = {slot: tensor.t() if slot.transposed else tensor for slot in drawn}
            rows = {slot: operand_rows(x, call.request(slot)).contiguous() for slot, x in stored.items()}
            yield from ((f"{label} rounding", fault) for label, fault in fairness(rows, draw, case.recipe).items())


def fairness(
    rows: Mapping[OperandSlot, Tensor], draw: Callable[[int], Mapping[OperandSlot, BackendOperand]], recipe: Recipe
) -> dict[str, str]:
    """The faults (empty: none) of the draws of a tensor's one or two NVFP4 operands, by label; also of two together.

    rows: what the operands are made from: [n, k], and [k, n] for the transposed tensor. draw: makes the operands with
    the draws of a number; the same number must give the same draws.
    """
    fair = {slot: _FairRounding(x, recipe[slot]) for slot, x in rows.items()}
    excess = {slot: each.probability.new_empty(_NUM_DRAWS + 1, *each.probability.shape) for slot, each in fair.items()}
    for index, number in enumerate((*range(_NUM_DRAWS), 0)):
        made = draw(number)
        for slot, operand in fair.items():
            excess[slot][index] = operand.excess(made[slot])
    faults = {slot.name: each.fault(excess[slot][:-1], again=excess[slot][-1]) for slot, each in fair.items()}
    if len(rows) == 2:
        one, other = (draws[:-1] for draws in excess.values())
        faults[" and ".join(faults)] = _dependence(one, other, *(operand.variance for operand in fair.values()))
    return faults


class _FairRounding:
    """What is fair for an operand that is rounded stochastically, all [n, k]. high: the grid value above each value in
    magnitude, FP32. probability: that of rounding up, FP64. variance: that of the excess of a fair draw, FP64."""

    def __init__(self, rows: Tensor, operand: Operand) -> None:
        reference = quantize_nvfp4(rows, operand.block)
        self.scales = reference.scales.to(torch.float32)
        scaled = grid_positions(rows, self.scales, reference.amax).clamp_(-rounding.E2M1_MAX, rounding.E2M1_MAX)
        low = rounding.round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
        self.high = rounding.round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
        gap = (self.high - low).abs()
        self.between = gap > 0
        self.probability = torch.where(self.between, (scaled - low).abs() / gap.clamp(min=0.5), 0.0).to(torch.float64)
        self.variance = self.probability * (1 - self.probability)

    def excess(self, made: BackendOperand) -> Tensor:
        """The excess of one draw, FP64 [n, k]; 0 for values on the grid."""
        values = made.unpacked().to(torch.float32).unflatten(-1, (-1, 16)) / self.scales[..., None]
        rounded_up = (values.flatten(-2) == self.high).to(torch.float64)
        return torch.where(self.between, rounded_up - self.probability, 0.0)

    def fault(self, excess: Tensor, again: Tensor) -> str:
        """What exceeds its limit in the excess of several draws, [draws, n, k]. again: of the first draw, repeated."""
        if torch.equal(excess[0], excess[-1]):
            return "two draws are the same"
        if not torch.equal(excess[0], again):
            return "the same key gives other draws"
        total = excess.sum(0)
        mean, variance = (t[self.between] for t in (total / _NUM_DRAWS, self.variance))
        bins = (self.probability[self.between] * _NUM_BINS).long()
        limits = {"": (_BIAS, bins >= 0)}
        limits |= {f" at positions {i / 8:g} to {(i + 1) / 8:g}": (_BIN_BIAS, bins == i) for i in range(_NUM_BINS)}
        for where, (limit, inside) in limits.items():
            if inside.any():
                bias = float(mean[inside].mean())
                noise = 6 * float(variance[inside].sum() / _NUM_DRAWS) ** 0.5 / int(inside.sum())
                if not abs(bias) <= limit + noise:
                    return f"rounds up too {'often' if bias > 0 else 'rarely'} by {abs(bias):.4f}{where}"
        # The variance of the sum of independent draws is the sum of their variances.
        share = float(total.square().sum() / (_NUM_DRAWS * self.variance.sum()))
        if not abs(share - 1) <= _VARIANCE + 6 * (2 / mean.numel()) ** 0.5:
            return f"its variance is {share:.3f} of a fair draw's"
        fair, mean_everywhere = float(variance.sum()), torch.full_like(total, float(total.mean()) / _NUM_DRAWS)
        for what, add in _SUMS_OVER.items():
            from_bias = float(add(mean_everywhere).square().sum())
            share = (float(add(excess).square().sum()) / _NUM_DRAWS - from_bias) / fair
            noise = 6 * (2 * float(add(self.variance).square().sum()) / _NUM_DRAWS) ** 0.5 / fair
            if not abs(share - 1) <= _SUMS + noise:
                return f"sums over {what} have {share:.3f} of the variance of independent draws"
        return ""


def _dependence(one: Tensor, other: Tensor, *variances: Tensor) -> str:
    """A correlation above its limit, or "". one, other: the excess of two operands, [draws, n, k] and [draws, k, n]."""
    for what, paired in _PAIRED_BY.items():
        covariance = sum(float((x * y).sum()) for x, y in zip(*paired(one, other), strict=True))
        a, b = paired(*variances)
        scale, noise = _NUM_DRAWS * float((a * b).sqrt().sum()), 6 * (_NUM_DRAWS * float((a * b).sum())) ** 0.5
        if not abs(covariance) <= _CORRELATION * scale + noise:
            return f"are correlated at the same {what}: correlation {covariance / scale:+.3f}"
    return ""


# ------------------------------------------------------------------------------------------------------------- recheck


@dataclass(frozen=True)
class Rechecked:
    """The result for one linear in one step (from 0). faults: those of all ranks; every rank has the same list."""

    linear: str
    step: int
    faults: list[str]

    def __str__(self) -> str:
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"recheck of {self.linear} in step {self.step + 1}: {self.faults[0]}{more}"


class Recheck:
    """Rechecks one linear every `interval` steps; not those of experts. It compares the first operand of each slot and
    the first product of each GEMM in the step, not those of later micro-batches and recomputed blocks.

    linears: name -> context, in the plan's order; they take turns in this order. The step alone determines whose turn
    it is, so this is the same on all ranks and after a resume. Each data-parallel rank checks the linear on its own
    micro-batch, each tensor-parallel rank on its own shard.
    """

    def __init__(self, interval: int, linears: Mapping[str, LinearContext]) -> None:
        self.interval, self._linears = interval, dict(linears)
        self._watched: tuple[str, int] | None = None
        self._turn, self._faults = 0, dict[str, str]()  # what was compared -> its fault, or ""

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the training step `step` (from 0); inside it a linear is watched if one is due."""
        watchable = ((name, context) for name, context in self._linears.items() if not context.num_experts)
        names = [name for name, context in watchable if context.recipe.quantized]
        if step % self.interval or not names:
            yield
            return
        self._turn, index = divmod(step // self.interval, len(names))
        self._watched, self._faults = (names[index], step), {}
        context = self._linears[names[index]]
        # The linear must quantize its weight again, so that this sees it; the codes are the same.
        context.weight_cache = None
        context.watcher = self
        try:
            yield
        finally:
            context.watcher = None

    def collect(self) -> Rechecked | None:
        """The result of the step, over all ranks; None if no linear was due. A collective after a step with one."""
        watched, self._watched = self._watched, None
        if watched is None:
            return None
        assert self._faults, f"nothing of {watched[0]} was seen"
        of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        mine = [f"rank {dist.get_rank()}: {what}: {fault}" for what, fault in self._faults.items() if fault]
        dist.all_gather_object(of_ranks, mine)
        return Rechecked(*watched, [fault for faults in of_ranks for fault in faults])

    def operand(self, make: MakeOperand, x: Tensor, place: rounding.Place, request: OperandRequest) -> Any:
        """Make an operand from x [n, k] at `place` with `make`, and compare it."""
        made, slot = make(), request.slot
        assert slot is not None
        if made.quantized and slot.name not in self._faults:
            self._faults[slot.name] = operand_fault(made, x, place, request)
        return made

    def product(
        self,
        gemm: str,
        multiply: Callable[[], Tensor],
        sides: tuple[Any, Any],
        total: Tensor | None,
        groups: RowGroups | None,
    ) -> Tensor:
        """Compute a product with `multiply`, and compare it."""
        what = f"{gemm} product" if total is None else f"{gemm} product added to a gradient"
        if what in self._faults or not any(side.quantized for side in sides):
            return multiply()
        before = None if total is None else total[_spaced_rows(total, _RECHECK_ROWS, self._turn)]
        product = multiply()
        rows = _spaced_rows(product, _RECHECK_ROWS, self._turn)
        self._faults[what], _ = product_fault(product, *sides, rows, groups=groups, before=before, cancelling=True)
        return product
