"""Texts continued by a model in memory, many at once: prompts of any lengths, one token a row and call from then on.

All linears compute each token by itself, whatever else is in the batch, as long as no activation is quantized; then a
text depends on its prompt and the draws alone, but for the rounding of GEMMs of other sizes. `lower_weights` and
`weights_as_trained` make a loaded model such; prompts.py does it for one that is trained. `TextStream` decodes tokens
while they come, a whole character at a time.

What is drawn for a text is a function of its prompt, the seed, the sample's number and the token's place alone. So a
text does not change with the batch it is in, the machine or the number of ranks, as far as the logits do not.

On a mesh all ranks call with the same prompts. They take part in the model's collectives, each holds all the texts, and
the first rank's tokens count. Shapes: b rows, v ids.
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
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import FPROP_WEIGHT, Gemm, Operand
from models.hybrid import HybridModel

NOT_FINITE = -1
"""The token where logits are not finite."""
# Columns of the prompts that go through the model at once.
_PIECE = 512
# What an unfinished character decodes to.
_REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded with the new ones: tokenizers leave out the space in front of a first word.
_CONTEXT = 64


@dataclass(frozen=True)
class Sampling:
    """temperature: logits are divided by it; 0 takes the likeliest token, of equally likely ones the first.
    top_p: draws are among the likeliest tokens that together have at least this probability. seed: of the draws.

    Raises ValueError for values out of their range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is not a number from 0 on; 0 takes the likeliest token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is not above 0 and at most 1; 1 draws among all tokens")


class TokenDraws:
    """The draws of one text."""

    def __init__(self, seed: int, sample: int, prompt: Sequence[int]) -> None:
        self._key = hashlib.sha256(json.dumps([seed, sample, list(prompt)]).encode())

    def __call__(self, place: int) -> float:
        """Of the token at `place` after the prompt: uniform in [0, 1), 53 bits."""
        digest = self._key.copy()
        digest.update(place.to_bytes(8, "little"))
        return (int.from_bytes(digest.digest()[:8], "little") >> 11) * 2.0**-53


