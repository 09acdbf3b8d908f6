"""Whether a backend computes what its recipe says: compared with the reference in `megatron_fp4.quantization`.

    python -m megatron_fp4.precision.selftest [--shape TOKENS,INPUTS,OUTPUTS ...]

and, before the first step of a run whose backend is not emulated, for the shapes and recipes of its own plan.
Native kernels were wrong before in ways that a loss curve shows late or never: stochastic rounding that returned zeros
on one GPU generation, scales blocked along the wrong dimension. For each linear's shape and recipe:

    codes      every operand, rounded to nearest: codes, block scales and tensor maximum, bit for bit but for the sign
               of a zero
    rounding   operands that round stochastically: scales and maximum bit for bit, every value one of the two
               neighbours, mean within 0.01 of a spacing for values anywhere between them, spread that of a fair draw,
               not the same draws twice, the same again for the same key
    scales     operands by MS-EDEN: bit for bit, with their draws
    draws      where two operands of one tensor round stochastically, their draws are independent
    maximum    where ranks share a tensor's maximum: every operand is scaled by that of all of them
    products   fprop, dgrad and wgrad at full size from the backend's own operands, against FP64 on 256 rows
    bytes      of the backend `torch` in place of `rounding`, since its draws are the reference's: codes, block scales
               and tensor scale of every operand as its GEMM reads them, bit for bit
    poison     NaN and inf in x, W or dy reach the products

The tensors are random, with outlier columns, one block of zeros and rows that are a hundred times smaller. Their values
are multiples of one power of two, so that a Hadamard transform is exact in FP32 in any order of summation: on other
values two correct transforms may differ in the last bit of BF16, and then in a code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision import torch_scaled_mm
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand
from megatron_fp4.precision.backend_choice import BACKENDS
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.comparison import (
    bytes_fault,
    expected_parts,
    parts_by_rows,
    parts_fault,
    product_errors,
    product_rows,
)
from megatron_fp4.precision.fair_rounding import Draws, dependence_fault, rounding_faults
from megatron_fp4.precision.linear_call import LinearCall
from megatron_fp4.precision.linear_context import LinearContext
from megatron_fp4.precision.operand_check import operand_fault
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import PLACES, USES, Gemm, Operand, Place, Recipe, rounded_to_nearest
from megatron_fp4.precision.reference import quantized
from megatron_fp4.precision.refusals import first_refusal, refused_here
from megatron_fp4.quantization.hadamard import random_hadamard_transform

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
    in_shards: dist.ProcessGroup | None = None
    out_shards: dist.ProcessGroup | None = None

    def __str__(self) -> str:
        return f"{self.recipe.name}, {self.tokens} tokens, {self.inputs} -> {self.outputs}"


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
    for plan in plans:
        for row in plan.rows:
            context, linear = linears[row.linear.name], row.linear
            if row.recipe.quantized:
                inputs = linear.in_features // _size(context.in_shards)
                outputs = linear.out_features // _size(context.out_shards)
                shards = (context.in_shards, context.out_shards)
                cases[Case(tokens, inputs, outputs, context.num_groups, row.recipe, *shards)] = None
    return list(cases)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


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
    call = LinearCall(_context(backend, replace(case, recipe=recipe)), w, x)
    tensors = {"activation": call.pad_tokens(x), "weight": call.pad_rows(w), "gradient": call.pad(dy)}
    made = {}
    for place, make, source in _makers(call, tensors):
        made[place] = make()
        if recipe[place].quantized:
            rows = transformed(source, call, place)
            yield Finding(case, f"{place.name} codes", _codes_fault(made[place], rows, recipe[place], _amax(rows)))
    for name, gemm in recipe.gemms.items():
        if gemm.quantized:
            left, right = (made[place] for place in PLACES if place.gemm == name)
            product = backend.gemm(left, right, torch.float32 if name == "wgrad" else torch.bfloat16)
            errors = product_errors(product, left, right, product_rows(product))
            yield Finding(case, f"{name} product", errors.fault, errors.total)
    if isinstance(backend, torch_scaled_mm.TorchBackend):
        yield from _byte_findings(backend, case, tensors)
    else:
        yield from _rounding_findings(backend, case, tensors)
        yield from _corrected_findings(backend, case, tensors)
    yield from _maximum_findings(backend, case, tensors)
    yield Finding(case, "NaN and inf", _poison_fault(backend, case, x, w, dy))


def _context(backend: Backend, case: Case, step: int = 0) -> LinearContext:
    return LinearContext("selftest", case.recipe, RunClock(seed=7, step=step), backend, case.num_groups)


def _makers(call: LinearCall, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Place, MakeOperand, Tensor]]:
    """Both operands of each tensor (by the name that `USES` gives it): what makes it, and the rows that it is made of,
    [n, k], before the transform."""
    for name, tensor in tensors.items():
        makers = call.prepare(*USES[name], tensor)
        for place, make in zip(USES[name], makers, strict=True):
            assert make is not None
            yield place, make, tensor.t() if place.transposed else tensor


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


# ------------------------------------------------------------------------------------------------------------- codes


def transformed(x: Tensor, call: LinearCall, place: Place) -> Tensor:
    """`x` [n, k] as the operand at `place` is quantized: after the transform, if its GEMM has one."""
    size = call.recipe.gemms[place.gemm].rht
    return random_hadamard_transform(x, size, call.signs(place.gemm)) if size else x


def _amax(rows: Tensor) -> Tensor:
    return rows.abs().amax().to(torch.float32)


def _codes_fault(made: BackendOperand, rows: Tensor, operand: Operand, amax: Tensor) -> str:
    """What of an operand differs from the reference of `rows` [n, k]; of a stochastic one only what is no draw."""
    drawn = ("codes", "values") if operand.rounding == "stochastic" else ()

    def expected(chunk: slice) -> dict[str, Tensor]:
        parts = expected_parts(quantized(rows[chunk], operand, None, amax), made)
        return {part: value for part, value in parts.items() if part not in drawn}

    return parts_fault(rows, parts_by_rows(made), expected)


def _maximum_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands of a tensor whose maximum is shared; each rank's is half as large as that of the one before."""
    context = replace(_context(backend, case), num_groups=1, in_shards=case.in_shards, out_shards=case.out_shards)
    call = LinearCall(context, tensors["weight"], tensors["activation"])
    for name in tensors:
        group = context.amax_group(name)
        if group is None:
            continue
        tensor = tensors[name] * 2.0 ** -dist.get_rank(group)
        for place, make, source in _makers(call, {name: tensor}):
            if case.recipe[place].format == "nvfp4":
                rows = transformed(source, call, place)
                amax = _amax(rows)
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
                fault = _codes_fault(make(), rows, case.recipe[place], amax)
                yield Finding(case, f"{place.name} of {_size(group)} ranks", fault)


