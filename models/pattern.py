"""The letters of `model.pattern`, one row a block type, and what follows from a pattern without building a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_fp4.config.precision_schema import ExceptionConfig
from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.precision.plan import LinearShape
from models.attention import Attention
from models.mamba2 import Mamba2
from models.mixer import Mixer
from models.mlp import MLP

MIXERS: dict[str, type[Mixer]] = {"M": Mamba2, "*": Attention, "-": MLP}


def mixers_of(pattern: str) -> list[type[Mixer]]:
    """The block types in `pattern`, each once, in the table's order."""
    return [mixer for letter, mixer in MIXERS.items() if letter in pattern]


def check_pattern(pattern: str) -> None:
    """Raises ConfigError, naming letter and position, unless `pattern` consists of known block letters."""
    known = ", ".join(f"{letter} ({mixer.name})" for letter, mixer in MIXERS.items())
    if not pattern:
        raise ConfigError(f"model.pattern is empty; give one letter a block: {known}")
    for position, letter in enumerate(pattern):
        if letter not in MIXERS:
            raise ConfigError(
                f"model.pattern={pattern}: {letter!r} at position {position} is no block; use {known}, without spaces"
            )


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for an unknown letter in the pattern, or sizes that do not go together in a block."""
    check_pattern(config.pattern)
    for mixer in mixers_of(config.pattern):
        mixer.check(config)


def check_exceptions(exceptions: Iterable[ExceptionConfig], key: str) -> None:
    """Raise ConfigError for an exception (`precision.exceptions`) with a letter that is no block's."""
    for i, exception in enumerate(exceptions):
        for letter in exception.blocks:
            if letter not in MIXERS:
                raise ConfigError(
                    f"{key}.exceptions[{i}].blocks={exception.blocks} has {letter!r}; block letters are "
                    f"{', '.join(MIXERS)}, and an empty string means all"
                )


def shared_by_tensor_ranks(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Key -> (what tensor-parallel ranks divide among them, the key's value), of a checked configuration."""
    shared = {"model.vocab_size": (config.vocab_size, config.vocab_size)}
    for mixer in reversed(mixers_of(config.pattern)):  # what refuses most often comes first
        shared |= mixer.shared_by_tensor_ranks(config)
    return shared


def linear_shapes(config: ModelConfig) -> list[LinearShape]:
    """Every linear of the blocks, in order of execution: those that a precision plan decides about."""
    return [
        replace(shape, name=f"blocks.{block}.mixer.{shape.name}", block=block, letter=letter)
        for block, letter in enumerate(config.pattern)
        for shape in MIXERS[letter].linears(config)
    ]
