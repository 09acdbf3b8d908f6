"""Generation with a cache against recomputing the whole prefix for each token; sampling against its definition and the
frequencies of many draws; streaming text from tokens."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2

from data.tokenizer import load_tokenizer, train_tokenizer
from inference.generation import (
    NOT_FINITE,
    Continuation,
    NotFiniteError,
    Request,
    Sampling,
    Settings,
    TextStream,
    TokenDraws,
    choose,
    generate,
    prompt_tokens,
    stream,
)
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from tests.data.test_tokenizer import KINDS
from tests.models.builders import build, small_config
from tests.models.test_inference_cache import PATTERNS

# One token; shorter than the width of the convolution; as long as a chunk of the scan (8), and longer; longer than the
# sequences of these models.
LENGTHS = (1, 2, 3, 8, 17, 50)
NEW = 8


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(96, (length,), generator=generator).tolist() for length in lengths]


def recomputed(model: HybridModel, prompt: Sequence[int], settings: Settings, sample: int = 0) -> Continuation:
    """A continuation without a cache: each token is computed from the whole prefix."""
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
def test_texts_equal_those_without_a_cache(pattern: str, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for greedy and sampled texts, whatever else is in the batch, and for prompts in pieces of any size."""
    model = build(small_config(**PATTERNS[pattern], init_std=0.3), mesh)
    expected = [recomputed(model, prompt, Settings(NEW)) for prompt in prompts()]
    assert len({tuple(continuation.tokens) for continuation in expected}) > 3  # they depend on the prompt
    for piece in (1, 3, 512):
        monkeypatch.setattr("inference.generation._PIECE", piece)
        assert generate(model, [Request(prompt) for prompt in prompts()], Settings(NEW)) == expected
    settings = Settings(NEW, Sampling(0.9, 0.8, seed=4))
    requests = [Request(prompt, sample) for prompt in prompts((1, 9)) for sample in range(3)]
    found = generate(model, requests, settings)
    assert found == [recomputed(model, request.tokens, settings, request.sample) for request in requests]
    assert len({tuple(continuation.tokens) for continuation in found}) == len(requests)


def test_each_text_ends_at_its_first_stop_token(hybrid: HybridModel) -> None:
    """The other texts of the batch continue unchanged."""
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
    # A text may end at once.
    first = generate(hybrid, requests[:1], Settings(1))[0].tokens[0]
    assert list(stream(hybrid, requests[:1], Settings(NEW, stop=first))) == []
    assert generate(hybrid, requests[:1], Settings(NEW, stop=first)) == [Continuation([], ended=True)]


def test_ids_above_num_ids_are_not_chosen(hybrid: HybridModel) -> None:
    settings = Settings(NEW, Sampling(3.0), num_ids=7)
    found = generate(hybrid, [Request(prompt) for prompt in prompts()], settings)
    assert max(token for text in found for token in text.tokens) == 6
    assert found[4] == recomputed(hybrid, prompts()[4], settings)


def test_a_model_with_nonfinite_logits_raises(hybrid: HybridModel) -> None:
    hybrid.final_norm.weight.data.to_local().fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="not finite"):
        generate(hybrid, [Request([1])], Settings(2))


LOGITS = [0.3, -1.0, 2.0, 2.0, 0.0, -5.0, 1.2, 2.5]


def probabilities(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """Top-p by its definition: the most likely tokens (ties: the lower id), until their sum reaches top_p."""
    weights = [math.exp(value / temperature) for value in logits]
    shares = [weight / sum(weights) for weight in weights]
    kept, together = [], 0.0
    for token in sorted(range(len(shares)), key=lambda token: (-shares[token], token)):
        if together >= top_p:
            break
        kept.append(token)
        together += shares[token]
    return [share / together if token in kept else 0.0 for token, share in enumerate(shares)]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.3, 0.9), (2.5, 1.0), (1.0, 1e-9)])
def test_frequencies_are_the_probabilities(temperature: float, top_p: float) -> None:
    """Pearson's statistic over 1,500 draws is small, and tokens outside of top-p are never drawn."""
    expected = probabilities(LOGITS, temperature, top_p)
    sampling = Sampling(temperature, top_p, seed=1)
    draws = TokenDraws(sampling.seed, 0, [1, 2, 3])
    found = Counter(choose(torch.tensor([LOGITS]), sampling, [draws(place)])[0] for place in range(1500))
    assert all(expected[token] > 0 for token in found)
    possible = [(found[token], 1500 * share) for token, share in enumerate(expected) if share > 0]
    statistic = sum((seen - want) ** 2 / want for seen, want in possible)
    degrees = len(possible) - 1
    assert statistic <= chi2.isf(1e-5, degrees) if degrees else statistic == 0


def test_zero_and_small_temperatures_take_the_most_likely_token() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    assert choose(logits, Sampling(), [0.9, 0.9]) == [7, 0]
    assert choose(logits, Sampling(1e-300), [0.9, 0.9]) == [7, 0]
    assert choose(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(), [0.0]) == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9)])
def test_rows_with_nonfinite_logits_are_marked(sampling: Sampling) -> None:
    rows = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [-math.inf, 0.0]])
    assert choose(rows, sampling, [0.5] * 4) == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]


def test_draws_depend_on_prompt_seed_sample_and_position() -> None:
    kinds = [(seed, sample, prompt) for seed in (0, 1) for sample in (0, 1) for prompt in ([1, 2], [12])]
    drawn = {TokenDraws(*kind)(place) for kind in kinds for place in range(20)}
    assert len(drawn) == len(kinds) * 20 and all(0 <= draw < 1 for draw in drawn)
    assert TokenDraws(0, 1, [12])(3) == TokenDraws(0, 1, (12,))(3)
    mean = sum(TokenDraws(0, 0, [1])(place) for place in range(2000)) / 2000
    assert abs(mean - 0.5) < 5 / math.sqrt(12 * 2000)


TEXT = "def naïve(): return '日本語 🙂 é' # 🇩🇪 ok\n\n"


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_pieces_join_to_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(KINDS[kind][0](tmp_path))
    text = "return argument + 5 def function_3(argument):" if tokenizer.kind == "sentencepiece" else TEXT
    ids = tokenizer.encode_batch([text])[0]
    for cut in range(len(ids)):
        stream, before = TextStream(tokenizer, ids[:cut]), tokenizer.decode(ids[:cut])
        pieces = [stream.add(token) for token in ids[cut:]]
        if "\ufffd" not in before:
            assert "\ufffd" not in "".join(pieces)  # only complete characters
            assert stream.end() == ""
            assert before + "".join(pieces) == tokenizer.decode(ids)


def test_random_tokens_stream_to_their_decoded_text() -> None:
    """Random tokens have incomplete characters and special tokens. A piece comes with the token that completes it."""
    tokenizer, generator = train_tokenizer(["abc"], 300), random.Random(0)
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode_batch(["a🙂b"])[0]] == ["a", "", "", "", "🙂", "b"]
    for _ in range(30):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(40)]
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.add, ids), stream.end()]) == tokenizer.decode(ids)
    assert prompt_tokens(tokenizer, "") == [tokenizer.eod_id]
    with pytest.raises(ValueError, match="is not UTF-8"):
        prompt_tokens(tokenizer, "a\udcff")
