"""Texts on a mesh: those of one process, the same on all ranks; and a run that writes some trains as if it had not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from inference.generation import Continuation, Request, Sampling, Settings, generate, logits_of_all_ids
from inference.prompts import TextSample, text_samples
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import OptimizerConfig, ValidationConfig
from megatron_fp4.precision.plan import build_plan
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.step import train_step
from models.pattern import linear_shapes
from tests.distributed import hybrid
from tests.distributed.hybrid import LAYOUTS, MODEL, ONE, RECIPES, Layout, micro_batches, whole
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


class Letters(TextTokenizer):
    """A character for each id, but for the last four of the model's."""

    kind = "letters"
    vocab_size = MODEL.vocab_size - 4

    def __init__(self) -> None:
        super().__init__("letters", "@", 0, None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) - 64 for character in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        assert max(ids) < self.vocab_size
        return "".join(chr(64 + number) for number in ids if number != self.eod_id)

    def token_id(self, token: str) -> int | None:
        return ord(token) - 64

    def byte_lengths(self) -> np.ndarray:
        return np.ones(self.vocab_size)

    def fingerprint(self) -> str:
        return "letters"


def trained(rank: int, layout: Layout, writes: bool) -> tuple[list[float], dict[str, Tensor], list[list[TextSample]]]:
    """Three steps in NVFP4, with texts after each or without: losses, weights, texts."""
    mesh, step_state = layout.mesh(), StepState(seed=11)
    model = hybrid.sharded_model(layout, mesh, RECIPES["nvfp4"], step_state)
    plan = build_plan(linear_shapes(MODEL), RECIPES["nvfp4"], Bf16BlocksConfig(), MODEL.num_blocks)
    controller = PrecisionController({name: module.context for name, module in model.linears()}, plan, step_state)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    config = ValidationConfig(prompts=["", "A", "HELLO"], prompt_tokens=6)
    sharded = [parameter.placements for parameter in model.parameters()]
    losses, written = [], []
    for step in range(3):
        batches = micro_batches(step, mesh)
        done = train_step(
            model, optimizer, batches, mesh, step_state, step=step, lr=1e-2, clip_norm=1.0, reshard=layout.reshard
        )
        losses.append(done.loss)
        if writes:
            before = step_state.step, step_state.micro_batch, torch.get_rng_state().sum()
            written.append(text_samples(model, controller, Letters(), config, seed=1, progress=Progress()))
            assert (step_state.step, step_state.micro_batch, torch.get_rng_state().sum()) == before
            assert model.training
            assert [parameter.placements for parameter in model.parameters()] == sharded
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}, written


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_a_run_that_writes_texts_trains_the_same(name: str) -> None:
    layout = LAYOUTS[name]
    silent, writing = (launch(trained, layout.world, layout, writes) for writes in (False, True))
    for (losses, weights, _), (same_losses, same_weights, _) in zip(silent, writing, strict=True):
        assert losses == same_losses
        assert all(torch.equal(weight, same_weights[key]) for key, weight in weights.items())
    texts_of_ranks = [texts for *_, texts in writing]
    assert texts_of_ranks[0] == texts_of_ranks[1]
    assert [[sample.prompt for sample in of_step] for of_step in texts_of_ranks[0]] == [["", "A", "HELLO"]] * 3
    assert len({sample.text for of_step in texts_of_ranks[0] for sample in of_step}) > 6
    assert all(len(sample.text) <= 6 for of_step in texts_of_ranks[0] for sample in of_step)
