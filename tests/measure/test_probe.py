import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.measure import diagnostics as samples
from megatron_fp4.measure.diagnostics import LinearMeasurement, Probe, ProbedCall
from megatron_fp4.parallel.layers import ColumnParallelLinear, QuantizedLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend, quantize_operand
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext, Sharding
from megatron_fp4.precision.recipe import SLOTS, Gemm, Operand, OperandSlot, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.rounding import WHOLE
from megatron_fp4.quantization.tensor import QuantizedTensor, scale_values
from tests.precision.reference import DY, FP8, MXFP4, NVFP4, QUARTET2, X_46, X, changed
from tests.training.harness import launch, toy_mesh

pytestmark = pytest.mark.usefixtures("mesh")

RECIPES = {
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "fp8": FP8,
    "4/6, signs afresh": changed(NVFP4, fprop_activation=X_46, dgrad_rht=16, rht_signs="fresh"),
    "as fprop": changed(NVFP4, wgrad_activation=replace(X, source="codes"), wgrad_rht=0),
    "by Quartet II": QUARTET2,
    "activations only": Recipe("activations only", Gemm(X), wgrad=Gemm(right=X, rht=16)),
}


def _tensors(tokens: int = 128, inputs: int = 256, outputs: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    return x * torch.rand(inputs, generator=generator).bfloat16(), w, dy * 1e-4


def _run(recipe: Recipe, probe: Probe | None, outputs: int = 128, **context: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = _tensors(outputs=outputs)
    x.requires_grad_()
    w.requires_grad_()
    y = quantized_linear(x, w, LinearContext("a", recipe, StepState(seed=3, step=5), probe=probe, **context))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def _measure(recipe: Recipe, **keywords: Any) -> LinearMeasurement:
    probe = Probe()
    _run(recipe, probe, **keywords)
    return probe.collect(["a"])["a"]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_probe_measures_the_operands_and_products_of_the_linear_without_changing_them(recipe: Recipe) -> None:
    generator, probe, backend = torch.get_rng_state(), Probe(), _RecordingBackend()
    with _measured() as measured:
        y, dx, dw = _run(recipe, probe, backend=backend)
        found = probe.collect(["a"])["a"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dw), _run(recipe, None), strict=True))
    multiplied = dict(zip(SLOTS, backend.multiplied, strict=True))
    assert measured and all(_same(made, multiplied[slot]) for (_, slot), made in measured.items())

    x, w, dy = _tensors()
    tensors = {"fprop_activation": x, "fprop_weight": w, "dgrad_gradient": dy}
    tensors |= {"dgrad_weight": w.t(), "wgrad_gradient": dy.t(), "wgrad_activation": x.t()}
    assert set(found.operands) == {slot.name for slot, operand in recipe.operands.items() if operand.quantized}
    context = LinearContext("a", recipe, StepState(seed=3, step=5))
    for name, statistics in found.operands.items():
        slot = next(slot for slot in SLOTS if slot.name == name)
        rht, operand = recipe.gemms[slot.gemm].rht, recipe[slot]
        assert ("crest_rht" in statistics) == bool(rht)
        if operand.source == "tensor":
            assert statistics["amax"] == tensors[name].abs().max().item()
        else:  # statistics of the decoded codes
            assert statistics["amax"] == pytest.approx(tensors[name].abs().max().item(), rel=0.05)
            assert statistics["rms"] == pytest.approx(tensors[name].double().square().mean().sqrt().item(), rel=0.02)
        if operand.source == "codes" or (rht and recipe.rht_signs == "fresh"):
            continue
        seen = random_hadamard_transform(tensors[name], rht) if rht else tensors[name]
        made = quantize_operand(seen, WHOLE, OperandRequest(operand, key=context.key(5, 0, name)))
        values, exact = made.values.double() * (1.0 if made.scale is None else made.scale.double()), seen.double()
        snr = 10 * torch.log10(exact.square().sum() / (values - exact).square().sum()).item()
        assert statistics["snr_db"] == pytest.approx(snr, abs=0.01)
        zeroed = ((exact != 0) & (values == 0)).double().sum() / (exact != 0).double().sum()
        assert statistics["zeroed"] == pytest.approx(zeroed.item(), abs=1e-9)
        encoded = operand.encode(seen.float(), context.key(5, 0, name) if operand.drawn else None)
        scales = scale_values(encoded.scales).double()
        spread = (scales.amax() / scales[scales > 0].amin()).log2().item()
        assert statistics["scale_spread"] == pytest.approx(spread, abs=1e-6) and spread > 0
        if rht:
            assert statistics["amax_rht"] == pytest.approx(exact.abs().max().item(), rel=2**-7)
    if recipe.wgrad.right.source == "codes":
        assert found.operands["wgrad_activation"] == found.operands["fprop_activation"]

    expected = {}
    for gemm, result, left, right in (("fprop", y, x, w.t()), ("dgrad", dx, dy, w), ("wgrad", dw, dy.t(), x)):
        product = left.double() @ right.double()
        expected[gemm] = ((result.double() - product).norm() / product.norm()).item()
    quantized = {slot.gemm for slot in SLOTS if slot.name in found.operands}
    assert found.errors == pytest.approx({gemm: expected[gemm] for gemm in expected if gemm in quantized}, rel=1e-3)


