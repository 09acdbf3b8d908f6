"""Whether a backend computes what its recipe says, compared with the reference quantizers and with FP64.

The self-test (`require`) runs before the first step of a run whose backend is not emulated, for the shapes and recipes
of its own plan. Native kernels were wrong before in ways that a loss curve shows late or never: stochastic rounding
that returned zeros on one GPU generation, scales blocked along the wrong dimension. For each linear's shape and recipe:

    codes      every operand, rounded to nearest: values under its scales and tensor scale, bit for bit
    draws      every operand with draws of ours: bit for bit as well. With those of another library: values and scales
               that the draws allow, and fair statistics
    maximum    where ranks share a tensor's maximum: every operand is scaled by that of all of them
    products   fprop, dgrad and wgrad at full size from the backend's own operands, against FP64 on 256 rows; and wgrad
               added to the gradient of earlier micro-batches
    gathered   operands that come as codes from other ranks, weights and tokens: bit for bit, and products of them
    poison     NaN and inf in x, W or dy reach the products

The recheck (`Recheck`) compares the run's own tensors, on a machine that may have begun to compute wrongly. Every N
steps one linear is watched: in the step's first micro-batch every operand as the linear really used it is compared with
the reference quantizer's, and rows of the products with FP64; in the next one wgrad's product that is added to the
gradient. It draws from no generator and writes no tensor of the run, so losses and weights keep their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups, first_line
from megatron_fp4.precision.emulated import PackedWeight, operand_rows, packed_weight, shared_amax
from megatron_fp4.precision.linear import LinearCall, LinearContext, quantized_linear
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
from megatron_fp4.quantization.formats import format_of, quantize_nvfp4
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import (
    E2M1_MAX,
    E2M1_VALUES,
    FP32_MAX,
    e2m1_values,
    round_e2m1_stochastic,
    unpack_codes,
)
from megatron_fp4.quantization.tensor import NVFP4Tensor

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

    It must equal the reference bit for bit, draws included, but for the sign of a zero, which no product sees. Two
    things are allowed to differ. Transformer Engine draws by itself: every code must be a neighbour of its value. And
    after a Hadamard transform two correct sums may round to neighbouring BF16 numbers, unless the values are such that
    none does (`exact`): amax may be off by one such step, a block scale by one E4M3 step, and codes must follow from
    values within one step, under the operand's own scales.
    """
    size = max(_CHUNK_ROWS, _CHUNK_ELEMENTS // x.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    chunks = [slice(start, start + size) for start in range(0, x.shape[0], size)]
    amax = functools.reduce(torch.maximum, (operand_rows(x[chunk], request).abs().amax() for chunk in chunks))
    amax = amax.to(torch.float32)
    if format_of(request.operand.format).tensor_scale:
        amax = shared_amax(amax, request.amax_group)
    values, scale = made.unpacked(), made.scale
    if not amax.isfinite():
        poisoned = any(part is not None and not part.isfinite().all() for part in (scale, values))
        return "" if poisoned else "is finite although it was made of NaN or inf"
    decoded, inexact = made.decoded(), bool(request.rht) and not exact
    for chunk in chunks:
        rows = operand_rows(x[chunk], request)
        if isinstance(decoded, NVFP4Tensor) and (request.key is not None or inexact):
            fault = _allowed_codes_fault(decoded, chunk, rows, request, amax, inexact)
        else:
            key = request.key and replace(request.key, row_offset=request.key.row_offset + chunk.start)
            right = request.operand.encode(rows.to(torch.float32), key, amax)
            fault = difference("values", values[chunk].to(torch.float32) + 0.0, right.block_values() + 0.0, chunk.start)
            if isinstance(right, NVFP4Tensor) and not fault:
                assert scale is not None, "NVFP4 without a tensor scale"
                fault = difference("tensor scale", scale, right.decode_scale())
        if fault:
            return fault
    return ""


def difference(what: str, actual: Tensor, expected: Tensor, first_row: int = 0) -> str:
    """Where two tensors differ in any bit, in words that begin with `what`; empty if nowhere."""
    have, want = (f"{list(t.shape)} ({t.dtype})" for t in (actual, expected))
    if have != want:
        return f"{what} are {have} instead of {want}"
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    unequal = torch.ne(*(t.contiguous().view(sizes[t.element_size()]) for t in (actual, expected)))
    if not unequal.any():
        return ""
    at = unequal.nonzero()[0].tolist()
    found, right = (t[tuple(at)].to(torch.float32).item() for t in (actual, expected))
    where = [at[0] + first_row, *at[1:]] if at else "the tensor"
    count = f"{int(unequal.sum())} of {unequal.numel()}"
    return f"{what} differ in {count}, first at {where}: {found:.9g} instead of {right:.9g}"


def _allowed_codes_fault(
    decoded: NVFP4Tensor, chunk: slice, rows: Tensor, request: OperandRequest, amax: Tensor, inexact: bool
) -> str:
    """As `operand_fault`, of codes with Transformer Engine's draws or after its transform, which only NVFP4 has.
    inexact: what was quantized may be the BF16 neighbours of `rows`."""
    step = _BF16_STEP if inexact else 0.0
    if not (decoded.amax - amax).abs() <= step * amax:
        return f"amax is {decoded.amax.item():g} instead of {amax.item():g}"
    right = request.operand.encode(rows.to(torch.float32), None, decoded.amax)
    scales = decoded.scales[chunk]
    apart = (scales.view(torch.uint8).to(torch.int16) - right.scales.view(torch.uint8).to(torch.int16)).abs()
    if (apart > int(inexact)).any():
        return difference("scales", scales, right.scales, chunk.start)
    scales = scales.to(torch.float32)
    codes, positions = e2m1_values(unpack_codes(decoded.codes[chunk])), grid_positions(rows, scales, decoded.amax)
    slack = positions.abs() * step + (_NEAR_ZERO if inexact else 0.0)
    least, most = (_grid_value(positions + (slack if up else -slack), request.key is None, up) for up in (False, True))
    # Under a scale of zero every code decodes to zero.
    strangers = ((codes < least) | (codes > most)) & (scales > 0).repeat_interleave(16, dim=1)
    if not strangers.any():
        return ""
    row, column = strangers.nonzero()[0].tolist()
    return (
        f"codes differ in {int(strangers.sum())} of {strangers.numel()}, first at {[row + chunk.start, column]}: "
        f"{codes[row, column].item():g} for {positions[row, column].item():g}"
    )


def _grid_value(positions: Tensor, nearest: bool, up: bool) -> Tensor:
    """The E2M1 value at or above (`up`) or at or below FP32 positions; or the nearest, at a tie the upper or lower."""
    grid = torch.tensor([*(-value for value in E2M1_VALUES[:0:-1]), *E2M1_VALUES], device=positions.device)
    positions = positions.clamp(-E2M1_MAX, E2M1_MAX).contiguous()
    if nearest:
        return grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, positions, right=up)]
    return grid[torch.searchsorted(grid, positions, right=not up) - (0 if up else 1)]