def _poison_fault(backend: Backend, case: Case, x: Tensor, w: Tensor, dy: Tensor) -> str:
    """NaN and inf in each tensor must show in both products that it is in."""
    for value in (float("nan"), float("inf")):
        for broken, reached in ((0, (0, 2)), (1, (0, 1)), (2, (1, 2))):
            given = [t.clone() for t in (x, w, dy)]
            given[broken][5, 7] = value
            call = LinearCall(_context(backend, case), given[1], given[0])
            w_fprop, w_dgrad = call.weight_operands()
            makers = call.prepare(*USES["activation"], call.pad_tokens(given[0]))
            gradients = call.prepare(*USES["gradient"], call.pad(given[2]))
            assert makers[0] and makers[1] and gradients[0] and gradients[1]
            products = (
                backend.gemm(makers[0](), w_fprop, torch.bfloat16),
                backend.gemm(gradients[0](), call.dgrad_weight(w_dgrad), torch.bfloat16),
                backend.gemm(gradients[1](), makers[1](), torch.float32),
            )
            for index in reached:
                if products[index].isfinite().all():
                    return f"{value} in {('x', 'W', 'dy')[broken]} disappears in {('fprop', 'dgrad', 'wgrad')[index]}"
    return ""


# ---------------------------------------------------------------------------------------------- stochastic rounding