class _RecordingBackend(EmulatedBackend):
    """Records the operands of the GEMMs, as (`code * block scale`, tensor scale), in the order of `SLOTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: list[tuple[Tensor, Tensor | None]] = []

    def gemm(self, a: Any, b: Any, *settings: Any, **more: Any) -> Tensor:
        self.multiplied += [(operand.unpacked().clone(), operand.scale) for operand in (a, b)]
        return super().gemm(a, b, *settings, **more)


@contextmanager
def _measured() -> Iterator[dict[tuple[str, OperandSlot], tuple[QuantizedTensor, Tensor | None]]]:
    """Inside the context, records what probes encode of each linear's operands, and the unit of each."""
    measured, encode, one = {}, Operand.encode, ProbedCall._operand

    def operand(call: ProbedCall, slot: OperandSlot, x: Tensor, count: int, unit: Tensor | None = None) -> None:
        def encoded(*arguments: Any, **settings: Any) -> QuantizedTensor:
            made = encode(*arguments, **settings)
            measured[call.call.context.name, slot] = made, unit
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Operand, "encode", encoded)
            one(call, slot, x, count, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProbedCall, "_operand", operand)
        yield measured


def _same(measured: tuple[QuantizedTensor, Tensor | None], multiplied: tuple[Tensor, Tensor | None]) -> bool:
    """Whether values and tensor scales are equal bit for bit."""
    (encoded, unit), (values, scale) = measured, multiplied
    own = encoded.decode_scale()
    both = own if unit is None else unit if own is None else own * unit
    same_scale = both is scale is None or (both is not None and scale is not None and torch.equal(both, scale))
    return same_scale and torch.equal(encoded.block_values(), values.float())


def test_padding_is_not_measured() -> None:
    whole = _measure(NVFP4, outputs=128, sharding=Sharding(num_groups=2))
    padded = _measure(NVFP4, outputs=120, sharding=Sharding(num_groups=3))
    _, w, dy = _tensors(outputs=120)  # 40 rows a group, padded to 48
    for name, tensor in (("dgrad_gradient", dy), ("fprop_weight", w)):
        assert padded.operands[name]["rms"] == pytest.approx(tensor.double().square().mean().sqrt().item(), rel=1e-4)
    assert padded.errors == pytest.approx(whole.errors, rel=0.1) and 0.05 < padded.errors["wgrad"] < 0.25