def grid_positions(rows: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """FP32 [n, k]: where `rows` [n, k] lie on the E2M1 grid of their blocks. scales: FP32 [n, k / 16]; amax: of all."""
    encode = (scales * encode_tensor_scale(amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    return (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)


# ----------------------------------------------------------------------------------------------------------- products

# Largest relative error of a product (Frobenius norm), and of one element in units of the root mean square: BF16
# rounds by 2^-9; Hopper's FP8 tensor cores add 128 products with 14 bits.
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
    """What is beyond the bounds in `rows` of the product a b^T, compared with FP64 on the operands' own values (empty:
    nothing), and the relative error.

    groups: of the rows of `a`, of which the product has those that count. before: what these rows were before the
    product was added to them; None: zeros. cancelling: the tensors are a run's, and sums may cancel further than those
    of random numbers.
    """
    left, right = a.unpacked()[rows if groups is None else groups.padded_indices(rows)].to(torch.float64), b.unpacked()
    scale = math.prod(1.0 if made.scale is None else made.scale.to(torch.float64) for made in (a, b))
    expected = _in_fp64(left, right) * scale
    expected = expected if before is None else expected + before.to(torch.float64)
    found = product[rows].to(torch.float64)
    finite = expected.isfinite()
    if not finite.all():
        # A step that is not finite is for others to handle; here NaN and inf must only not disappear.
        return ("loses NaN or inf" if found[~finite].isfinite().any() else ""), 0.0
    error, root = found - expected, max(expected.square().mean().sqrt().item(), 1e-300)
    total = (error.square().mean().sqrt() / root).item()
    worst, peak = (t.abs().amax().item() / root for t in (error, expected))

    def within(condition: float) -> bool:  # NaN passes no comparison
        most = condition * ELEMENT_ERROR[product.dtype] + 2**-8 * peak
        return total <= condition * PRODUCT_ERROR[product.dtype] and worst <= most

    if within(1.0):
        return "", total
    if cancelling:
        # How much larger sums of magnitudes are than sums of random signs would have them.
        magnitudes = (_in_fp64(left.abs(), right.abs()) * scale).square().mean().sqrt().item()
        if within(max(1.0, magnitudes / root / left.shape[1] ** 0.5)):
            return "", total
    return f"relative error {total:.2e}, worst element {worst:.2e} of the root mean square", total


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    """left right^T for FP64 [m, k] and [n, k] of any type, converted piece by piece."""
    size = max(1, _PRODUCT_ELEMENTS // right.shape[1])
    return torch.cat([left @ part.to(torch.float64).t() for part in right.split(size)], dim=1)


def _spaced_rows(product: Tensor, most: int, turn: int = 0) -> Tensor:
    """Evenly spaced rows of a product, the first and the last among them, and other ones in each turn."""
    size, count = product.shape[0], min(most, product.shape[0])
    return (torch.arange(count, device=product.device) * (size - 1) // max(count - 1, 1) + turn) % size


# ----------------------------------------------------------------------------------------------------------- self-test

_DRAW_ELEMENTS = 2**21


class SelfTestError(RuntimeError):
    """A backend computes something else than the reference."""


@dataclass(frozen=True)
class Case:
    """What is tested: the local shape of a linear on this rank (output features unpadded) and its recipe.

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
        """The context of such a linear without other ranks."""
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
    cases: dict[Case, None] = {}
    for row in (row for plan in plans for row in plan.rows if row.recipe.quantized):
        context, linear = linears[row.linear.name], row.linear
        shards = context.in_shards, context.out_shards
        ranks = [1 if group is None else dist.get_world_size(group) for group in shards]
        shape = linear.in_features // ranks[0], linear.out_features // ranks[1]
        cases[Case(tokens, *shape, context.num_groups, row.recipe, *shards)] = None
    return list(cases)


def require(backend: Backend, cases: Iterable[Case], device: torch.device) -> str:
    """Test `backend` on this rank's device; returns a line for the log. A collective.

    Raises SelfTestError on all ranks if any rank found a fault, with its own faults where there are some.
    """
    findings = [finding for case in cases for finding in check(backend, case, device)]
    faults = [str(finding) for finding in findings if finding.fault]
    count = torch.tensor(len(faults), device=device)
    dist.all_reduce(count)
    if faults:
        heading = f"self-test of the backend {backend.name} on {device}, without which precision.backend=emulated does:"
        raise SelfTestError("\n  ".join((heading, *faults)))
    if count.item():
        raise SelfTestError(f"self-test of the backend {backend.name}: faults on other ranks, none on this one")
    return f"self-test of {backend.name}: {len(findings)} comparisons with the reference, no difference"


def check(backend: Backend, case: Case, device: torch.device) -> list[Finding]:
    """All comparisons for one case, or the error that a kernel ends in; a collective of the case's groups."""
    try:
        return [Finding(case, *found) for found in _comparisons(backend, case, device)]
    except Exception as error:  # what a kernel that this chip cannot run ends in, or a release with other names
        return [Finding(case, "kernels", f"failed: {first_line(error)}")]


def _comparisons(backend: Backend, case: Case, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """What was compared, what differs, and of products the relative error."""
    recipe, tensors = case.recipe, padded_tensors(backend, case, device)
    nearest = replace(case, recipe=rounded_to_nearest(recipe)).context(backend)
    shared = replace(nearest, in_shards=case.in_shards, out_shards=case.out_shards)
    quantized = [slot for slot in SLOTS if recipe[slot].quantized]
    of_all = [s for s in quantized if recipe[s].format == "nvfp4" and shared.amax_group(s.tensor) is not None]
    made: dict[OperandSlot, Any] = {}
    for what, context, slots in (
        ("maximum of all ranks", shared, of_all),
        ("draws", case.context(backend), [slot for slot in quantized if recipe[slot].drawn]),
        ("codes", nearest, quantized),
    ):
        for name, tensor in tensors.items() if slots else ():
            group = context.amax_group(name)
            # Each rank's is half as large as that of the one before.
            tensor = tensor if group is None else tensor * 2.0 ** -dist.get_rank(group)
            call = LinearCall(context, tensors["weight"], tensors["activation"])
            for slot, make, rows in makers_of(call, name, tensor):
                made[slot] = make()
                if slot in slots:
                    yield f"{slot.name} {what}", operand_fault(made[slot], rows, call.request(slot), exact=True)
    gathered = dict(_gathered_operands(backend, case, nearest, made, device))
    call = LinearCall(nearest, tensors["weight"], tensors["activation"])
    for slot, operand in gathered.items():
        rows = tensors[slot.tensor]
        fault = operand_fault(operand, rows.t() if slot.transposed else rows, call.request(slot), exact=True)
        yield f"{slot.name} from other ranks", fault
    if not backend.draws_ours:
        yield from fairness_of(backend, case, tensors)
    groups = None
    if backend.accumulates:
        x, w, _ = sample_tensors(case, device)
        groups = LinearCall(nearest, w, x).row_groups
    yield from _product_comparisons(backend, recipe, made, gathered, groups)
    yield "NaN and inf", _poison_fault(backend, case, device)


def _product_comparisons(
    backend: Backend,
    recipe: Recipe,
    made: Mapping[OperandSlot, Any],
    gathered: Mapping[OperandSlot, Any],
    groups: RowGroups | None,
) -> Iterator[tuple[Any, ...]]:
    """As `_comparisons`, of the GEMMs of operands. groups: of output features, where they are padded."""
    for name in (name for name, gemm in recipe.gemms.items() if gemm.quantized):
        slots = [slot for slot in SLOTS if slot.gemm == name]
        left, right = (made[slot] for slot in slots)
        product = backend.gemm(left, right, torch.float32 if name == "wgrad" else torch.bfloat16)
        yield f"{name} product", *product_fault(product, left, right, _spaced_rows(product, _SELFTEST_ROWS))
        if not gathered.keys().isdisjoint(slots):
            a, b = (gathered.get(slot, made[slot]) for slot in slots)
            product = backend.gemm(a, b, product.dtype)
            found = product_fault(product, a, b, _spaced_rows(product, _SELFTEST_ROWS))
            yield f"{name} product of operands from other ranks", *found
        if name == "wgrad" and backend.accumulates:
            total = backend.gemm(left, right, torch.float32, None, groups).flip(0) * 0.75
            rows = _spaced_rows(total, _SELFTEST_ROWS)
            before, summed = total[rows], backend.gemm(left, right, torch.float32, total, groups)
            found = product_fault(summed, left, right, rows, groups=groups, before=before)
            yield "wgrad product added to a gradient", *found


def _gathered_operands(
    backend: Backend, case: Case, context: LinearContext, made: Mapping[OperandSlot, Any], device: torch.device
) -> Iterator[tuple[OperandSlot, Any]]:
    """Operands of codes that were gathered, here from one rank: weights by FSDP, and slices of the tokens."""
    if context.gathers_codes:
        x, w, _ = sample_tensors(case, device)
        call = LinearCall(context, w, x)
        packed = packed_weight(w, call.request(FPROP_WEIGHT), call.group_rows, call.padded_group_rows)
        assert isinstance(packed.values, PackedWeight)
        codes = replace(packed.values, scale=packed.scale)
        yield from zip(SLOTS_OF["weight"], backend.weight_of_codes(codes, context.recipe[FPROP_WEIGHT]), strict=True)
    for slot, operand in made.items():
        if operand.quantized and slot.tensor != "weight":
            yield slot, operand.gathered(_of_one_rank, transposed=slot.transposed)()


def _of_one_rank(message: Tensor) -> Any:
    """A gather among one rank."""
    return SimpleNamespace(wait=lambda: message)


def makers_of(call: LinearCall, name: str, tensor: Tensor) -> Iterator[tuple[OperandSlot, MakeOperand, Tensor]]:
    """Of both operands of a tensor (by its name in `SLOTS_OF`): the slot, what makes it, and the rows [n, k] that it is
    made of, before the transform."""
    for slot, make in zip(SLOTS_OF[name], call.prepare(*SLOTS_OF[name], tensor), strict=True):
        assert make is not None
        yield slot, make, tensor.t() if slot.transposed else tensor


def sample_tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, inputs], W [outputs, inputs] and dy [tokens, outputs] in BF16, the same every time.

    Random, with outlier columns, one block of zeros and rows that are a hundred times smaller. Values are multiples of
    one power of two, so that a Hadamard transform is exact in FP32 in any order of summation: on other values two
    correct transforms may differ in the last bit of BF16, and then in a code.
    """
    generator = torch.Generator(device).manual_seed(case.tokens + 3 * case.inputs + 7 * case.outputs)

    def draw(rows: int, columns: int, exponent: int) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device=device)
        t[:, ::67] *= 20
        t[1::31] *= 1e-2
        t[:16, :16] = 0
        # Below 2^7.5 in units of 2^-11, and BF16 rounds to coarser ones: sums of 16 have at most 23 bits.
        return ((t * 2.0**11).round() * 2.0 ** (exponent - 11)).to(torch.bfloat16)

    return draw(case.tokens, case.inputs, 0), draw(case.outputs, case.inputs, -5), draw(case.tokens, case.outputs, -13)


def padded_tensors(backend: Backend, case: Case, device: torch.device) -> dict[str, Tensor]:
    """Samples as a linear pads them, by their names in `SLOTS_OF`."""
    x, w, dy = sample_tensors(case, device)
    call = LinearCall(case.context(backend), w, x)
    return {"activation": call.pad_tokens(x), "weight": call.pad_rows(w), "gradient": call.pad(dy)}


def _poison_fault(backend: Backend, case: Case, device: torch.device) -> str:
    """NaN and inf in each tensor must show in both products that it is in."""
    for value in (float("nan"), float("inf")):
        for broken in SLOTS_OF:
            given = dict(zip(SLOTS_OF, sample_tensors(case, device), strict=True))
            given[broken][5, 7] = value
            x, w = given["activation"].requires_grad_(), given["weight"].requires_grad_()
            with torch.enable_grad():
                y = quantized_linear(x, w, case.context(backend))
                y.backward(given["gradient"])
            for (gemm, factors), product in zip(GEMMS.items(), (y, x.grad, w.grad), strict=True):
                if broken in factors and product is not None and product.isfinite().all():
                    return f"{value} in the {broken} disappears in {gemm}"
    return ""


# ------------------------------------------------------------------------------------------- fairness of its rounding

# A value between two neighbours on the E2M1 grid is to go up with a probability that is its position between them. Its
# excess is whether it went up (0 or 1) less that probability. Over some draws of an operand are compared:
#
#     bias           the mean excess: of all values, and of those at positions in each of eight bins
#     spread         the variance of one element's excess, as a share of a fair draw's
#     sums           the variance of sums over a row, a column and a block of 16: draws that elements share, or that
#                    repeat, make it larger than that of independent ones, and draws that balance each other smaller
#     dependence     of two operands of one tensor: the excess of elements that might have the same draw is uncorrelated
_DRAWS = 16
# Largest deviations beyond six standard errors; eight random bits alone may have a bias of 1/512.
_BIAS, _BIN_BIAS, _SPREAD, _SUMS, _CORRELATION = 0.004, 0.01, 0.03, 0.1, 0.02
_NUM_BINS = 8
# Rows and columns of the corner in which two launches of unequal grids number their threads alike.
_CORNER = 128

_SUMS_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda excess: excess.sum(-1),
    "columns": lambda excess: excess.sum(-2),
    "blocks": lambda excess: excess.unflatten(-1, (-1, 16)).sum(-1),
}


def _corners(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (min(*sizes, _CORNER) for sizes in zip(one.shape[-2:], other.shape[-2:], strict=True))
    return one[..., :rows, :columns], other[..., :rows, :columns]


# What two operands [n, k] and [k, n] of one tensor might share: one generator's state in two launches, which count by
# place or by index, or one draw for both copies of an element.
_PAIRED_BY: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "place": _corners,
    "index": lambda one, other: (one.flatten(-2), other.flatten(-2)),
    "element": lambda one, other: (one, other.mT),
}


def fairness_of(backend: Backend, case: Case, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What is unfair (empty: nothing) of the operands that round stochastically to NVFP4, by label. tensors: padded, by
    their names in `SLOTS_OF`."""
    for name, slots in SLOTS_OF.items():
        drawn = [slot for slot in slots if (of := case.recipe[slot]).rounding == "stochastic" and of.format == "nvfp4"]
        count = max(128, _DRAW_ELEMENTS // tensors[name].shape[1] // 128 * 128)
        tensor = tensors[name][:count]

        def draw(step: int, name: str = name, tensor: Tensor = tensor) -> dict[OperandSlot, BackendOperand]:
            call = LinearCall(case.context(backend, step), tensors["weight"], tensor)
            return {slot: make() for slot, make, _ in makers_of(call, name, tensor)}

        if drawn:
            call = LinearCall(case.context(backend), tensors["weight"], tensor)
            rows = {slot: operand_rows(tensor, call.request(slot), slot.transposed).contiguous() for slot in drawn}
            yield from ((f"{label} rounding", fault) for label, fault in fairness(rows, draw, case.recipe).items())


def fairness(
    rows: Mapping[OperandSlot, Tensor], draw: Callable[[int], Mapping[OperandSlot, BackendOperand]], recipe: Recipe
) -> dict[str, str]:
    """By its label, what is unfair of each of one or two NVFP4 operands of a tensor, and what the draws of two share.

    rows: what each is made from: [n, k], and of the transposed tensor [k, n]. draw: makes them by the draws of a
    number, the same again for the same number.
    """
    drawn = {slot: _Drawn(x, recipe[slot]) for slot, x in rows.items()}
    excess = {slot: of.position.new_empty(_DRAWS + 1, *of.position.shape) for slot, of in drawn.items()}
    for index, number in enumerate((*range(_DRAWS), 0)):
        made = draw(number)
        for slot, of in drawn.items():
            excess[slot][index] = of.excess(made[slot])
    found = {slot.name: of.fault(excess[slot][:-1], again=excess[slot][-1]) for slot, of in drawn.items()}
    if len(rows) == 2:
        one, other = (draws[:-1] for draws in excess.values())
        found[" and ".join(found)] = _dependence(one, other, *(of.variance for of in drawn.values()))
    return found


class _Drawn:
    """An operand that is rounded stochastically. high: FP32 [n, k], the neighbour above each value in magnitude;
    position: FP64 [n, k], from below (0) to above (1); variance: FP64 [n, k], of the excess of a fair draw."""

    def __init__(self, rows: Tensor, operand: Operand) -> None:
        reference = quantize_nvfp4(rows, operand.block)
        self.scales = reference.scales.to(torch.float32)
        scaled = grid_positions(rows, self.scales, reference.amax).clamp_(-E2M1_MAX, E2M1_MAX)
        low = round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
        self.high = round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
        gap = (self.high - low).abs()
        self.between = gap > 0
        self.position = torch.where(self.between, (scaled - low).abs() / gap.clamp(min=0.5), 0.0).to(torch.float64)
        self.variance = self.position * (1 - self.position)

    def excess(self, made: BackendOperand) -> Tensor:
        """FP64 [n, k] of one draw; 0 where there is nothing to round."""
        values = made.unpacked().to(torch.float32).unflatten(-1, (-1, 16)) / self.scales[..., None]
        ups = (values.flatten(-2) == self.high).to(torch.float64)
        return torch.where(self.between, ups - self.position, 0.0)

    def fault(self, excess: Tensor, again: Tensor) -> str:
        """What is beyond its limit in the excess of `_DRAWS` draws, [draws, n, k], or an empty string. again: of the
        first once more."""
        if torch.equal(excess[0], excess[-1]):
            return "two draws are the same"
        if not torch.equal(excess[0], again):
            return "the same key gives other draws"
        total = excess.sum(0)
        mean, variance = (t[self.between] for t in (total / _DRAWS, self.variance))
        bins = (self.position[self.between] * _NUM_BINS).long()
        limits = {"": (_BIAS, bins >= 0)}
        limits |= {f" at positions {i / 8:g} to {(i + 1) / 8:g}": (_BIN_BIAS, bins == i) for i in range(_NUM_BINS)}
        for where, (limit, inside) in limits.items():
            if inside.any():
                bias = float(mean[inside].mean())
                noise = 6 * float(variance[inside].sum() / _DRAWS) ** 0.5 / int(inside.sum())
                if not abs(bias) <= limit + noise:
                    return f"goes up too often by {bias:+.4f} of a spacing{where}"
        # Over independent draws the squared sum has their number times the fair variance.
        spread = float(total.square().sum() / (_DRAWS * self.variance.sum()))
        if not abs(spread - 1) <= _SPREAD + 6 * (2 / mean.numel()) ** 0.5:
            return f"its spread is {spread:.3f} of a fair draw's"
        fair, everywhere = float(variance.sum()), torch.full_like(total, float(total.mean()) / _DRAWS)
        for what, add in _SUMS_OVER.items():
            common = float(add(everywhere).square().sum())  # what a bias adds
            share = (float(add(excess).square().sum()) / _DRAWS - common) / fair
            noise = 6 * (2 * float(add(self.variance).square().sum()) / _DRAWS) ** 0.5 / fair
            if not abs(share - 1) <= _SUMS + noise:
                return f"sums over {what} have {share:.3f} of the variance of independent draws"
        return ""


def _dependence(one: Tensor, other: Tensor, *variances: Tensor) -> str:
    """one, other: the excess of two operands, [draws, n, k] and [draws, k, n]. variances: of each fair draw."""
    for what, paired in _PAIRED_BY.items():
        together = sum(float((x * y).sum()) for x, y in zip(*paired(one, other), strict=True))
        a, b = paired(*variances)
        scale, noise = _DRAWS * float((a * b).sqrt().sum()), 6 * (_DRAWS * float((a * b).sum())) ** 0.5
        if not abs(together) <= _CORRELATION * scale + noise:
            return f"go together at the same {what}: correlation {together / scale:+.3f}"
    return ""


# ------------------------------------------------------------------------------------------------------------- recheck


class RecheckError(SelfTestError):
    """A linear of a running run computed something else than the reference; the message is the same on all ranks."""


@dataclass(frozen=True)
class Rechecked:
    """One linear in one step (from 0). faults: of all ranks, the same on all."""

    linear: str
    step: int
    faults: list[str]

    def __str__(self) -> str:
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"recheck of {self.linear} in step {self.step + 1}: {self.faults[0]}{more}"


class Recheck:
    """Rechecks a linear every `interval` steps. It compares the first operand of each slot and the first product of
    each GEMM in the step, not those of later micro-batches and recomputed blocks.

    linears: name -> context, in the plan's order, in which they take turns: which one is due is a function of the step
    alone, the same on all ranks and after a resume. Each data-parallel rank checks it on its own micro-batch, each
    tensor-parallel rank on its own shard.
    """

    def __init__(self, interval: int, linears: Mapping[str, LinearContext]) -> None:
        self.interval, self._linears = interval, dict(linears)
        self._watched: tuple[str, int] | None = None
        self._turn, self._faults = 0, dict[str, str]()  # what was compared, and what differs

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the training step `step` (from 0), in which a linear is watched if one is due."""
        names = [name for name, context in self._linears.items() if context.recipe.quantized]
        if step % self.interval or not names:
            yield
            return
        self._turn, index = divmod(step // self.interval, len(names))
        self._watched, self._faults = (names[index], step), {}
        context = self._linears[names[index]]
        # Codes that were kept from before would not be seen being made; made again they are the same.
        context.weight_cache = None
        context.watcher = self
        try:
            yield
        finally:
            context.watcher = None

    def collect(self) -> Rechecked | None:
        """What the step found, over all ranks; None if none was due. A collective after a due step."""
        watched, self._watched = self._watched, None
        if watched is None:
            return None
        assert self._faults, f"nothing of {watched[0]} was seen"
        of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        mine = [f"rank {dist.get_rank()}: {what}: {fault}" for what, fault in self._faults.items() if fault]
        dist.all_gather_object(of_ranks, mine)
        return Rechecked(*watched, [fault for faults in of_ranks for fault in faults])

    def operand(self, make: MakeOperand, x: Tensor, request: OperandRequest) -> Any:
        """The operand that `make` makes of x [n, k], compared."""
        made, slot = make(), request.slot
        assert slot is not None
        if made.quantized and slot.name not in self._faults:
            self._faults[slot.name] = operand_fault(made, x, request)
        return made

    def product(
        self,
        gemm: str,
        multiply: Callable[[], Tensor],
        sides: tuple[Any, Any],
        total: Tensor | None,
        groups: RowGroups | None,
    ) -> Tensor:
        """The backend's product, compared."""
        what = f"{gemm} product" if total is None else f"{gemm} product added to a gradient"
        if what in self._faults or not any(side.quantized for side in sides):
            return multiply()
        before = None if total is None else total[_spaced_rows(total, _RECHECK_ROWS, self._turn)]
        product = multiply()
        rows = _spaced_rows(product, _RECHECK_ROWS, self._turn)
        self._faults[what], _ = product_fault(product, *sides, rows, groups=groups, before=before, cancelling=True)
        return product
