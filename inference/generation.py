"""Texts continued by a model in memory, many at once: prompts of any lengths, one token a row and call from then on.

All linears compute each token by itself, whatever else is in the batch, as long as no activation is quantized; then a
text depends on its prompt and the draws (sampling.py) alone, but for the rounding of GEMMs of other sizes. That the
linears are such is for the caller to see to (weights.py, in_run.py).

On a mesh all ranks call with the same prompts. They take part in the model's collectives, each holds all the texts, and
the first rank's tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from inference.sampling import GREEDY, NOT_FINITE, Draws, Sampling, choose
from megatron_fp4.parallel.layers import all_gather_tokens
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel


class NotFiniteError(ArithmeticError):
    """The model's logits have NaN or infinity in them."""


@dataclass(frozen=True)
class Request:
    """A text to go on with. tokens: at least one. sample: which of several continuations of the same prompt."""

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
    """How texts go on.

    max_tokens: new ones of each. stop: the token that ends a text; None: nothing does. num_ids: only tokens below are
    chosen, where the model has more ids than its tokenizer; None: all. piece: columns of the prompts that go through
    the model at once.

    Raises ValueError for counts below 1.
    """

    max_tokens: int
    sampling: Sampling = GREEDY
    stop: int | None = None
    num_ids: int | None = None
    piece: int = 512

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("piece", self.piece)):
            if value < 1:
                raise ValueError(f"{name} {value} is less than 1")


def generate(model: HybridModel, requests: Sequence[Request], settings: Settings) -> list[Continuation]:
    """The continuation of every request; errors as of `stream`."""
    found = [Continuation() for _ in requests]
    for tokens in stream(model, requests, settings):
        for continuation, token in zip(found, tokens, strict=True):
            if token is not None:
                continuation.tokens.append(token)
    for continuation in found:
        continuation.ended = len(continuation.tokens) < settings.max_tokens
    return found


def stream(model: HybridModel, requests: Sequence[Request], settings: Settings) -> Iterator[list[int | None]]:
    """The next token of every request, again and again; None for one that has ended.

    Raises ValueError as `check_prompts`, and NotFiniteError.
    """
    mesh, sampling, max_tokens, piece = model.mesh, settings.sampling, settings.max_tokens, settings.piece
    prompts = [list(request.tokens) for request in requests]
    check_prompts(prompts, model.head.weight.shape[0])
    draws = [Draws(sampling.seed, request.sample, prompt) for request, prompt in zip(requests, prompts, strict=True)]
    # The last new token is not looked at by anything.
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_tokens - 1)

    def forward(columns: list[list[int]]) -> Tensor:
        """Logits [b, v] behind each row's last token."""
        counts = [len(column) for column in columns]
        length = max(counts)
        padded = [column + [0] * (length - len(column)) for column in columns]
        with torch.no_grad():
            logits = model(torch.tensor(padded, device=mesh.device), cache=cache, counts=counts)
        return logits_of_all_ids(logits, mesh)[:, : settings.num_ids]

    logits: Tensor | None = None
    for begin in range(0, max(map(len, prompts)), piece):
        columns = [prompt[begin : begin + piece] for prompt in prompts]
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


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError for a prompt without tokens, or with one that a model of `vocab_size` ids does not have."""
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {number} has no tokens; give at least one")
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"prompt {number} has the token {wrong[0]}; the model has ids from 0 to {vocab_size - 1}")


def logits_of_all_ids(logits: Tensor, mesh: ParallelMesh) -> Tensor:
    """[rows, vocab / tp] of this rank's ids -> FP32 [rows, vocab]."""
    if mesh.tp_size > 1:
        logits = all_gather_tokens(logits.t(), mesh).t()
    return logits.to(torch.float32)


def agreed(tokens: list[int], mesh: ParallelMesh) -> list[int]:
    """The first rank's: ranks that went on with different texts would end at different times, and wait for ever."""
    if mesh.world_size == 1:
        return tokens
    sent = torch.tensor(tokens, device=mesh.device)
    dist.broadcast(sent, src=0)
    return sent.tolist()
