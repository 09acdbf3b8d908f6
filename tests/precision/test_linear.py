import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fp4.precision import emulated, torch_scaled_mm
from megatron_fp4.precision.linear import quantized_linear, split_linear
from megatron_fp4.precision.operands import LinearContext, Sharding
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import DeviceKeys, StepState, keyed_operands
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.quantization import hadamard, rounding
from megatron_fp4.quantization.rounding import RoundingKey, random_bits, rounding_key
from tests.precision import reference as ref
from tests.quantization import cublas

RECIPES = ref.RECIPES
FIXED = [name for name, recipe in RECIPES.items() if recipe.rht_signs == "fixed"]


def relative(actual: torch.Tensor, expected: np.ndarray) -> float:
    """The largest error, relative to the largest value."""
    return float(np.abs(ref.double(actual) - expected).max() / np.abs(expected).max())


def test_the_gradient_of_a_bf16_weight_is_fp32_without_a_rounding_to_bf16():
    x, w, dy = ref.tensors(64, 32, 48, dtype=torch.bfloat16)
    for recipe in (BF16, ref.nearest(ref.NVFP4)):
        y, dx, dw = ref.run(x, w, dy, ref.context_of(recipe))
        assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        expected = ref.linear(*(ref.double(t) for t in (x, w, dy)), recipe)
        assert relative(dw, expected[2]) < 2e-6
        assert (dw.bfloat16().float() != dw).float().mean() > 0.9
        assert relative(y, expected[0]) < 2.0**-8
        assert relative(dx, expected[1]) < 2.0**-8


@pytest.mark.parametrize("name", FIXED)
def test_every_gemm_is_the_product_of_the_decoded_operands(name):
    """Rounded to nearest; compared with double precision on the oracle's codes."""
    recipe = ref.nearest(RECIPES[name])
    x, w, dy = ref.tensors(128, 128, 256)
    expected = ref.linear(*(ref.double(t) for t in (x, w, dy)), recipe)
    for actual, exact in zip(ref.run(x, w, dy, ref.context_of(recipe)), expected, strict=True):
        assert actual.dtype == torch.float32
        assert relative(actual, exact) < 2e-6


@pytest.mark.parametrize(
    ("name", "signs", "dtype"),
    [
        *((name, RECIPES[name].rht_signs, torch.bfloat16) for name in RECIPES),
        *((f"nvfp4, {name}", "fresh", torch.bfloat16) for name in ("transforms of 16", "codes quantized again")),
        *(("nvfp4, every transform", signs, torch.float32) for signs in ("fixed", "none", "fresh")),
    ],
)
def test_the_emulation_has_the_bits_of_the_specification(name, signs, dtype):
    """Including padding, and draws and signs of each micro-batch, also for weights. Only GEMMs of two BF16 tensors may
    accumulate in another order."""
    recipe = replace(RECIPES[name], rht_signs=signs)
    context = ref.context_of(recipe)
    x, w, dy = ref.tensors(40, 128, 72, dtype=dtype)
    for context.step_state.step, context.step_state.micro_batch in ((4, 2), (4, 3)):
        found, expected = ref.run(x, w, dy, context), ref.specified(x, w, dy, context)
        for mine, theirs, gemm in zip(found, expected, recipe.gemms.values(), strict=True):
            assert mine.dtype == theirs.dtype
            if gemm.quantized or dtype == torch.float32:
                assert torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs)


def test_tensor_scales_have_no_lower_bound():
    """Gradients multiplied by a power of two give results multiplied by it."""
    x, w, dy = ref.tensors(64, 64, 64)
    plain = ref.run(x, w, dy, ref.context_of(ref.NVFP4))
    for exponent in (-90, 90):
        scaled = ref.run(x, w, dy * 2.0**exponent, ref.context_of(ref.NVFP4))
        for now, then in zip(plain[1:], scaled[1:], strict=True):
            assert relative(then, ref.double(now) * 2.0**exponent) < 1e-6


