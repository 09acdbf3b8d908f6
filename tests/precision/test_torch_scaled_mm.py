"""The backend `torch` against the emulation: operands bit for bit, products up to the order of accumulation.

A CPU cannot multiply such codes: a stand-in for the GEMM decodes its arguments (tests/quantization/cublas.py).
"""

import pytest
import torch

from megatron_fp4.precision import torch_scaled_mm as backend
from megatron_fp4.precision import verify
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.support import first_refusal
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.verify import Case
from tests.precision import reference as ref
from tests.quantization import cublas

# The recipes that it can compute.
RECIPES = {name: recipe for name, recipe in ref.RECIPES.items() if first_refusal("torch", recipe, "bfloat16") is None}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(backend, "scaled_mm", cublas.scaled_mm)


def inputs_for(recipe: Recipe, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """`shape` with input features, which are not padded, of the recipe's multiple."""
    inputs = EMULATED.alignment(recipe).inputs
    return shape[0], -(-shape[1] // inputs) * inputs, shape[2]


def faults(name: str, shape: tuple[int, int, int], num_groups: int = 1) -> list[str]:
    case = Case(*inputs_for(RECIPES[name], shape), num_groups, RECIPES[name])
    return [str(finding) for finding in verify.check(TorchBackend(), case, torch.device("cpu")) if finding.fault]


@pytest.mark.parametrize("name", RECIPES)
def test_operands_have_the_bits_of_the_reference_and_products_agree(name):
    """The self-test compares operands and draws bit for bit, and NaN; linears agree up to the order of accumulation."""
    recipe = RECIPES[name]
    assert faults(name, (64, 96, 120), num_groups=3) == []
    for shape in ((48, 80, 208), (37, 16, 9)):
        assert faults(name, shape) == []
        x, w, dy = ref.tensors(*inputs_for(recipe, shape))
        x, dy = x.bfloat16(), dy.bfloat16()
        found = ref.run(x, w, dy, ref.context_of(recipe, backend=TorchBackend()))
        for actual, expected in zip(found, ref.specified(x, w, dy, ref.context_of(recipe)), strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6 * expected.abs().max().item())
