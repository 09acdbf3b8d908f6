"""The backend transformer_engine on a CPU: its calls of Transformer Engine, and how it uses the results. te_stand_in.py
replaces the package."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import grouped_linear, quantized_linear
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe
from megatron_fp4.precision.verify import Case, check
from megatron_fp4.quantization.rounding import WHOLE, Place, Span, rounding_key
from megatron_fp4.quantization.segments import Segments
from megatron_fp4.quantization.tensor import QuantizedTensor
from tests.precision import reference as ref
from tests.precision import te_stand_in as stand_in

NVFP4 = ref.NVFP4
X_46, W_46 = ref.X_46, ref.W_46
FOUR_OVER_SIX = Recipe("four over six", Gemm(X_46, W_46), Gemm(X_46, W_46), Gemm(X_46, X_46))
FORWARD_46 = ref.changed(
    NVFP4, name="forward four over six", fprop_activation=ref.SIX, fprop_weight=ref.SIX, dgrad_weight=ref.W
)  # as nvfp4_4over6_1x16 and nvfp4_best: squared errors
CPU = torch.device("cpu")
# The fused kernels take the first shape, but not the second.
ALIGNED, ODD = (128, 128, 256), (96, 160, 224)


def faults(recipe: Recipe = NVFP4, shape: tuple[int, int, int] = ALIGNED, experts: bool = False) -> list[str]:
    with stand_in.installed():
        found = check(te.TransformerEngineBackend(), Case(*shape, 1, recipe, experts=experts), CPU)
    return [str(finding) for finding in found if finding.fault]


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        *((recipe, shape) for recipe in (NVFP4, FORWARD_46) for shape in (ALIGNED, ODD)),
        *((ref.changed(NVFP4, name="no transform", wgrad_rht=0), ODD), (FOUR_OVER_SIX, ALIGNED), (ref.QAF, ODD)),
    ],
    ids=lambda value: getattr(value, "name", "x".join(map(str, value)) if isinstance(value, tuple) else ""),
)
def test_the_self_test_accepts_what_hardware_returns(recipe, shape):
    """Code 8 for negative zeros, maxima without NaN, 8-bit draws, garbage in the padding, scales in either order."""
    assert faults(recipe, shape) == []
    if shape == ALIGNED:
        assert faults(recipe, (130, *shape[1:]), experts=True) == [] and stand_in.SPLITS


def swap_nibbles(parts: dict[str, Any]) -> None:
    for name in ("rowwise_data", "columnwise_data"):
        parts[name] = None if parts[name] is None else (parts[name] >> 4) | (parts[name] << 4)


def zero_stochastic_codes(parts: dict[str, Any]) -> None:
    if parts["quantizer"].stochastic_rounding:
        parts["rowwise_data"] *= 0


@pytest.mark.parametrize(
    ("settings", "spoil", "seen"),
    [
        ({}, swap_nibbles, "fprop_activation codes: values differ in"),
        ({}, lambda parts: parts["amax_rowwise"].mul_(2), "fprop_weight codes: tensor scale differ"),
        ({}, lambda parts: parts.update(with_gemm_swizzled_scales=False), "fprop_weight codes: values differ in"),
        ({}, zero_stochastic_codes, "dgrad_gradient draws: codes differ in"),
        ({"with_rht": False}, None, "wgrad_activation codes: values differ in"),
        ({"with_random_sign_mask": False}, None, "wgrad_activation codes: values differ in"),
        ({"stochastic_rounding": False}, None, "dgrad_gradient rounding: "),
    ],
    ids=["nibbles", "maximum", "order of scales", "zeros", "no transform", "no signs", "no draws"],
)
def test_the_self_test_finds_faults(monkeypatch, settings, spoil, seen):
    quantize = stand_in.NVFP4Quantizer.__call__

    def spoiled(self, x):
        self.__dict__.update(settings)
        storage = quantize(self, x)
        if spoil is not None:
            spoil(storage.parts)
        return storage

    monkeypatch.setattr(stand_in.NVFP4Quantizer, "__call__", spoiled)
    found = faults()
    assert any(seen in fault for fault in found), found


def test_the_self_test_finds_experts_that_share_a_scale(monkeypatch):
    split = stand_in.split_quantize

    def spoiled(x, rows, quantizers):
        first, *others = split(x, rows, quantizers)
        for other in others:
            other.parts["amax_rowwise"].copy_(first.parts["amax_rowwise"])
        return [first, *others]

    monkeypatch.setattr(stand_in, "split_quantize", spoiled)
    assert any("experts: fprop_activation codes: tensor scale differ" in fault for fault in faults(experts=True))
    assert faults() == []


@pytest.mark.parametrize("counts", [[[3, 0, 32, 0], [17, 0, 0, 130]], [[3] * 66, [1] * 66]], ids=["few", "many"])
def test_experts_equal_the_emulation_up_to_the_order_of_sums_and_add_gradients(counts):
    """Those of several sources have one scale; a grouped kernel takes 64 experts; one row follows all segments."""
    counted, inputs, outputs = torch.tensor(counts), 128, 256
    x, w, dy = (t.bfloat16() for t in ref.tensors(int(counted.sum()) + 1, inputs, outputs))
    w = torch.stack([w.roll(expert, 0) * 2.0 ** (expert % 5) for expert in range(len(counts[0]))])
    segments, found = Segments.of_experts(counted, torch.arange(len(x))), []
    *parts, last = torch.arange(len(x)).split([*counted.flatten().tolist(), 1])
    order = torch.cat([*(parts[i] for expert in range(len(w)) for i in (expert, len(w) + expert)), last])
    alone = Segments.of_experts(counted.sum(0), order)
    with stand_in.installed():
        for backend, of in ((EMULATED, alone), (te.TransformerEngineBackend(), segments)):
            weight, steps = torch.nn.Parameter(w.float()), []
            for micro_batch in range(2):
                context = ref.context_of(ref.nearest(NVFP4), backend=backend)
                given, rows = (x * (1 + micro_batch)).requires_grad_(), order if of is alone else slice(None)
                y = grouped_linear(given[rows], weight, context, of)
                y.backward(dy[rows])
                steps += [y.detach()[order.argsort()] if of is alone else y.detach(), given.grad]
            found.append([*steps, weight.grad])
        assert [len(rows) for rows in stand_in.SPLITS] == 4 * ([3] if len(w) == 4 else [64, 2])
    for expected, actual in zip(*found, strict=True):
        bound = 2**-7 if actual.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound / 8 * float(expected.abs().max()))
        assert not actual[-1].any() if actual.dim() == 2 else actual[0].any()


def test_draws_of_experts_follow_the_micro_batch_and_odd_widths_are_emulated():
    counts = torch.tensor([40, 0, 24])
    segments = Segments.of_experts(counts, torch.arange(64))

    def gradient(backend, outputs: int, micro_batch: int = 0):
        x, w, dy = (t.bfloat16() for t in ref.tensors(64, 128, outputs))
        weight = torch.nn.Parameter(w.expand(3, -1, -1).clone())
        context = ref.context_of(NVFP4, backend=backend)
        context.step_state.micro_batch = micro_batch
        grouped_linear(x.requires_grad_(), weight, context, segments).backward(dy)
        return weight.grad

    with stand_in.installed():
        native = te.TransformerEngineBackend()
        first, again, other = (gradient(native, 256, micro_batch) for micro_batch in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert te.emulated_experts(NVFP4, 128, 256) == "" != te.emulated_experts(NVFP4, 128, 144)
        assert torch.equal(gradient(native, 144), gradient(EMULATED, 144))


def test_quantizers_and_gemms_get_these_settings_in_this_order():
    x, w, dy = (t.bfloat16() for t in ref.tensors(128, 256, 384))
    with stand_in.installed() as log:
        context, weight = ref.context_of(NVFP4, backend=te.TransformerEngineBackend()), w.float().requires_grad_()
        for _ in range(2):
            quantized_linear(x.requires_grad_(), weight, context).backward(dy)
        names = ("columnwise", "with_rht", "with_2d_quantization", "stochastic_rounding", "with_random_sign_mask")
        flags = [(call["shape"], *(getattr(call["quantizer"], name) for name in names)) for call in log]
        assert flags[:3] == [
            ((384, 256), True, False, True, False, True),  # W
            ((128, 256), True, True, False, False, True),  # x
            ((128, 384), True, True, False, True, True),  # dy
        ]
        assert flags[3:] == flags[1:3]  # of the second micro-batch, which adds to the gradient
        assert [
            {"layout": "TN", "out_dtype": torch.bfloat16, "grad": False, "accumulate": False},
            {"layout": "NN", "out_dtype": torch.bfloat16, "grad": True, "accumulate": False},
            {"layout": "NT", "out_dtype": torch.float32, "grad": True, "accumulate": False},
        ] == stand_in.GEMMS[:3]
        assert stand_in.GEMMS[3:] == [*stand_in.GEMMS[:2], {**stand_in.GEMMS[2], "accumulate": True}]
        ref.run(x, w, dy, replace(context, recipe=replace(NVFP4, rht_signs="none"), weight_cache=None))
        assert not log[-1]["quantizer"].with_random_sign_mask
        for recipe, mode in ((FOUR_OVER_SIX, "MAE"), (FORWARD_46, "MSE")):
            log.clear()
            ref.run(x, w, dy, replace(context, recipe=recipe, weight_cache=None))
            used = [call["quantizer"] for call in log if call["quantizer"].nvfp4_use_4over6]
            assert used and {(each.nvfp4_e4m3_max, each.nvfp4_4over6_err_mode) for each in used} == {(256, mode)}


def test_draws_depend_on_the_key_alone_and_the_generator_is_unchanged():
    with stand_in.installed():
        generator, drawn = torch.cuda.default_generators[0], []
        before, state = generator.state, generator.state.get_state()
        for key in (rounding_key("a"), rounding_key("a"), rounding_key("b"), rounding_key("a").at(Place(Span(16)))):
            with te._seeded(key, CPU):
                drawn.append(tuple(torch.rand(4, generator=generator.state).tolist()))
        assert generator.state is before and torch.equal(before.get_state(), state)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


@pytest.mark.parametrize("along", ["columns", "rows"])
@pytest.mark.parametrize(
    ("operand", "padded"),
    [
        (Operand("mxfp8", (1, 32)), {"columns": (256, 4), "rows": (4, 256)}),
        (Operand("fp8", (1, 128)), {"columns": (1, 164), "rows": (1, 164)}),
    ],
    ids=lambda value: getattr(value, "format", ""),
)
def test_gathered_8_bit_codes_have_the_layout_of_its_quantizers(operand, padded, along):
    """Scales have the shapes of its `get_scale_shape`, for [161, 128] or its transpose."""
    codes = torch.randint(0, 127, (161, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (161, 4), dtype=torch.uint8) if operand.format == "mxfp8" else torch.rand(161, 1)
    made = te.NativeOperand.of(QuantizedTensor(codes, scales, operand.block), None, te.NativeLayout(operand, along))
    assert made.scales.shape == padded[along] and made.scales.is_contiguous() and made.data.is_contiguous()
    assert made.data.shape == ((128, 161) if padded["rows"] != padded["columns"] and along == "rows" else (161, 128))
    assert torch.equal(made.decoded().codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made.decoded().scales, scales)
    again = made.gathered(lambda message: SimpleNamespace(wait=lambda: message), transposed=along == "rows")()
    assert torch.equal(again.data, made.data) and torch.equal(again.scales, made.scales)


def test_nan_in_a_slice_reaches_all_tokens():
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    x[5, 7] = float("nan")
    request = OperandRequest(ref.X)
    with stand_in.installed():
        slices = [te.TransformerEngineBackend().operands(part, WHOLE, request, None)[0]() for part in x.split(32)]
    # On the rank with the other slice, whose maximum is finite.
    messages = []
    for made in slices:
        made.gathered(lambda message: messages.append(message), transposed=False)
    whole = slices[1].gathered(lambda _: SimpleNamespace(wait=lambda: torch.cat(messages)), transposed=False)()
    assert whole.amax.isfinite() and whole.unpacked()[:32].isnan().any() and whole.unpacked()[32:].isfinite().all()