def _rounding_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands that round stochastically, by the statistics of some draws."""
    ungrouped = replace(case, num_groups=1)
    for name, places in USES.items():
        stochastic = [place for place in places if case.recipe[place].rounding == "stochastic"]
        if not stochastic:
            continue
        tensor = tensors[name]
        count = max(128, min(tensor.shape[0], _DRAW_ELEMENTS // tensor.shape[1] // 128 * 128))
        tensor = tensor[: min(count, tensor.shape[0])]

        def draw(step: int, name: str = name, tensor: Tensor = tensor) -> dict[Place, BackendOperand]:
            call = LinearCall(_context(backend, ungrouped, step), tensors["weight"], tensor)
            return {place: make() for place, make, _ in _makers(call, {name: tensor})}

        call = LinearCall(_context(backend, ungrouped), tensors["weight"], tensor)
        sources = {place: tensor.t() if place.transposed else tensor for place in stochastic}
        rows = {place: transformed(source, call, place).contiguous() for place, source in sources.items()}
        for place in stochastic:

            def make(
                step: int, place: Place = place, draw: Callable[[int], dict[Place, BackendOperand]] = draw
            ) -> BackendOperand:
                return draw(step)[place]

            fault = rounding_faults(rows[place], Draws(make, _DRAWS), case.recipe[place])
            yield Finding(case, f"{place.name} rounding", fault)
        if len(stochastic) == 2:
            what = " and ".join(place.name for place in places)
            yield Finding(case, f"{what} draws", dependence_fault(rows, draw, case.recipe))


def _corrected_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands by MS-EDEN, which only backends with our own draws make, against the reference with the same key."""
    call = LinearCall(_context(backend, case), tensors["weight"], tensors["activation"])
    for place, make, source in _makers(call, tensors):
        if case.recipe[place].rounding == "ms_eden":
            yield Finding(case, f"{place.name} scales", operand_fault(make(), source, call.request(place), None))


def _byte_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Every operand against the reference with the same key."""
    call = LinearCall(_context(backend, case), tensors["weight"], tensors["activation"])
    for place, make, source in _makers(call, tensors):
        made = make()
        if isinstance(made, torch_scaled_mm.PackedOperand):
            fault = bytes_fault(made, transformed(source, call, place), call.request(place))
            yield Finding(case, f"{place.name} bytes", fault)


# ----------------------------------------------------------------------------------------------------------- command

_X, _W, _DY = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16)), Operand("nvfp4", (1, 16), "stochastic")
_M8 = Operand("mxfp8", (1, 32))
_F8, _F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
_F8P, _F8P_W = replace(_F8, power_of_two_scales=True), replace(_F8_W, power_of_two_scales=True)
RECIPES = (
    Recipe("nvfp4", Gemm(_X, _W), Gemm(_DY, _W), Gemm(_DY, _X, 16)),
    Recipe("fp8_block", Gemm(_F8, _F8_W), Gemm(_F8, _F8_W), Gemm(_F8, _F8)),
    Recipe("fp8_block, powers of two", Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P)),
    Recipe("mxfp8", Gemm(_M8, _M8), Gemm(_M8, _M8), Gemm(_M8, _M8)),
)
SHAPES = [[1024, 512, 2048], [512, 2048, 512], [256, 1024, 1280]]


def main(arguments: list[str]) -> int:
    """Test what this machine can run, and say what it cannot; returns the exit code."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m megatron_fp4.precision.selftest", description=description)
    shape = "tokens, input and output features, each a multiple of 128"
    parser.add_argument("--shape", action="append", metavar="TOKENS,INPUTS,OUTPUTS", help=shape)
    options = parser.parse_args(arguments)
    shapes = [[int(size) for size in given.split(",")] for given in options.shape or ()] or SHAPES
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(f"device: {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}")
    for name, value in te.environment().items():
        print(f"set for Transformer Engine: {name}={value}")
    num_faults = 0
    for recipe in RECIPES:
        for backend_name in BACKENDS:
            reason = _untestable(recipe, backend_name, device)
            if reason is not None:
                print(f"{recipe.name}, {backend_name}: not tested: {reason}")
                continue
            backend = BACKENDS[backend_name]()
            findings = [f for n, k, m in shapes for f in check(backend, Case(n, k, m, 1, recipe), device)]
            faults = [finding for finding in findings if finding.fault]
            num_faults += len(faults)
            print(f"{recipe.name}, {backend_name}: {len(findings)} comparisons, {len(faults)} faults")
            for finding in faults:
                print(f"  {finding}")
    return 1 if num_faults else 0


def _untestable(recipe: Recipe, backend_name: str, device: torch.device) -> str | None:
    if backend_name != "emulated" and device.type != "cuda":
        return "there is no CUDA device"
    if refusal := first_refusal(backend_name, {"precision": recipe}, "bfloat16"):
        return f"it cannot do {refusal.problem}"
    if backend_name == "transformer_engine" and (variable := te.fast_math_variable()):
        return f"{variable} is set"
    return refused_here(backend_name, [recipe], device.type)


if __name__ == "__main__":
    from megatron_fp4.runtime.closed_pipe import end_without_reader

    end_without_reader()
    sys.exit(main(sys.argv[1:]))
