"""What follows from a model's configuration without building it.

The letters of `model.pattern`, one row a block type; checks; shapes of linears; which kernels a run computes with;
parameter counts and model FLOPs: those of linears and head, of attention's two products with [S, S] matrices (the
causal half), and of Mamba-2's recurrence (the chunked scan does more arithmetic). A multiplication with its addition
counts 2, the backward pass twice the forward pass; embedding, norms and the convolution do not count. Where documents
are masked, attention counts as if they were not: runs could not be compared otherwise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_fp4.config.precision_schema import ExceptionConfig
from megatron_fp4.config.schema import Config, ConfigError, ModelConfig
from megatron_fp4.precision.plan import LinearShape
from models.attention import Attention
from models.execution import Execution, torch_compile
from models.mamba2 import Mamba2
from models.mixer import Mixer
from models.mlp import MLP

# A hundred times the largest model that is trained; beyond it sizes leave 64 bits somewhere.
_MOST_PARAMETERS = 10**14

MIXERS: dict[str, type[Mixer]] = {"M": Mamba2, "*": Attention, "-": MLP}


def mixers_of(pattern: str) -> list[type[Mixer]]:
    """The block types in `pattern`, each once, in the table's order."""
    return [mixer for letter, mixer in MIXERS.items() if letter in pattern]


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for an unknown letter in the pattern, or sizes that do not go together in a block."""
    known = ", ".join(f"{letter} ({mixer.name})" for letter, mixer in MIXERS.items())
    if not config.pattern:
        raise ConfigError(f"model.pattern is empty; give one letter a block: {known}")
    for position, letter in enumerate(config.pattern):
        if letter not in MIXERS:
            raise ConfigError(
                f"model.pattern={config.pattern}: {letter!r} at position {position} is no block; use {known}, without "
                "spaces"
            )
    for mixer in mixers_of(config.pattern):
        mixer.check(config)


def check(config: Config) -> None:
    """Raise ConfigError for a model that cannot be: `check_model`, and a size that must be a mistake."""
    model = config.model
    check_model(model)
    counts = parameter_count(model)
    if counts.total > _MOST_PARAMETERS:
        part, count = max(counts._asdict().items(), key=lambda item: item[1])
        raise ConfigError(
            f"model={model.name} has {counts.total:,} parameters, {count:,} of them in its {part}, more than any run "
            f"can hold ({_MOST_PARAMETERS:.0e}); lower model.hidden_dim={model.hidden_dim} or what it is multiplied by"
        )


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


def choose_execution(config: Config, device_type: str) -> Execution:
    """The execution for `train.kernels` and `train.activation_checkpointing` on `cuda` or `cpu`.

    `torch` is the reference path. `fused` needs CUDA, BF16, Triton and the packages of the model's mixers. `auto` is
    `fused` on CUDA with BF16, as far as what it needs is installed and takes the model's sizes, and `torch` elsewhere.
    Raises ConfigError for `fused` where it cannot run.
    """
    train, compute_dtype = config.train, config.precision.compute_dtype
    plain = Execution(recompute=train.activation_checkpointing)
    if train.kernels == "torch":
        return plain
    general = None if _installed("triton") else "needs Triton: pip install triton"
    if compute_dtype != "bfloat16":
        general = f"computes in BF16, and precision.compute_dtype={compute_dtype}"
    if device_type != "cuda":
        general = f"needs CUDA, and this run is on {device_type}"
    kernels, refusals = {}, [general]
    for mixer in mixers_of(config.model.pattern):
        for kernel in mixer.fused:
            if _installed(kernel.package.replace("-", "_")):
                refusal = kernel.refusal(config.model, config.parallel.tensor)
            else:
                install = f"pip install --no-build-isolation {kernel.package}"
                refusal = f"needs {kernel.package} for {mixer.name}'s {kernel.title}: {install}"
            if refusal is None:
                kernels[kernel.part] = kernel.function
            elif not kernel.optional:
                refusals.append(refusal)
    if train.kernels == "fused" and (refusal := next(filter(None, refusals), None)) is not None:
        raise ConfigError(f"train.kernels=fused {refusal}; or use auto or torch")
    if device_type != "cuda" or compute_dtype != "bfloat16":
        return plain
    return replace(plain, kernels=kernels, compile=torch_compile if _installed("triton") else None)


def agreed_execution(execution: Execution) -> Execution:
    """`execution`, if all ranks chose alike; a collective. Raises ConfigError if they did not."""
    executions: list[Execution] = [execution] * dist.get_world_size()
    dist.all_gather_object(executions, execution)
    used = [{*chosen.kernels, *(["compiled"] if chosen.compiled else [])} for chosen in executions]
    for rank, parts in enumerate(used):
        if parts != used[0]:
            raise ConfigError(
                f"train.kernels=auto: ranks 0 and {rank} have not the same fused parts, as to "
                f"{', '.join(sorted(parts ^ used[0]))}; install the same packages on all machines, or choose "
                "train.kernels=torch"
            )
    return execution


def describe_execution(execution: Execution, config: Config) -> str:
    """One line for the log: what computes the blocks of a run."""
    mixers, masked = mixers_of(config.model.pattern), config.data.documents == "masked"
    parts = [line for mixer in mixers for line in mixer.describe_kernels(execution, masked)]
    parts.append(f"norms and activations: {'torch.compile' if execution.compiled else 'torch'}")
    parts.append(f"loss: {'Triton' if execution.compiled else 'torch'}")
    return ", ".join(parts)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def kernel_facts(model: Any, config: Config, device_type: str) -> dict[str, str | None]:
    """Which kernels compute the model, and what determinism costs there: for people."""
    slower = config.run.deterministic and device_type == "cuda"
    return {
        "kernels": describe_execution(model.execution, config),
        "activation checkpointing": model.execution.recompute,
        "determinism": "on; run.deterministic=false is faster" if slower else None,
    }


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of the forward pass, per token, in sequences of `sequence_length` tokens."""
    linears = sum(linear.flops_per_token for linear in linear_shapes(config))
    mixing = sum(MIXERS[letter].flops_per_token(config, sequence_length) for letter in config.pattern)
    return linears + mixing + 2 * config.hidden_dim * config.vocab_size


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of a forward and a backward pass, per token."""
    return 3 * forward_flops_per_token(config, sequence_length)


class ParameterCount(NamedTuple):
    """Numbers of parameters, by part. `other`: norms, convolutions, A_log, D and dt_bias."""

    embedding: int
    linears: int
    other: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Parameters of the model, all of them trained."""
    norms = (config.num_blocks + 1) * config.hidden_dim
    return ParameterCount(
        embedding=config.vocab_size * config.hidden_dim,
        linears=sum(linear.parameters for linear in linear_shapes(config)),
        other=norms + sum(MIXERS[letter].other_parameters(config) for letter in config.pattern),
        head=config.vocab_size * config.hidden_dim,
    )


def parts(model: Any, config: Config) -> list[tuple[str, int, int]]:
    """What the model consists of: name, number and parameters, in the order of the forward pass."""
    counts, pattern = parameter_count(config.model), config.model.pattern
    rows = [("embedding", 1, counts.embedding)]
    for letter, mixer in MIXERS.items():
        if own := [block for block, of in zip(model.blocks, pattern, strict=True) if of == letter]:
            numel = sum(parameter.numel() for block in own for parameter in block.parameters())
            rows.append((f"{mixer.name} blocks", len(own), numel))
    return [*rows, ("final norm", 1, config.model.hidden_dim), ("head", 1, counts.head)]
