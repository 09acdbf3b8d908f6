"""Continued texts, against the whole prefix computed again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from inference.generation import (
    Continuation,
    NotFiniteError,
    Request,
    Sampling,
    Settings,
    TokenDraws,
    choose,
    generate,
    stream,
)
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from tests.models.builders import build, small_config
from tests.models.test_inference_cache import PATTERNS

# Shorter than the convolution is wide, one token, as long as a chunk of the scan (8), longer than one, and longer than
# anything that these models were built for.
LENGTHS = (1, 2, 3, 8, 17, 50)
NEW = 12


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(96, (length,), generator=generator).tolist() for length in lengths]


def recomputed(model: HybridModel, prompt: Sequence[int], settings: Settings, sample: int = 0) -> Continuation:
    """Token by token, each from the whole prefix, without a memory."""
    draws, text = TokenDraws(settings.sampling.seed, sample, prompt), list(prompt)
    for place in range(settings.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([text]))[:, -1, : settings.num_ids]
        (token,) = choose(logits, settings.sampling, [draws(place)])
        if token == settings.stop:
            return Continuation(text[len(prompt) :], ended=True)
        text.append(token)
    return Continuation(text[len(prompt) :])


@pytest.fixture
def hybrid(mesh: ParallelMesh) -> HybridModel:
    return build(small_config(pattern="M-*-M-", init_std=0.3), mesh)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_are_those_of_recomputing(pattern: str, mesh: ParallelMesh) -> None:
    """Whatever pieces of the prompts go through the model at once; greedy, and drawn."""
    model = build(small_config(**PATTERNS[pattern], init_std=0.3), mesh)
    expected = [recomputed(model, prompt, Settings(NEW)) for prompt in prompts()]
    assert len({tuple(continuation.tokens) for continuation in expected}) > 3  # not the same for any prompt
    for piece in (1, 3, 512):
        assert generate(model, [Request(prompt) for prompt in prompts()], Settings(NEW, piece=piece)) == expected
    settings = Settings(NEW, Sampling(0.9, 0.8, seed=4))
    requests = [Request(prompt, sample) for prompt in prompts((1, 9)) for sample in range(3)]
    found = generate(model, requests, settings)
    assert found == [recomputed(model, request.tokens, settings, request.sample) for request in requests]
    assert len({tuple(continuation.tokens) for continuation in found}) == len(requests)


def test_a_text_does_not_depend_on_those_beside_it(hybrid: HybridModel) -> None:
    settings = Settings(NEW, Sampling(1.0, seed=2))
    requests = [Request(prompt) for prompt in prompts()]
    alone = [generate(hybrid, [request], settings)[0] for request in requests]
    assert generate(hybrid, requests, settings) == alone
    assert generate(hybrid, requests[::-1], settings) == alone[::-1]
    assert generate(hybrid, [requests[2]] * 3, settings) == [alone[2]] * 3
    assert generate(hybrid, requests, replace(settings, sampling=Sampling(1.0, seed=5))) != alone


def test_texts_end_where_they_end(hybrid: HybridModel) -> None:
    """At the first stop token, each for itself; the others continue as without it."""
    requests = [Request(prompt) for prompt in prompts()]
    endless = generate(hybrid, requests, Settings(NEW))
    stop = endless[3].tokens[4]
    settings = Settings(NEW, stop=stop)
    found = generate(hybrid, requests, settings)
    for text, without in zip(found, endless, strict=True):
        end = without.tokens.index(stop) if stop in without.tokens else NEW
        assert text == Continuation(without.tokens[:end], ended=end < NEW)
    assert {text.ended for text in found} == {True, False}
    steps = list(stream(hybrid, requests, settings))
    assert [[step[i] for step in steps if step[i] is not None] for i in range(6)] == [text.tokens for text in found]
    # All have ended: nothing more comes, also where that is at once.
    first = generate(hybrid, requests[:1], Settings(1))[0].tokens[0]
    assert list(stream(hybrid, requests[:1], Settings(NEW, stop=first))) == []
    assert generate(hybrid, requests[:1], Settings(NEW, stop=first)) == [Continuation([], ended=True)]


def test_ids_without_a_token_are_not_chosen(hybrid: HybridModel) -> None:
    settings = Settings(NEW, Sampling(3.0), num_ids=7)
    found = generate(hybrid, [Request(prompt) for prompt in prompts()], settings)
    assert max(token for text in found for token in text.tokens) == 6
    assert found[4] == recomputed(hybrid, prompts()[4], settings)


def test_a_model_without_finite_numbers_says_so(hybrid: HybridModel) -> None:
    hybrid.final_norm.weight.data.to_local().fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="not finite"):
        generate(hybrid, [Request([1])], Settings(2))
