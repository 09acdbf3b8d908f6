"""Generation with a cache against recomputing the whole prefix for each token; sampling against its definition and the
frequencies of many draws; streaming text from tokens. Weights as trained: the codes of the training's forward pass,
with unquantized activations."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
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
    lower_weights,
    prompt_tokens,
    stream,
    weights_as_trained,
)
from megatron_fp4.config.precision_schema import Bf16BlocksConfig, ExceptionConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import Plan, PrecisionController, build_plan
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from models.hybrid import HybridModel
from models.pattern import linear_shapes
from tests.data.test_tokenizer import KINDS
from tests.distributed.hybrid import MXFP8, NVFP4, watched_gemms
from tests.models.builders import build, small_config
from tests.precision.test_plan import exception

PATTERNS = {
    "hybrid": {"pattern": "M-*-M-"},
    "transformer": {"pattern": "*-*-", "rope": True, "num_kv_heads": 1},
    "all Mamba": {"pattern": "MMM", "mamba_num_groups": 1, "mamba_conv_width": 3},
}
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


def test_padding_does_not_overwrite_a_full_cache(mesh: ParallelMesh) -> None:
    model = build(small_config(pattern="*", init_std=0.2), mesh)
    tokens = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = model(tokens)
    cache = model.new_cache(2, 8)
    model(tokens[:, :7], cache=cache, counts=[7, 1])
    logits = model(torch.stack([tokens[0, [7, 0, 0]], tokens[1, 1:4]]), cache=cache, counts=[1, 3])
    torch.testing.assert_close(logits[0], whole[0, 7], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1], whole[1, 3], rtol=0, atol=1e-5)


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


CONFIG = small_config(pattern="M-*-", hidden_dim=64, ffn_dim=64, mamba_state_dim=8, init_std=0.2)
ONE_ROW = replace(NVFP4, fprop=Gemm(NVFP4.fprop.left, Operand("nvfp4", (1, 16))))
TRANSFORMED = replace(ONE_ROW, fprop=replace(ONE_ROW.fprop, rht=16))
RECIPES = {"nvfp4": NVFP4, "nvfp4, sections": NVFP4, "mxfp8": MXFP8, "transformed": TRANSFORMED}
SECTIONS = [exception(["*.in_proj"], "mxfp8", "", "x dt"), exception(["*"], "mxfp8", "", "k")]


def plan_of(recipe: Recipe, exceptions: Sequence[ExceptionConfig] = ()) -> Plan:
    return build_plan(linear_shapes(CONFIG), recipe, Bf16BlocksConfig(last=1), CONFIG.num_blocks, exceptions)


def operands_of_weights(model: HybridModel) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(values, tensor scale) of the quantized weights in the GEMMs of a forward pass, in order."""
    seen = []

    def watch(a: object, b: object) -> None:
        if b.quantized:
            seen.append((b.values.clone(), None if b.scale is None else b.scale.clone()))

    with torch.no_grad(), watched_gemms(watch):
        model(torch.arange(32).view(2, 16))
    return seen


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in RECIPES), ("nvfp4", torch.float32), ("nvfp4, sections", torch.float32)],
)
def test_weights_as_trained_equal_those_of_the_run(mesh: ParallelMesh, name: str, dtype: torch.dtype) -> None:
    """The run computed in BF16, so it quantized masters that were rounded to BF16. Activations are not quantized, so a
    token's result does not depend on the others."""
    plan = plan_of(RECIPES[name], SECTIONS if "sections" in name else ())
    run = build(CONFIG, mesh, torch.bfloat16)
    PrecisionController({n: module.context for n, module in run.linears()}, plan, StepState(seed=0))
    trained = operands_of_weights(run)
    count = 8 if "sections" in name else 6  # of 10 or 8 linears: the last block is in BF16
    assert len(trained) == count

    model = build(CONFIG, mesh, dtype)
    assert weights_as_trained(model, plan, torch.bfloat16, shards=1) == count
    lower_weights(model, dtype)
    stored = {(".ssm." in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert stored == {(True, torch.float32), (False, dtype)}
    for (values, scale), (expected, expected_scale) in zip(operands_of_weights(model), trained, strict=True):
        assert torch.equal(values, expected)
        assert scale is expected_scale is None or torch.equal(scale, expected_scale)
    linear, x = dict(model.linears())["blocks.1.mixer.up_proj"], torch.linspace(-2, 3, 5 * 64).view(5, 64).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(linear(torch.cat((100 * x, x)))[5:], linear(x), rtol=1e-5, atol=1e-5)


STOCHASTIC = replace(NVFP4, fprop=Gemm(Operand(), Operand("nvfp4", (1, 16), "stochastic")))


@pytest.mark.parametrize(
    ("recipe", "shards", "trained_in", "wrong"),
    [
        (STOCHASTIC, 1, torch.bfloat16, "stochastic rounding"),
        (replace(TRANSFORMED, rht_signs="fresh"), 1, torch.bfloat16, "signs of each step"),
        (replace(NVFP4, amax="shard"), 2, torch.bfloat16, "each of 2 shards"),
        (NVFP4, 1, torch.float32, "compute in FP32"),
    ],
)
def test_weights_that_a_checkpoint_does_not_determine_are_refused(
    mesh: ParallelMesh, recipe: Recipe, shards: int, trained_in: torch.dtype, wrong: str
) -> None:
    model = build(CONFIG, mesh, torch.bfloat16)
    with pytest.raises(ValueError, match=wrong):
        weights_as_trained(model, plan_of(recipe), trained_in, shards)
    assert all(module.context.recipe == BF16 for _, module in model.linears())