def choose(logits_bv: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """The next token of each row, NOT_FINITE where its logits are not.

    draws: one a row, in [0, 1); with temperature 0 they are not looked at.
    """
    largest, likeliest = logits_bv.max(-1)
    tokens = likeliest.where(largest.isfinite(), NOT_FINITE).tolist()
    if sampling.temperature == 0:
        return tokens
    # On the CPU: there sums do not depend on the machine, and in FP64 not noticeably on their order.
    logits = logits_bv.detach().to("cpu", torch.float64)
    return [
        token if token == NOT_FINITE else _drawn(row, sampling, draw)
        for token, row, draw in zip(tokens, logits, draws, strict=True)
    ]


def _drawn(logits_v: Tensor, sampling: Sampling, draw: float) -> int:
    # The largest first, so that a small temperature does not make infinities.
    probabilities = ((logits_v - logits_v.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p == 1:
        return _place_of(draw, probabilities)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    # Those before which less than top_p lies: the first always.
    kept = int((ordered.cumsum(-1) - ordered < sampling.top_p).sum())
    return int(ids[_place_of(draw, ordered[: max(kept, 1)])])


def _place_of(draw: float, weights: Tensor) -> int:
    """Where a draw falls among weights laid end to end and stretched to 1; never on a weight of zero."""
    ends = weights.cumsum(-1)
    # A draw is at most 1 - 2^-53, so that the product is less than the last end in FP64 too.
    return int(torch.searchsorted(ends, draw * ends[-1], right=True))


class NotFiniteError(ArithmeticError):
    """The model's logits have NaN or infinity in them."""


@dataclass(frozen=True)
class Request:
    """A text to continue. tokens: at least one. sample: which of several continuations of the same prompt."""

    tokens: Sequence[int]
    sample: int = 0


@dataclass
class Continuation:
    """tokens: the new ones, without the one that ended it. ended: whether such a token came before there were enough
    others."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Settings:
    """How texts are continued.

    max_tokens: new ones of each, at least 1. stop: the token that ends a text; None: nothing does. num_ids: only tokens
    below are chosen, where the model has more ids than its tokenizer; None: all. Raises ValueError.
    """

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
    """The continuation of every request; errors as of `stream`. alive: is called for each token."""
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
    """The next token of every request, again and again; None for one that has ended.

    Raises NotFiniteError.
    """
    mesh, sampling, max_tokens = model.mesh, settings.sampling, settings.max_tokens
    prompts = [list(request.tokens) for request in requests]
    vocab_size = model.head.weight.shape[0]
    assert all(prompt and all(0 <= token < vocab_size for token in prompt) for prompt in prompts)
    pairs = zip(requests, prompts, strict=True)
    draws = [TokenDraws(sampling.seed, request.sample, prompt) for request, prompt in pairs]
    # The last new token is not looked at by anything.
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_tokens - 1)

    def forward(columns: list[list[int]]) -> Tensor:
        """Logits [b, v] after each row's last token."""
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
        # A row without tokens here had its last ones before.
        came = torch.tensor([len(column) > 0 for column in columns], device=now.device)
        logits = now if logits is None else now.where(came[:, None], logits)
    assert logits is not None
    going = [True] * len(prompts)
    for place in range(max_tokens):
        tokens = agreed(choose(logits, sampling, [draw(place) for draw in draws]), mesh)
        if any(token == NOT_FINITE and on for token, on in zip(tokens, going, strict=True)):
            raise NotFiniteError("the model's logits are not finite")
        going = [on and token != settings.stop for token, on in zip(tokens, going, strict=True)]
        if not any(going):
            return
        yield [token if on else None for token, on in zip(tokens, going, strict=True)]
        if place + 1 < max_tokens:
            logits = forward([[token] if on else [] for token, on in zip(tokens, going, strict=True)])


def logits_of_all_ids(logits: Tensor, mesh: ParallelMesh) -> Tensor:
    """[rows, vocab / tp] of this rank's ids -> FP32 [rows, vocab]."""
    if mesh.tp_size > 1:
        logits = all_gather_tokens(logits.t(), mesh).t()
    return logits.to(torch.float32)


def agreed(tokens: list[int], mesh: ParallelMesh) -> list[int]:
    """The first rank's: ranks that continue different texts would end at different times, and the others would wait."""
    if mesh.world_size == 1:
        return tokens
    sent = torch.tensor(tokens, device=mesh.device)
    dist.broadcast(sent, src=0)
    return sent.tolist()


def lower_weights(model: HybridModel, dtype: torch.dtype) -> None:
    """Every weight of a model that one process loaded in `dtype`, as the run's forward pass sees them, except those
    that must stay FP32. In FP32 nothing changes; in BF16 they take half the memory."""
    kept = {id(p) for unit in model.fp32_units() for p in unit.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept and parameter.dtype != dtype:
                assert isinstance(parameter, DTensor)
                local = DTensor.from_local(
                    parameter.to_local().detach().to(dtype), parameter.device_mesh, parameter.placements
                )
                module.register_parameter(name, nn.Parameter(local, requires_grad=False))


def weights_as_trained(model: HybridModel, plan: Plan, trained_in: torch.dtype, shards: int) -> int:
    """Let the linears whose weights the plan quantizes in fprop multiply with exactly these codes and scales, and with
    activations that are not quantized, since an activation's maximum ties a token to the batch that it is in.

    trained_in: the run's compute dtype, to which it rounded the masters first. shards: its tensor-parallel size.
    Returns how many linears that are. Raises ValueError, in one line, where the codes do not follow from a checkpoint.
    """
    if trained_in == torch.float32 != model.embedding.dtype:
        raise ValueError("the weights were quantized from FP32: compute in FP32 to have them as they were trained")
    recipes = {row.linear.name: row.recipe for row in plan.rows if row.recipe[FPROP_WEIGHT].quantized}
    for name, recipe in recipes.items():
        problem = None
        if recipe[FPROP_WEIGHT].rounding == "stochastic":
            problem = "weights rounded stochastically, anew each step"
        elif recipe.fprop.rht and recipe.rht_signs == "fresh":
            problem = "weights transformed with the signs of a step"
        elif recipe.amax == "shard" and shards > 1:
            problem = f"a tensor scale for each of {shards} shards (precision.amax=shard), which one process lacks"
        if problem:
            raise ValueError(f"{name} was trained with {problem}: take the masters")
    for name, linear in model.linears():
        if name in recipes:
            recipe = recipes[name]
            gemm = Gemm(Operand(), recipe[FPROP_WEIGHT], recipe.fprop.rht)
            # The same for dgrad, which never runs: what is quantized for both is kept from call to call.
            linear.context.recipe = replace(recipe, fprop=gemm, dgrad=gemm, wgrad=Gemm())
            linear.context.weight_cache = None
            with torch.no_grad():
                local = linear.weight.to_local()  # type: ignore[operator]
                local.copy_(local.to(trained_in))
    return len(recipes)


class TextStream:
    """The text of new tokens after `prompt`, in pieces that joined are the whole: a token may be part of a character,
    and then its text comes with the token that completes it."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._said = len(self._ids)

    def add(self, token: int) -> str:
        """What can be said now; may be empty."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """What is left, with a replacement character for a part of one."""
        return self._new(end=True)

    def _new(self, end: bool) -> str:
        before, now = (self._tokenizer.decode(ids) for ids in (self._ids[: self._said], self._ids))
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not end):
            return ""
        # What has been said now is the context of what follows, and ends with a whole character.
        self._ids = self._ids[self._said :]
        self._said = len(self._ids)
        return now[len(before) :]


def prompt_tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The tokens of a prompt; of an empty one the end of a document, after which another begins.

    Raises ValueError for text that is no Unicode, as a command line in another encoding makes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {text!r} is not UTF-8") from error
    return tokenizer.encode_batch([text])[0] or [tokenizer.eod_id]
