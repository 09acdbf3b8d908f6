"""The self-test notices what is wrong with a backend, and the seam that backends stand behind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision import backend_support, verify
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Alignment
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, quantize_operand
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear
from megatron_fp4.precision.recipe import BF16, DGRAD_GRADIENT, WGRAD_GRADIENT, Operand, OperandSlot, Recipe
from megatron_fp4.precision.verify import (
    Case,
    Draws,
    SelfTestError,
    actual_parts,
    check,
    dependence_fault,
    difference,
    rounding_faults,
    unsigned_zeros,
)
from megatron_fp4.quantization.fp8 import quantize_fp8
from megatron_fp4.quantization.mxfp8 import quantize_mxfp8
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from tests.precision import reference as ref
from tests.recipes import changed
from tests.training.harness import alone

NVFP4, FP8, FP8_POWERS, MXFP8 = verify.RECIPES
CASE = Case(128, 128, 256, 1, NVFP4)
CPU = torch.device("cpu")


class Spoiled(EmulatedBackend):
    """The emulation with one operand or product spoiled; `called` lists what passed."""

    def __init__(self, rows=lambda t: t, values=lambda t: t, product=lambda t: t, stochastic_only=False) -> None:
        self.rows, self.values, self.product, self.stochastic_only = rows, values, product, stochastic_only
        self.called: list[str] = []

    def operands(self, x, columns, rows, **settings):
        self.called += [str(request.operand) for request in (columns, rows) if request is not None]
        made = super().operands(self.rows(x), columns, rows, **settings)

        def spoil(maker, request):
            operand = maker()
            if not operand.quantized or (self.stochastic_only and request.key is None):
                return operand
            return replace(operand, values=self.values(operand.unpacked()))

        pairs = zip(made, (columns, rows), strict=True)
        return tuple(maker and (lambda maker=maker, request=request: spoil(maker, request)) for maker, request in pairs)

    def gemm(self, a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype, total=None, rows=None) -> Tensor:
        self.called.append("gemm")
        return self.product(super().gemm(a, b, out_dtype, total, rows))


def faults(backend, case: Case = CASE) -> list[str]:
    return [str(finding) for finding in check(backend, case, CPU) if finding.fault]


@pytest.mark.parametrize(
    "recipe", [*verify.RECIPES, ref.ALL_THE_WAY, ref.MXFP4, ref.QAF, ref.QUARTET2], ids=lambda r: r.name
)
def test_the_emulation_passes(recipe):
    assert faults(Spoiled(), replace(CASE, recipe=recipe, outputs=3 * 80, num_groups=3)) == []


def one_changed(t: Tensor) -> Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    index = t.abs().argmax()
    t.view(-1)[index] = -t.view(-1)[index]
    return t


def half_of_one_tile(t: Tensor) -> Tensor:
    t = t.clone()
    t[32:48, 32:48] *= 0.5
    return t


@pytest.mark.parametrize(
    ("spoiled", "seen"),
    [
        (Spoiled(values=one_changed), "fprop_activation codes: values differ in 1 of"),
        (Spoiled(values=half_of_one_tile), "dgrad_gradient codes: values differ"),
        (Spoiled(rows=lambda t: t * 1.05), "codes: values differ"),
        (Spoiled(product=one_changed), "fprop product: relative error"),
        (Spoiled(product=lambda t: t * 1.01), "wgrad product: relative error 1.00e-02"),
        (Spoiled(product=torch.zeros_like), "dgrad product: relative error 1.00e+00"),
        (Spoiled(product=lambda t: torch.full_like(t, float("nan"))), "fprop product: relative error nan"),
        (Spoiled(product=lambda t: t.nan_to_num(0.0, 0.0, 0.0)), "NaN and inf: nan in x disappears in fprop"),
        (Spoiled(values=torch.zeros_like, stochastic_only=True), "dgrad_gradient rounding: every code is zero"),
        (Spoiled(values=lambda t: t * 2, stochastic_only=True), "are neither neighbour of their value"),
    ],
)
def test_a_wrong_backend_is_noticed(spoiled, seen):
    found = faults(spoiled)
    assert any(seen in fault for fault in found), found


def test_a_case_that_rounds_otherwise_than_its_recipe_is_noticed():
    class Nearest(EmulatedBackend):
        def operands(self, x, columns, rows, **settings):
            columns, rows = (request and replace(request, key=None) for request in (columns, rows))
            plain = [request and replace(request, operand=nearest(request.operand)) for request in (columns, rows)]
            return super().operands(x, *plain, **settings)

    def nearest(operand: Operand) -> Operand:
        return replace(operand, rounding="nearest")

    assert any("two draws are the same" in fault for fault in faults(Nearest()))


def test_two_operands_that_share_their_draws_are_noticed():
    """As where two launches start from one state of a generator: the same draws at the same place."""

    class Shared(EmulatedBackend):
        def operands(self, x, columns, rows, **settings):
            if columns is not None and rows is not None:
                rows = replace(rows, key=columns.key)
            return super().operands(x, columns, rows, **settings)

    for case in (CASE, replace(CASE, recipe=changed(NVFP4, wgrad_rht=0)), replace(CASE, tokens=256, outputs=128)):
        found = faults(Shared(), case)
        assert len(found) == 1, found
        assert "dgrad_gradient and wgrad_gradient draws: go together at the same place: correlation" in found[0]


def test_one_draw_for_both_copies_of_an_element_is_noticed():
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    made_from = {DGRAD_GRADIENT: rows, WGRAD_GRADIENT: rows.t().contiguous()}
    recipe = changed(NVFP4, wgrad_rht=0)

    def draw(number: int, shared: bool) -> dict[OperandSlot, GemmOperand]:
        uniform = torch.rand(2, *rows.shape, generator=torch.Generator().manual_seed(number))
        draws = {DGRAD_GRADIENT: uniform[0], WGRAD_GRADIENT: uniform[0 if shared else 1].t()}
        made = {}
        for slot, x in made_from.items():
            grid = verify._Grid.of(x, quantize_nvfp4(x))
            codes = torch.where(grid.between & (draws[slot] < grid.position), grid.high, grid.low)
            values = codes * grid.scales.repeat_interleave(16, 1)
            made[slot] = GemmOperand(values, None, True)
        return made

    assert dependence_fault(made_from, lambda number: draw(number, False), recipe) == ""
    found = dependence_fault(made_from, lambda number: draw(number, True), recipe)
    assert "go together at the same element: correlation +0." in found


def test_a_zero_has_no_sign():
    codes = torch.arange(256).to(torch.uint8)
    free = unsigned_zeros(codes)
    for code, found in zip(codes.tolist(), free.tolist(), strict=True):
        assert found == (0 if code & 15 == 8 else code & 15) | (0 if code >> 4 == 8 else code >> 4) << 4


def test_the_hardware_s_negative_zero_is_no_fault():
    """The samples have exact -0.0 in them, which the instruction may give code 8 and the reference gives 0."""
    x, _, _ = verify.sample_tensors(CASE, CPU)
    exact = (x == 0) & x.signbit()
    assert exact.any()
    quantized = quantize_nvfp4(x)
    low, high = exact[:, 0::2] * 8, exact[:, 1::2] * 128
    signed = quantized.codes | low.to(torch.uint8) | high.to(torch.uint8)
    assert not torch.equal(signed, quantized.codes)
    layout = te._Layout(Operand("nvfp4", (1, 16)), "columns", dict, ())
    padded = torch.nn.functional.pad(quantized.scales.view(torch.uint8), (0, 0, 0, 0))
    native = te.NativeOperand(signed, padded, quantized.amax.view(1), layout)
    assert verify._codes_fault(native, x, layout.operand, quantized.amax) == ""
    assert actual_parts(native, slice(None))["codes"].shape == signed.shape


def test_codes_are_decoded_once_however_many_pieces_they_have(monkeypatch):
    monkeypatch.setattr("megatron_fp4.precision.verify._CHUNK_ELEMENTS", 1)
    rows, _, _ = verify.sample_tensors(replace(CASE, tokens=384), CPU)
    operand = Operand("nvfp4", (1, 16))
    made = quantize_operand(rows, operand)
    decode, decoded = GemmOperand.unpacked, []
    monkeypatch.setattr(GemmOperand, "unpacked", lambda self: decoded.append(self) or decode(self))
    assert verify._codes_fault(made, rows, operand, rows.abs().amax().float()) == ""
    assert len(decoded) == 1
    wrong = decode(made).clone()
    wrong[300, 0] *= -1
    fault = verify._codes_fault(replace(made, values=wrong), rows, operand, rows.abs().amax().float())
    assert "first at [300, 0]" in fault


def draws_of(rows: Tensor, up: float = 0.0, spread: float = 1.0) -> Draws:
    """Fair draws of NVFP4 codes, made unfair: `up` adds to the chance of going up, `spread` < 1 repeats draws."""
    reference = quantize_nvfp4(rows)
    operand = Operand("nvfp4", (1, 16), "stochastic")

    def make(number: int) -> GemmOperand:
        generator = torch.Generator().manual_seed(number)
        moved = rows + up * (reference.dequantize() != 0) * reference.scales.float().repeat_interleave(16, 1) * 0.5
        key = ref.context_of(BF16).key(int(number * spread), 0, "x", 0, 0)
        if number and spread < 1:
            key = ref.context_of(BF16).key(int(torch.randint(1, 3, (), generator=generator)), 0, "x", 0, 0)
        quantized = quantize_nvfp4(moved, rounding="stochastic", key=key, amax=reference.amax)
        assert operand.rounding == "stochastic"
        return GemmOperand(quantized.block_values(), quantized.decode_scale(), True)

    return Draws(make, 16)


def test_fair_and_unfair_rounding():
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    assert rounding_faults(rows, draws_of(rows), ref.DY) == ""
    assert "spread" in rounding_faults(rows, draws_of(rows, spread=0.5), ref.DY)
    same = Draws(lambda number: draws_of(rows).make(0), 4)
    assert rounding_faults(rows, same, ref.DY) == "two draws are the same"
    counter = iter(range(100))
    unrepeatable = Draws(lambda number: draws_of(rows).make(next(counter)), 4)
    assert rounding_faults(rows, unrepeatable, ref.DY) == "the same key gives other draws"


def test_rounding_that_leans_one_way_is_noticed():
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).abs()
    fair = draws_of(rows)

    def leaning(number: int) -> GemmOperand:
        made, second = fair.make(number), fair.make(number + 100).values
        again = torch.rand(second.shape, generator=torch.Generator().manual_seed(number)) < 0.1
        return replace(made, values=torch.where(again, torch.maximum(made.values, second), made.values))

    assert "goes up too often" in rounding_faults(rows, Draws(leaning, 16), ref.DY)


def test_difference_says_where_and_what():
    a = torch.arange(6.0).reshape(2, 3)
    b = a.clone()
    assert difference(a, b) == ""
    b[1, 2] = 7
    assert difference(a, b, first_row=10) == "differ in 1 of 6, first at [11, 2]: 5 instead of 7"
    assert "shape (2, 3) instead of (3, 2)" in difference(a, b.reshape(3, 2))
    nan = torch.full((2,), float("nan"))
    assert difference(nan, nan) == ""


def test_a_fault_stops_the_run_and_is_named():
    with alone():
        line = verify.require(Spoiled(), [CASE], CPU)
        assert "no difference" in line
        with pytest.raises(SelfTestError) as error:
            verify.require(Spoiled(values=one_changed), [CASE], CPU)
    assert "nvfp4, 128 tokens, 128 -> 256: fprop_activation codes" in str(error.value)
    assert "precision.backend=emulated" in str(error.value)


def test_a_kernel_that_fails_is_a_fault_of_its_own():
    def fail(product: Tensor) -> Tensor:
        raise RuntimeError("CUDA Error: invalid argument\nin some file")

    with alone(), pytest.raises(SelfTestError) as error:
        verify.require(Spoiled(product=fail), [CASE], CPU)
    assert str(error.value).endswith("nvfp4, 128 tokens, 128 -> 256: kernels: failed: CUDA Error: invalid argument")


def test_cases_are_the_different_quantized_linears_of_the_plans():
    shapes = [LinearShape(f"blocks.{i}.mixer.up_proj", i, 64, 128) for i in range(3)]
    plan = Plan(tuple(PlannedLinear(s, BF16 if s.block == 2 else NVFP4, "") for s in shapes))
    switched = Plan(tuple(PlannedLinear(s, ref.QAF, "") for s in shapes))
    linears = {shape.name: LinearContext(num_groups=2) for shape in shapes}
    cases = verify.cases_of([plan, switched], linears, 512)
    assert cases == [Case(512, 64, 128, 2, NVFP4), Case(512, 64, 128, 2, ref.QAF)]


def test_the_command_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verify.main(["--shape", "128,128,128"]) == 0
    printed = capsys.readouterr().out
    assert "nvfp4, emulated: 13 comparisons, 0 faults" in printed
    assert "nvfp4, transformer_engine: not tested: there is no CUDA device" in printed


def test_an_old_release_is_not_tested_rather_than_at_fault(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(te, "not_installed", lambda: None)
    for version, reason in (("2.13.0", "2.13.0 is installed and precision=nvfp4 needs 2.19"), ("2.20.2", "")):
        monkeypatch.setattr(backend_support, "installed_version", lambda version=version: version)
        found = verify._untestable(NVFP4, "transformer_engine", torch.device("cuda"))
        assert reason in found if reason else found is None


def test_a_linear_computes_by_its_backend():
    x, w, dy = ref.tensors(32, 64, 48)
    expected = ref.run(x, w, dy, ref.context_of(NVFP4))
    backend = Spoiled()
    context = ref.context_of(NVFP4, backend=backend)
    for mine, theirs in zip(ref.run(x, w, dy, context), expected, strict=True):
        assert torch.equal(mine, theirs)
    names = ["nvfp4 16x16", "nvfp4 1x16", "nvfp4 1x16", "gemm", "nvfp4 1x16 SR", "nvfp4 1x16 SR", "gemm", "gemm"]
    assert backend.called == names


def test_a_backend_that_does_not_borrow_quantizes_the_weight_along_both_dimensions_and_pads():
    backend = Spoiled()
    backend.transposed = None
    backend.alignment = lambda recipe: Alignment(outputs=32, group_outputs=16)
    x, w, dy = ref.tensors(32, 64, 3 * 16)
    expected = ref.run(x, w, dy, ref.context_of(ref.nearest(NVFP4), num_groups=3))
    found = ref.run(x, w, dy, ref.context_of(ref.nearest(NVFP4), num_groups=3, backend=backend))
    assert backend.called[:2] == ["nvfp4 16x16"] * 2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)
    even = LinearContext(recipe=NVFP4, backend=backend, num_groups=2)
    y = quantized_linear(x, w[:32], even)
    assert y.shape == (32, 32)  # 2 x 16 is a multiple of 32: nothing to pad


@pytest.mark.parametrize(("recipe", "multiple"), [(NVFP4, 32), (FP8, 128), (BF16, 1), (ref.QAF, 32)])
def test_what_native_gemms_want(recipe: Recipe, multiple: int):
    assert te.alignment(recipe).outputs == multiple


def test_native_operands_decode_to_our_layout():
    """Transformer Engine pads scales: rows to 128 and columns to 4 (NVFP4), and lays FP8's 1x128 scales transposed."""
    rows = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize_nvfp4(rows)
    padded = torch.zeros(128, 12, dtype=torch.uint8)
    padded[:48, :10] = quantized.scales.view(torch.uint8)
    layout = te._Layout(Operand("nvfp4", (1, 16)), "columns", dict, ())
    operand = te.NativeOperand(quantized.codes, padded, quantized.amax.view(1), layout)
    assert torch.equal(operand.decoded().dequantize(), quantized.dequantize())
    assert te.NativeOperand(*operand.tensors(), operand.layout).storage()["rowwise_data"] is quantized.codes

    mxfp8 = quantize_mxfp8(rows)
    for along, turned in (("columns", lambda t: t), ("rows", lambda t: t.t().contiguous())):
        padded = torch.full((128, 8) if along == "columns" else (8, 128), 99, dtype=torch.uint8)
        padded[tuple(slice(size) for size in turned(mxfp8.scales).shape)] = turned(mxfp8.scales)
        layout = te._Layout(Operand("mxfp8", (1, 32)), along, dict, ())
        native = te.NativeOperand(turned(mxfp8.codes.view(torch.uint8)), padded, None, layout)
        assert torch.equal(native.decoded().codes.view(torch.uint8), mxfp8.codes.view(torch.uint8))
        assert torch.equal(native.decoded().scales, mxfp8.scales)

    wide = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    for block, scales in (
        ((1, 128), lambda q: torch.nn.functional.pad(q.scales.t(), (0, 4))),
        ((128, 128), lambda q: torch.nn.functional.pad(q.scales[::128], (0, 1))),
    ):
        fp8 = quantize_fp8(wide, block)
        layout = te._Layout(Operand("fp8", block), "rows", dict, ())
        native = te.NativeOperand(fp8.codes.view(torch.uint8), scales(fp8), None, layout)
        assert torch.equal(native.decoded().dequantize(), fp8.dequantize())
        assert native.storage()["columnwise_scale_inv"] is native.scales and native.storage()["rowwise_data"] is None
