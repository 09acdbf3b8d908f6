"""Keys of stochastic rounding in device memory are those of the host, and so are the draws."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_fp4.precision.linear import LinearCall, LinearContext
from megatron_fp4.precision.recipe import BF16, SLOTS
from megatron_fp4.precision.rng import DeviceKeys, StepState, keyed_operands
from megatron_fp4.quantization.rounding import RoundingKey, rounding_draws, rounding_key
from tests.precision.reference import NVFP4


def test_the_table_has_the_key_of_every_operand_step_and_micro_batch() -> None:
    recipes = {"a": NVFP4, "b": BF16, "c": replace(NVFP4, rht_signs="fresh")}
    drawn = ("dgrad_gradient", "wgrad_gradient")
    named = [*(("a", name) for name in drawn), *(("c", name) for name in (*drawn, "wgrad_signs"))]
    assert keyed_operands(recipes) == named
    keys, seen = DeviceKeys(recipes, torch.device("cpu")), set()
    for place in ((11, 0, 0), (11, 1, 3), (11, 70_000, 3)):  # seed, step, micro-batch
        keys.fill(*place)
        for linear, operand in named:
            row = keys.of(linear, operand, RoundingKey(0)).device
            assert row is not None and row.dtype == torch.int32 and row[2:].tolist() == [0, 0]
            assert row.data_ptr() % 16 == keys.table.data_ptr() % 16
            low, high = (value & 0xFFFFFFFF for value in row[:2].tolist())
            assert low + (high << 32) == rounding_key(*place, linear, operand).key
            seen.add((low, high))
    assert len(seen) == 3 * 5


def test_a_linear_asks_the_table_of_the_step_state() -> None:
    step_state = StepState(seed=5, step=2, micro_batch=3)
    context = LinearContext(name="a", recipe=NVFP4, step_state=step_state, out_group_offset=1)
    call = LinearCall(context, torch.zeros(32, 32), torch.zeros(16, 32, dtype=torch.bfloat16))
    on_host = [call.draws(slot) for slot in SLOTS]
    step_state.keys = DeviceKeys({"a": NVFP4}, torch.device("cpu"))
    step_state.keys.fill(step_state.seed, step_state.step, step_state.micro_batch)
    for slot, expected in zip(SLOTS, on_host, strict=True):
        found = call.draws(slot)
        assert found == expected  # offsets too; what lies on the device is no part of it
        if found is not None and expected is not None:
            assert found.device is not None and expected.device is None
            assert torch.equal(rounding_draws(found, 4, 8, "cpu"), rounding_draws(expected, 4, 8, "cpu"))
