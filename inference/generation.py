"""Generates text with a model in memory: many prompts of any lengths in a batch, then one token per row and call.

Without quantized activations a linear computes each token independently of the rest of the batch. Then a text depends
only on its prompt and the random draws, up to the rounding of GEMMs. `lower_weights` and `weights_as_trained` prepare a
loaded model for this, prompts.py a model in training. `TextStream` decodes tokens one by one into complete characters.

A random draw is a function of the prompt, the seed, the number of the sample and the position of the token. So a text
does not depend on its batch, the machine or the number of ranks, as long as the logits are equal.

On a mesh all ranks must call with the same prompts, because they take part in the model's collectives. Each rank gets
all texts, with rank 0's tokens. Shapes: b rows, v ids.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.tokenizer import TextTokenizer
from megatron_fp4.parallel.layers import all_gather_tokens
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import Plan, split_contexts
from megatron_fp4.precision.recipe import FPROP_WEIGHT, Gemm, Operand
from megatron_fp4.training.build import planned_linears
from models.hybrid import HybridModel

NOT_FINITE = -1
"""The token of a row whose logits are not finite."""
# Prompts go through the model in pieces of this length.
_PIECE = 512
# An incomplete character decodes to this.
_REPLACEMENT = "\ufffd"
# How many tokens of the prompt to decode with the new ones: tokenizers remove the space before a first word.
_CONTEXT = 64


@dataclass(frozen=True)
class Sampling:
    """temperature: logits are divided by it; 0 takes the most likely token (of equal ones, the first). top_p: draw from
    the most likely tokens that together have at least this probability. seed: of the draws.

    Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is not 0 or more; 0 takes the most likely token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is not above 0 and at most 1; 1 draws from all tokens")


class TokenDraws:
    """The random numbers of one text."""

    def __init__(self, seed: int, sample: int, prompt: Sequence[int]) -> None:
        self._key = hashlib.sha256(json.dumps([seed, sample, list(prompt)]).encode())

    def __call__(self, place: int) -> float:
        """The number for the token at `place` after the prompt: uniform in [0, 1), 53 bits."""
        digest = self._key.copy()
        digest.update(place.to_bytes(8, "little"))
        return (int.from_bytes(digest.digest()[:8], "little") >> 11) * 2.0**-53


