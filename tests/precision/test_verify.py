"""The self-test and the recheck find faults of a backend, and change no results."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision import verify
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.recipe import DGRAD_GRADIENT, SLOTS, WGRAD_GRADIENT, Operand, OperandSlot
from megatron_fp4.precision.verify import (
    Case,
    Recheck,
    Rechecked,
    SelfTestError,
    check,
    fairness,
    grid_positions,
    operand_fault,
)
from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform
from megatron_fp4.quantization.rounding import WHOLE, Place, Span, round_e2m1_stochastic, rounding_key
from tests.precision import reference as ref
from tests.training.harness import alone

NVFP4 = ref.NVFP4
CASE = Case(128, 128, 256, 1, NVFP4)
CPU = torch.device("cpu")


class Spoiled(EmulatedBackend):
    """The emulation with wrong operands or products.

    values, product, place: they change what a backend computes. operand: the name of the only operand whose values
    change; empty: all. draws_ours: if False, the self-test checks the statistics of draws instead of their bits.
    """

    def __init__(
        self,
        values: Callable[[Tensor], Tensor] = lambda t: t,
        product: Callable[..., Tensor] = lambda t, total: t,
        operand: str = "",
        place: Callable[[Place], Place] = lambda place: place,
        draws_ours: bool = True,
    ) -> None:
        self.values, self.product, self.operand, self.place = values, product, operand, place
        self.draws_ours = draws_ours

    def operands(self, x, place, as_stored, transposed):
        def spoil(maker, request):
            operand = maker()
            if not operand.quantized or self.operand not in ("", request.slot.name):
                return operand
            return replace(operand, values=self.values(operand.unpacked()))

        makers = super().operands(x, self.place(place), as_stored, transposed)
        pairs = zip(makers, (as_stored, transposed), strict=True)
        return tuple(maker and (lambda maker=maker, request=request: spoil(maker, request)) for maker, request in pairs)

    def gemm(self, a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype, total=None, rows=None) -> Tensor:
        before = None if total is None else total.clone()
        return self.product(super().gemm(a, b, out_dtype, total, rows), before)


def faults(backend, case: Case = CASE) -> list[str]:
    return [str(finding) for finding in check(backend, case, CPU) if finding.fault]


def one_changed(t: Tensor) -> Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    t.view(-1)[t.abs().argmax()] *= -1
    return t


def half_of_one_tile(t: Tensor) -> Tensor:
    t = t.clone()
    t[32:48, 32:48] *= 0.5
    return t


class InBlackwellsOrder(Spoiled):
    sums = "blackwell"


def beta(factor: float) -> Callable[..., Tensor]:
    """A GEMM that adds its product to `factor` times the total."""
    return lambda result, before: result if before is None else result + (factor - 1) * before


# ----------------------------------------------------------------------------------------------------------- self-test


@pytest.mark.parametrize(
    ("recipe", "draws_ours"),
    [(NVFP4, True), (NVFP4, False), *((recipe, True) for recipe in (ref.MXFP8, ref.FP8, ref.MXFP4, ref.QUARTET2))],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_emulation_passes_the_self_test(recipe, draws_ours):
    case = replace(CASE, recipe=recipe, outputs=3 * 80, num_groups=3)
    assert faults(Spoiled(draws_ours=draws_ours), case) == []
    assert recipe != NVFP4 or faults(InBlackwellsOrder(draws_ours=draws_ours), case) == []


@pytest.mark.parametrize(
    ("spoiled", "seen"),
    [
        (Spoiled(values=one_changed), "fprop_activation codes: values differ in 1 of"),
        (Spoiled(values=half_of_one_tile), "dgrad_gradient codes: values differ"),
        (Spoiled(product=lambda t, _: one_changed(t)), "fprop product: relative error"),
        (Spoiled(product=lambda t, _: t * 1.01), "wgrad product: relative error 1.00e-02"),
        (Spoiled(product=lambda t, _: t * float("nan")), "fprop product: relative error nan"),
        (Spoiled(product=lambda t, _: t.nan_to_num(0.0, 0.0, 0.0)), "nan in the activation disappears in fprop"),
        (Spoiled(product=beta(0)), "wgrad product added to a gradient: relative error"),
        (Spoiled(product=beta(2)), "wgrad product added to a gradient: relative error"),
        (InBlackwellsOrder(product=lambda t, _: t.nextafter(2 * t)), "fprop bits: "),
        (InBlackwellsOrder(product=lambda t, _: t.nextafter(2 * t)), "wgrad bits, added to a gradient: "),
        (Spoiled(place=lambda place: replace(place, rows=Span(2))), "dgrad_gradient draws: values differ"),
    ],
)
def test_the_self_test_finds_a_wrong_backend(spoiled, seen):
    found = faults(spoiled)
    assert any(seen in fault for fault in found), found


def test_a_fault_ends_the_run_with_its_name():
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("CUDA Error: invalid argument\nin some file")

    with alone():
        assert "no difference" in verify.require(Spoiled(), [CASE], CPU)
        with pytest.raises(SelfTestError, match=r"nvfp4, 128 tokens, 128 -> 256: fprop_activation codes") as error:
            verify.require(Spoiled(values=one_changed), [CASE], CPU)
        assert "precision.backend=emulated" in str(error.value)
        with pytest.raises(SelfTestError, match=r"kernels: failed: RuntimeError: CUDA Error: invalid argument$"):
            verify.require(Spoiled(product=fail), [CASE], CPU)


# ------------------------------------------------------------------------------------------------------------- fairness

ROWS = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
N, K = ROWS.shape
NO_TRANSFORM = ref.changed(NVFP4, wgrad_rht=0)


def drawn(uniform: Tensor, rows: Tensor = ROWS) -> GemmOperand:
    """`rows` rounded to NVFP4 with these draws, FP32 in [0, 1) of the same shape."""
    made = quantize_nvfp4(rows)
    scaled = grid_positions(rows, made.scales.float(), made.amax).clamp(-6, 6)
    codes = round_e2m1_stochastic(scaled, 1 - 2.0**-22 - uniform * (1 - 2.0**-21))
    return GemmOperand(codes * made.scales.float().repeat_interleave(16, 1), None, True)


def uniform_of(number: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(number))


SHARED = "of the variance of independent draws"


@pytest.mark.parametrize(
    ("uniform", "seen"),
    [
        # Fair for each element alone: one draw per row, column or block; repeated draws; antithetic neighbours.
        (lambda number: uniform_of(number, N, 1).expand(N, K), SHARED),
        (lambda number: uniform_of(number, 1, K).expand(N, K), SHARED),
        (lambda number: uniform_of(number, N, K // 16).repeat_interleave(16, 1), SHARED),
        (lambda number: uniform_of(number, 16, K).repeat(N // 16, 1), SHARED),
        (lambda number: torch.stack(((half := uniform_of(number, N, K // 2)), 1 - half), dim=-1).flatten(1), SHARED),
        (lambda number: uniform_of(number // 2, N, K), "its variance is"),
        (lambda number: uniform_of(0, N, K), "two draws are the same"),
        (lambda number: torch.rand(N, K), "gives other draws"),
        (lambda number: (uniform_of(number, N, K) - 0.02).clamp(min=0), "rounds up too often"),
    ],
)
def test_unfair_draws_of_one_operand_are_found(uniform, seen):
    found = fairness({DGRAD_GRADIENT: ROWS}, lambda i: {DGRAD_GRADIENT: drawn(uniform(i))}, NO_TRANSFORM)
    assert seen in found["dgrad_gradient"]


def test_two_operands_that_share_draws_are_found():
    """Two launches may start from one state of a generator, and both copies of an element may use one draw. Independent
    draws of 8 bits are fair."""
    sides = {DGRAD_GRADIENT: ROWS, WGRAD_GRADIENT: ROWS.t().contiguous()}

    def draw(number: int, shared: str) -> dict[OperandSlot, Any]:
        one, other = ((uniform_of(number + i, *shape) * 256).floor() / 256 for i, shape in ((0, (N, K)), (100, (K, N))))
        other = {"none": other, "element": one.t(), "index": one.reshape(K, N)}[shared]
        return {DGRAD_GRADIENT: drawn(one), WGRAD_GRADIENT: drawn(other, sides[WGRAD_GRADIENT])}

    for shared in ("none", "element", "index"):
        found = fairness(sides, lambda number, shared=shared: draw(number, shared), NO_TRANSFORM)
        assert found["dgrad_gradient"] == found["wgrad_gradient"] == ""
        fault = found["dgrad_gradient and wgrad_gradient"]
        assert (fault == "") if shared == "none" else f"are correlated at the same {shared}: correlation +0." in fault


# ------------------------------------------------------------------------------------------------------------- recheck


def rechecked(context: LinearContext, x: Tensor, w: Tensor, dy: Tensor) -> Rechecked:
    """Recheck a step of two micro-batches."""
    recheck, weight = Recheck(1, {context.name: context}), w.clone().requires_grad_()
    with alone():
        with recheck.watching(0):
            for context.step_state.micro_batch in (3, 7):
                quantized_linear(x.clone().requires_grad_(), weight, context).backward(dy)
        assert context.watcher is None
        found = recheck.collect()
    assert found is not None
    return found


def faults_of(backend: EmulatedBackend, *tensors: Tensor, recipe=ref.NVFP4) -> list[str]:
    given = tensors or ref.tensors(32, 64, 48)
    return [f.removeprefix("rank 0: ") for f in rechecked(ref.context_of(recipe, backend=backend), *given).faults]


@pytest.mark.parametrize(
    ("recipe", "comparisons"),
    [
        (replace(ref.NVFP4, rht_signs="fresh"), 5 + 4),  # dgrad takes the codes of fprop's weight
        (ref.FP8, 5 + 4),
        (ref.QUARTET2, 6 + 4),
        (ref.QAF, 2 + 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_recheck_of_the_emulation_finds_nothing_and_changes_no_bits(recipe, comparisons):
    context = ref.context_of(recipe, num_groups=3, first_output=80)
    x, w, dy = ref.tensors(128, 256, 3 * 80, dtype=torch.bfloat16)
    expected = ref.run(x, w.float(), dy, context)
    with (
        mock.patch.object(verify, "operand_fault", wraps=verify.operand_fault) as operands,
        mock.patch.object(verify, "product_fault", wraps=verify.product_fault) as products,
    ):
        assert rechecked(context, x, w.float(), dy).faults == []
    assert operands.call_count + products.call_count == comparisons
    context.step_state.micro_batch = 0
    for mine, theirs in zip(ref.run(x, w.float(), dy, context), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [slot.name for slot in SLOTS])
def test_the_recheck_finds_one_wrong_code_in_any_operand(name):
    (fault,) = faults_of(Spoiled(values=one_changed, operand=name), recipe=ref.ALL_THE_WAY)
    assert fault.startswith(f"{name}: values differ in 1 of ")


def test_the_recheck_finds_a_wrong_product():
    found = faults_of(Spoiled(product=lambda t, _: t * 1.02))
    assert [fault.split()[0] for fault in found[:3]] == ["fprop", "dgrad", "wgrad"]
    for factor in (0, 2):
        assert faults_of(Spoiled(product=beta(factor)))[0].startswith("wgrad product added to a gradient")


def test_the_recheck_finds_nan_that_disappears():
    x, w, dy = ref.tensors(32, 64, 48)
    x[5, 7] = float("nan")
    assert faults_of(Spoiled(), x, w, dy) == []
    hidden = Spoiled()
    hidden.operands = lambda x, *rest: EmulatedBackend.operands(hidden, x.nan_to_num(), *rest)  # type: ignore[method-assign]
    fault, *_ = faults_of(hidden, x, w, dy)
    assert "is finite, although its tensor has NaN or inf" in fault


# ----------------------------------------------------- operands with draws and transforms of Transformer Engine's own

ROW, DRAWN = ref.X, ref.DY
KEY = rounding_key("its own")
# Values of different magnitudes, so that sums are not exact.
NORMAL = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(0))
UNLIKE = (NORMAL[0] * NORMAL[1].exp()).bfloat16()


def native(rows: Tensor, operand: Operand, rht: int = 0) -> te.NativeOperand:
    """An operand that a native quantizer, with its own draws and order of summation in the transform, may return."""
    if rht:
        # Another order of summation: a matrix product in double precision, rounded once.
        eye = random_hadamard_transform(torch.eye(rht, dtype=torch.float64), rht, fixed_signs(rht))
        rows = (rows.double().unflatten(-1, (-1, rht)) @ eye).flatten(-2).bfloat16()
    quantized = quantize_nvfp4(rows, rounding=operand.rounding, key=KEY if operand.drawn else None)
    layout = te.NativeLayout(operand, "columns")
    return te.NativeOperand(quantized.codes, quantized.scales.view(torch.uint8), quantized.amax.view(1), layout)


def fault_of(made: te.NativeOperand, x: Tensor, rht: int, exact: bool = False) -> str:
    operand = made.layout.operand
    request = OperandRequest(operand, rht, key=rounding_key("ours") if operand.drawn else None)
    return operand_fault(made, x, WHOLE, request, exact=exact)


@pytest.mark.parametrize("operand", [ROW, DRAWN], ids=str)
def test_native_operands_may_have_their_own_draws_and_order_of_summation(operand):
    for rht in (0, 16):
        assert fault_of(native(UNLIKE, operand, rht), UNLIKE, rht) == ""
    after = random_hadamard_transform(UNLIKE, 16, fixed_signs(16))
    steps = torch.randint(-1, 2, after.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    moved = native((after.view(torch.int16) + steps).view(torch.bfloat16), operand)
    assert fault_of(moved, UNLIKE, 16) == "" and fault_of(moved, UNLIKE, 16, exact=True) != ""


@pytest.mark.parametrize(("operand", "rht"), [(ROW, 0), (DRAWN, 16)], ids=str)
def test_wrong_native_operands_are_found(operand, rht):
    made = native(UNLIKE, operand, rht)
    codes, scales = made.data.clone(), made.scales.clone()
    # The code of a block's largest value becomes zero; a scale is halved.
    codes.view(-1)[int((codes.view(-1) & 0xF == 7).nonzero()[0])] &= 0xF0
    scales[3, 5] -= 8
    other = native(UNLIKE.roll(1, 0), operand, rht) if operand is DRAWN else native(UNLIKE, DRAWN, rht)
    for wrong in ({"data": codes}, {"scales": scales}, {"amax": made.amax * 1.02}, {"data": other.data}):
        assert fault_of(replace(made, **wrong), UNLIKE, rht)
