"""Texts on a mesh: those of one process, the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.generation import Continuation, Request, Sampling, Settings, generate, logits_of_all_ids
from megatron_fp4.precision.rng import StepState
from tests.distributed import hybrid
from tests.distributed.hybrid import LAYOUTS, ONE, RECIPES, Layout
from tests.training.harness import alone, launch

pytestmark = pytest.mark.slow

# With sequence parallelism, the tokens of a call of an odd number of rows do not divide; nor do single ones.
PROMPTS = ([5], [1, 2, 3], list(range(40)))
SETTINGS = (Settings(9, piece=16), Settings(9, Sampling(0.9, 0.9, seed=3), stop=11))


def texts(rank: int, layout: Layout) -> tuple[list[list[Continuation]], Tensor]:
    """In both settings, of all prompts together and of one alone; and logits after the prompts."""
    mesh = layout.mesh()
    model = hybrid.sharded_model(layout, mesh, RECIPES["fp32"], StepState(seed=0))
    requests = [Request(prompt) for prompt in PROMPTS]
    found = [generate(model, part, settings) for settings in SETTINGS for part in (requests, requests[:1])]
    cache = model.new_cache(3, 40)
    with torch.no_grad():
        tokens = torch.tensor([prompt + [0] * (40 - len(prompt)) for prompt in PROMPTS])
        logits = model(tokens, cache=cache, counts=[len(prompt) for prompt in PROMPTS])
    return found, logits_of_all_ids(logits, mesh)


@pytest.fixture(scope="module")
def one() -> tuple[list[list[Continuation]], Tensor]:
    with alone():
        return texts(0, ONE)


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_texts_on_a_mesh_are_those_of_one_process(one: tuple[list[list[Continuation]], Tensor], name: str) -> None:
    expected, expected_logits = one
    assert len({tuple(text.tokens) for part in expected for text in part}) > 4
    for found, logits in launch(texts, LAYOUTS[name].world, LAYOUTS[name]):
        assert found == expected
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