@pytest.mark.parametrize("recipe, num_groups, group_rows", [(BF16, 1, 32), (ref.NVFP4, 3, 20)], ids=["bf16", "nvfp4"])
def test_later_micro_batches_add_to_the_gradient_in_place(recipe, num_groups, group_rows):
    x, w, dy = ref.tensors(32, 48, num_groups * group_rows)
    context = ref.context_of(recipe, num_groups=num_groups)

    def gradient(micro_batch: int, weight: torch.Tensor) -> torch.Tensor:
        context.step_state.micro_batch = micro_batch
        quantized_linear(x, weight, context).backward(dy)
        assert weight.grad is not None
        return weight.grad

    alone = [gradient(micro_batch, w.clone().requires_grad_()) for micro_batch in range(3)]
    weight = w.clone().requires_grad_()
    first = gradient(0, weight)
    address = first.data_ptr()
    assert torch.equal(first, alone[0])
    for micro_batch in (1, 2):
        assert gradient(micro_batch, weight).data_ptr() == address
    assert torch.equal(gradient(0, w.clone().requires_grad_()), alone[0])
    assert weight.grad is not None and torch.equal(weight.grad, alone[0] + alone[1] + alone[2])


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(
    ("recipe", "native"),
    [*((recipe, False) for recipe in (ref.NVFP4, ref.QUARTET2, ref.MXFP8, BF16)), (ref.NVFP4, True)],
)
def test_a_split_projection_has_the_bits_of_separate_linears(recipe, native, num_groups, monkeypatch):
    """Which have the names, the recipes and the rows of its parts; over two micro-batches that add their gradients."""
    monkeypatch.setattr(emulated.EmulatedBackend, "accumulates", False)  # separate GEMMs would round once
    sections = ("z", 20), ("x", 40), ("dt", 8)
    x, w, dy = ref.tensors(40, 128, 68 * num_groups, dtype=torch.bfloat16)
    monkeypatch.setattr(torch_scaled_mm, "scaled_mm", cublas.scaled_mm)
    context = ref.context_of(ref.NVFP4, num_groups=num_groups, backend=TorchBackend() if native else emulated.EMULATED)
    state, row = context.step_state, torch.arange(68 * num_groups)
    parts = context.part((sections[1],), sections), context.part(sections[::2], sections)
    context.parts = replace(parts[0], name="of x", recipe=recipe), replace(parts[1], name="of z and dt")
    in_x = (row % 68 >= 20) & (row % 68 < 60)
    rows = row[in_x], row[~in_x]
    separate = [
        LinearContext(part.name, part.recipe, state, part.backend, Sharding(num_groups=num_groups))
        for part in context.parts
    ]
    weight, weights, inputs = w.clone().requires_grad_(), [w[at].requires_grad_() for at in rows], []
    for state.micro_batch in range(2):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        ys = split_linear(ours, weight, context)
        expected = [quantized_linear(theirs, *of) for of in zip(weights, separate, strict=True)]
        assert all(torch.equal(*pair) for pair in zip(ys, expected, strict=True))
        torch.autograd.backward(ys, [dy[:, at] for at in rows])
        torch.autograd.backward(expected, [dy[:, at] for at in rows])
        inputs.append((ours.grad, theirs.grad))
    assert all(torch.equal(*pair) for pair in inputs) and weight.grad.dtype == torch.float32
    assert all(torch.equal(weight.grad[at], each.grad) for at, each in zip(rows, weights, strict=True))


