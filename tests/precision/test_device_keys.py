"""The table of keys in device memory has the same keys as the host."""

from dataclasses import replace

import torch

from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import DeviceKeys, keyed_operands
from megatron_fp4.quantization.rounding import RoundingKey, rounding_key
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