def choose(logits_bv: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """The next token of each row; NOT_FINITE if not finite. draws: one per row, in [0, 1)."""
    largest, likeliest = logits_bv.max(-1)
    tokens = likeliest.where(largest.isfinite(), NOT_FINITE).tolist()
    if sampling.temperature == 0:
        return tokens
    # On the CPU, where sums do not depend on the machine, and in FP64, where their order hardly matters.
    logits = logits_bv.detach().to("cpu", torch.float64)
    return [
        token if token == NOT_FINITE else _drawn(row, sampling, draw)
        for token, row, draw in zip(tokens, logits, draws, strict=True)
    ]


def _drawn(logits_v: Tensor, sampling: Sampling, draw: float) -> int:
    # Subtract the largest first, so that a small temperature does not give infinities.
    probabilities = ((logits_v - logits_v.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p == 1:
        return _place_of(draw, probabilities)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    # Keep a token if the ones before it have less than top_p together; the first is always kept.
    kept = int((ordered.cumsum(-1) - ordered < sampling.top_p).sum())
    return int(ids[_place_of(draw, ordered[: max(kept, 1)])])


def _place_of(draw: float, weights: Tensor) -> int:
    """The index that a draw in [0, 1) selects with these weights; never one with weight zero."""
    ends = weights.cumsum(-1)
    # A draw is at most 1 - 2^-53, so the product is less than the last end in FP64 too.
    return int(torch.searchsorted(ends, draw * ends[-1], right=True))


class NotFiniteError(ArithmeticError):
    """The model's logits have NaN or infinity."""


@dataclass(frozen=True)
class Request:
    """A text to continue. tokens: at least one. sample: the number of this continuation of the same prompt."""

    tokens: Sequence[int]
    sample: int = 0


@dataclass
class Continuation:
    """tokens: the new ones, without the stop token. ended: whether a stop token came before max_tokens."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Settings:
    """How texts are continued. max_tokens: new tokens of each text, at least 1. stop: the token that ends a text; None:
    none does. num_ids: choose only tokens below it, if the model has more ids than its tokenizer; None: all."""

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: int | None = None
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} is less than 1")


def generate(
    model: HybridModel, requests: Sequence[Request], settings: Settings, alive: Callable[[], None] = lambda: None
) -> list[Continuation]:
    """The continuation of every request. Raises as `stream` does. alive: called after each token."""
    found = [Continuation() for _ in requests]
    for tokens in stream(model, requests, settings):
        alive()
        for continuation, token in zip(found, tokens, strict=True):
            if token is not None:
                continuation.tokens.append(token)
    for continuation in found:
        continuation.ended = len(continuation.tokens) < settings.max_tokens
    return found


def stream(model: HybridModel, requests: Sequence[Request], settings: Settings) -> Iterator[list[int | None]]:
    """Lists with the next token of every request; None for a request that has ended. Raises NotFiniteError."""
    mesh, sampling, max_tokens = model.mesh, settings.sampling, settings.max_tokens
    prompts = [list(request.tokens) for request in requests]
    vocab_size = model.head.weight.shape[0]
    assert all(prompt and all(0 <= token < vocab_size for token in prompt) for prompt in prompts)
    pairs = zip(requests, prompts, strict=True)
    draws = [TokenDraws(sampling.seed, request.sample, prompt) for request, prompt in pairs]
    # The last new token does not go through the model.
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_tokens - 1)

    def forward(columns: list[list[int]]) -> Tensor:
        """Logits [b, v] at each row's last token."""
        counts = [len(column) for column in columns]
        length = max(counts)
        padded = [column + [0] * (length - len(column)) for column in columns]
        with torch.no_grad():
            logits = model(torch.tensor(padded, device=mesh.device), cache=cache, counts=counts)
        return logits_of_all_ids(logits, mesh)[:, : settings.num_ids]

    logits: Tensor | None = None
    for begin in range(0, max(map(len, prompts)), _PIECE):
        columns = [prompt[begin : begin + _PIECE] for prompt in prompts]
        now = forward(columns)
        # A row without tokens in this piece keeps the logits of its last piece.
        has_tokens = torch.tensor([len(column) > 0 for column in columns], device=now.device)
        logits = now if logits is None else now.where(has_tokens[:, None], logits)
    assert logits is not None
    active = [True] * len(prompts)
    for place in range(max_tokens):
        tokens = from_first_rank(choose(logits, sampling, [draw(place) for draw in draws]), mesh)
        if any(token == NOT_FINITE and is_active for token, is_active in zip(tokens, active, strict=True)):
            raise NotFiniteError("the model's logits are not finite")
        active = [is_active and token != settings.stop for token, is_active in zip(tokens, active, strict=True)]
        if not any(active):
            return
        yield [token if is_active else None for token, is_active in zip(tokens, active, strict=True)]
        if place + 1 < max_tokens:
            logits = forward([[token] if is_active else [] for token, is_active in zip(tokens, active, strict=True)])


def logits_of_all_ids(logits: Tensor, mesh: ParallelMesh) -> Tensor:
    """This rank's logits [rows, vocab / tp] -> FP32 [rows, vocab]."""
    if mesh.tensor.size > 1:
        logits = all_gather_tokens(logits.t(), mesh).t()
    return logits.to(torch.float32)


def from_first_rank(tokens: list[int], mesh: ParallelMesh) -> list[int]:
    """Rank 0's tokens. With different tokens, ranks would end at different times, and the others would hang."""
    if mesh.world_size == 1:
        return tokens
    sent = torch.tensor(tokens, device=mesh.device)
    dist.broadcast(sent, src=0)
    return sent.tolist()


def lower_weights(model: HybridModel, dtype: torch.dtype) -> None:
    """Convert the weights of a model in one process to `dtype`, to which the run's forward pass rounds them, except
    those that must stay FP32. BF16 takes half the memory of FP32."""
    kept = {id(p) for unit in model.fp32_units() for p in unit.parameters()}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in kept and weight.dtype != dtype:
                assert isinstance(weight, DTensor)
                local = DTensor.from_local(weight.to_local().detach().to(dtype), weight.device_mesh, weight.placements)
                module.register_parameter(name, nn.Parameter(local, requires_grad=False))


def weights_as_trained(model: HybridModel, plan: Plan, trained_in: torch.dtype, shards: int) -> int:
    """Make the linears whose weights the plan quantizes in fprop multiply with the same codes and scales as in
    training. Activations are not quantized: their amax would make a token depend on the rest of the batch.

    trained_in: the run's compute dtype, to which it rounded the masters first. shards: its tensor-parallel size.
    Returns the number of these linears. Raises ValueError, in one line, if a checkpoint does not determine the codes.
    """
    if trained_in == torch.float32 != model.embedding.dtype:
        raise ValueError("the weights were quantized from FP32, so compute in FP32 to get the weights of training")
    recipes = {row.linear.name: row.recipe for row in plan.rows if row.recipe[FPROP_WEIGHT].quantized}
    for name, recipe in recipes.items():
        problem = None
        if recipe[FPROP_WEIGHT].rounding == "stochastic":
            problem = "stochastic rounding of weights, which differs in each step"
        elif recipe.fprop.rht and recipe.rht_signs == "fresh":
            problem = "random signs of each step in the transform of weights"
        elif recipe.amax == "shard" and shards > 1:
            problem = f"a tensor scale for each of {shards} shards (precision.amax=shard), not for one process"
        if problem:
            raise ValueError(f"{name} was trained with {problem}: use the master weights")
    modules = planned_linears(model, plan)
    contexts = split_contexts({name: module.context for name, module in modules.items()}, plan)
    for name, recipe in recipes.items():
        gemm = Gemm(Operand(), recipe[FPROP_WEIGHT], recipe.fprop.rht)
        # The same for dgrad, though it never runs: a weight quantized for both is cached between calls.
        contexts[name].recipe = replace(recipe, fprop=gemm, dgrad=gemm, wgrad=Gemm())
        contexts[name].weight_cache = None
        with torch.no_grad():
            for rows in contexts[name].sharding.strips_of(modules[name.partition("[")[0]].weight.to_local()):
                rows.copy_(rows.to(trained_in))
    return len(recipes)


class TextStream:
    """Decodes new tokens after `prompt` one by one. The pieces joined are the complete text. A token may be a part of a
    character; its text then comes with the token that completes the character."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._num_decoded = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token; returns the new text, which may be empty."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """The rest of the text, with a replacement character for an incomplete character."""
        return self._new(end=True)

    def _new(self, end: bool) -> str:
        before, now = (self._tokenizer.decode(ids) for ids in (self._ids[: self._num_decoded], self._ids))
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not end):
            return ""
        # These tokens end with a complete character and are the context of the next ones.
        self._ids = self._ids[self._num_decoded :]
        self._num_decoded = len(self._ids)
        return now[len(before) :]


def prompt_tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The tokens of a prompt, after the token that begins the documents of the data, if there is one; of an empty
    prompt without it the end-of-document token, after which a new document begins.

    Raises ValueError for text that is not UTF-8; the shell may have another encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {text!r} is not UTF-8") from error
    return [*tokenizer.ids_before, *tokenizer.encode_batch([text])[0]] or [tokenizer.eod_id]