@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("nvfp4", "by Quartet II")])
def test_statistics_of_a_sample_are_near_those_of_the_whole_tensor(recipe: Recipe, monkeypatch) -> None:
    whole = _measure(recipe)
    monkeypatch.setattr(samples, "LARGE", 128 * 128)  # x and W are larger, dy is not
    monkeypatch.setattr(samples, "SAMPLE", 128 * 128)
    monkeypatch.setattr(samples, "_BAND_ROWS", max(16, *(op.block[0] for op in recipe.operands.values())))
    sample = _measure(recipe)
    assert sample.errors == whole.errors
    for name, statistics in whole.operands.items():
        assert sample.operands[name]["snr_db"] == pytest.approx(statistics["snr_db"], abs=0.5)
        assert (sample.operands[name]["snr_db"] == statistics["snr_db"]) == name.endswith("gradient")
        assert sample.operands[name]["amax"] == statistics["amax"]
        assert sample.operands[name]["rms"] == pytest.approx(statistics["rms"], rel=0.2)
        if "amax_rht" in statistics:
            assert sample.operands[name]["amax_rht"] == pytest.approx(statistics["amax_rht"], rel=2**-7)


def _pass(
    probe: Probe, mesh: ParallelMesh, recipe: Recipe, tokens: int, backend: type[EmulatedBackend] = EmulatedBackend
) -> dict[str, QuantizedLinear]:
    """Run `tokens` of this rank forward and backward through two linears, whose full weights are the same on any mesh.
    Returns the linears."""
    generator = torch.Generator().manual_seed(1)
    first, second = ColumnParallelLinear(64, 128, mesh), RowParallelLinear(128, 64, mesh)
    layers: dict[str, QuantizedLinear] = {"blocks.0.first": first, "blocks.0.second": second}
    for dim, (name, layer) in enumerate(layers.items()):
        whole = torch.randn(layer.out_features, layer.in_features, generator=generator) * 0.1
        layer.weight.data._local_tensor.copy_(whole.chunk(mesh.tensor.size, dim)[mesh.tensor.rank])
        layer.context.name, layer.context.recipe, layer.context.backend = name, recipe, backend()
    if mesh.sequence_parallel:
        generator.manual_seed(2 + mesh.tensor.rank)
    with probe.attached({name: layer.context for name, layer in layers.items()}):
        x = torch.randn(tokens, 64, generator=generator).bfloat16().requires_grad_()
        y = second(first(x))
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert all(layer.context.probe is None for layer in layers.values())
    return layers


def _probe_layers(rank: int, tp_size: int) -> dict[str, LinearMeasurement]:
    """Assert that probes encode what linears multiply, also with sequence parallelism; returns their measurements."""
    for recipe in (changed(RECIPES["by Quartet II"], fprop_activation=DY), NVFP4):
        with _measured() as measured:
            layers = _pass(Probe(), toy_mesh(tp_size, tp_size > 1), recipe, 256 // tp_size, _RecordingBackend)
        multiplied = {name: layer.context.backend.multiplied for name, layer in layers.items()}
        # W is measured once if fprop and dgrad share it.
        assert len(measured) == 2 * (len(SLOTS) - (recipe.dgrad.right == recipe.fprop.right))
        for (name, slot), made in measured.items():
            assert _same(made, multiplied[name][SLOTS.index(slot)]), (name, slot)
    probe = Probe()
    return probe.collect(list(_pass(probe, toy_mesh(tp_size), NVFP4, 64)))


@pytest.mark.slow
def test_measurements_do_not_depend_on_the_tensor_parallel_size() -> None:
    single = launch(_probe_layers, 1, 1)[0]
    both = launch(_probe_layers, 2, 2)
    assert both[0] == both[1]
    for name, measurement in single.items():
        # Ranks round their partial sums to BF16 before these are added.
        assert both[0][name].errors == pytest.approx(measurement.errors, rel=0.02)
        for operand, statistics in measurement.operands.items():
            assert both[0][name].operands[operand]["snr_db"] == pytest.approx(statistics["snr_db"], abs=0.1)
            assert both[0][name].operands[operand]["rms"] == pytest.approx(statistics["rms"], rel=0.05)
    assert not math.isnan(single["blocks.0.first"].errors["wgrad"])