@pytest.mark.parametrize(
    ("name", "num_groups", "group_rows"),
    [("nvfp4", 2, 20), ("mxfp4, square weights", 4, 8), ("all the way", 1, 50), ("nvfp4", 3, 16)],
)
def test_groups_of_output_features_are_padded_to_whole_blocks(name, num_groups, group_rows):
    recipe = ref.nearest(RECIPES[name])
    multiple = 32 if name.startswith("mxfp4") else 16
    padded_rows = -(-group_rows // multiple) * multiple
    x, w, dy = ref.tensors(64, 64, num_groups * group_rows)
    keep = np.concatenate([np.arange(group_rows) + i * padded_rows for i in range(num_groups)])
    w_padded, dy_padded = np.zeros((num_groups * padded_rows, 64)), np.zeros((64, num_groups * padded_rows))
    w_padded[keep], dy_padded[:, keep] = ref.double(w), ref.double(dy)
    y, dx, dw = ref.linear(ref.double(x), w_padded, dy_padded, recipe)
    actual = ref.run(x, w, dy, ref.context_of(recipe, num_groups=num_groups))
    for result, expected in zip(actual, (y[:, keep], dx, dw[keep]), strict=True):
        assert result.shape == expected.shape
        assert relative(result, expected) < 2e-6


# ----------------------------------------------------------------------------------------- draws, signs and kept codes


@pytest.mark.parametrize("recipe", [ref.NVFP4, ref.QUARTET2], ids=lambda recipe: recipe.name)
def test_the_backward_pass_uses_the_step_and_micro_batch_of_its_forward_pass(recipe):
    """For draws and signs, also of operands made from forward codes: with several micro-batches in flight the StepState
    has advanced before the backward pass."""
    x, w, dy = ref.tensors(128, 128, 128)
    expected = ref.run(x, w, dy, ref.context_of(recipe))
    context = ref.context_of(recipe)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = quantized_linear(x, w, context)
    context.step_state.micro_batch, context.step_state.step = 5, 6
    y.backward(dy)
    assert torch.equal(x.grad, expected[1]) and torch.equal(w.grad, expected[2])
    # Another step has other draws: the weight's kept codes are the same, but not what is made from them.
    again = ref.run(x, w, dy, context)
    assert torch.equal(again[0], expected[0])
    assert not torch.equal(again[1], expected[1]) and not torch.equal(again[2], expected[2])


@pytest.mark.parametrize("recipe", [replace(ref.NVFP4, rht_signs="fresh"), ref.ALL_THE_WAY, ref.QUARTET2])
def test_a_draw_depends_on_seed_step_micro_batch_linear_operand_and_element(recipe, monkeypatch):
    """No two draws have the same bits."""
    draws: dict[bytes, torch.Tensor] = {}  # both operands of a GEMM have the same signs

    def recorded(*arguments):
        bits = random_bits(*arguments)
        draws[bits.numpy().tobytes()] = bits
        return bits

    for module in (rounding, hadamard):
        monkeypatch.setattr(module, "random_bits", recorded)
    size = 128 if recipe.wgrad.rht == 128 else 16
    tensors = ref.tensors(size, size, size)
    for seed, name in itertools.product((1, 2), "ab"):
        context = replace(ref.context_of(recipe), name=name, step_state=StepState(seed))
        for context.step_state.step, context.step_state.micro_batch in itertools.product(range(2), range(2)):
            ref.run(*tensors, context)
    assert len(draws) == 2 * 2 * 2 * 2 * len(keyed_operands({"a": recipe}))
    bits = torch.cat([each.flatten() for each in draws.values()])
    assert len(bits.unique()) == len(bits)


def test_the_table_in_device_memory_has_the_hosts_key_of_every_operand_step_and_micro_batch() -> None:
    recipes = {"a": ref.NVFP4, "b": BF16, "c": replace(ref.NVFP4, rht_signs="fresh")}
    drawn = ("dgrad_gradient", "wgrad_gradient")
    named = [*(("a", name) for name in drawn), *(("c", name) for name in (*drawn, "wgrad_signs"))]
    assert keyed_operands(recipes) == named
    keys, seen = DeviceKeys(recipes, torch.device("cpu"), experts={"c"}), set()
    for place in ((11, 0, 0), (11, 1, 3), (11, 70_000, 3)):  # seed, step, micro-batch
        keys.fill(*place)
        for linear, operand in named:
            row = keys.of(linear, operand, RoundingKey(0)).device
            assert row is not None and row.dtype == torch.int32 and row[2:].tolist() == [0, 0]
            assert row.data_ptr() % 16 == keys.table.data_ptr() % 16
            low, high = (value & 0xFFFFFFFF for value in row[:2].tolist())
            seed, step, micro_batch = place if linear == "a" else (*place[:2], 0)
            assert low + (high << 32) == rounding_key(seed, step, micro_batch, linear, operand).key
            seen.add((low, high))
        assert keys.micro_batch.item() == place[2]
    assert len(seen) == 3 * 5
