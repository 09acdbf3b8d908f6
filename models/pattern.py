"""What follows from a model's configuration without building the model.

The table of block types, one row per letter of `model.pattern`; checks; shapes of linears; the kernels of a run;
parameter counts; model FLOPs. Model FLOPs are those of linears and head, of attention's two products with score
matrices [s, s] (the causal half), and of Mamba-2's recurrence (the chunked scan does more arithmetic). A multiply-add
counts as 2, and the backward pass as twice the forward pass. Embedding, norms and the convolution do not count. With
masked documents attention counts as without, so that runs can be compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_fp4.config.precision_schema import ExceptionConfig
from megatron_fp4.config.schema import Config, ConfigError, ModelConfig
from megatron_fp4.precision.plan import LinearShape
from models.attention import Attention
from models.execution import Execution, torch_compile
from models.mamba2 import Mamba2
from models.mixer import Mixer
from models.mlp import MLP, GatedMLP
from models.moe import MoE

# A hundred times the largest models; with more parameters some sizes overflow 64 bits.
_MOST_PARAMETERS = 10**14

MIXERS: dict[str, type[Mixer]] = {"M": Mamba2, "*": Attention, "-": MLP, "G": GatedMLP, "E": MoE}


def mixers_of(pattern: str) -> list[type[Mixer]]:
    """The block types in `pattern`, each once, in the order of `MIXERS`."""
    return [mixer for letter, mixer in MIXERS.items() if letter in pattern]


def blocks_of(config: ModelConfig) -> list[type[Mixer]]:
    """The type of every block of a checked configuration, without those of multi-token prediction."""
    return [MIXERS[letter] for letter in config.main_pattern]


def pattern_of(blocks: Iterable[type[Mixer]]) -> str:
    """The inverse of `blocks_of`."""
    letters = {mixer: letter for letter, mixer in MIXERS.items()}
    return "".join(letters[mixer] for mixer in blocks)


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for an unknown letter in the pattern, or sizes that do not fit together in a block."""
    known = ", ".join(f"{letter} ({mixer.name})" for letter, mixer in MIXERS.items())
    if not config.main_pattern:
        raise ConfigError(f"model.pattern={config.pattern} has no blocks; give one letter per block: {known}")
    for position, letter in enumerate(config.pattern):
        if letter not in MIXERS and letter != "/":
            raise ConfigError(
                f"model.pattern={config.pattern}: {letter!r} at position {position} is no block; use {known}, without "
                "spaces"
            )
    depths = config.mtp_patterns
    if len({*depths, ""}) > 2 or "" in depths:
        raise ConfigError(
            f"model.pattern={config.pattern}: every depth of multi-token prediction has the same blocks, at least one; "
            f"repeat the first, as in {config.main_pattern}/*E/*E"
        )
    if config.mtp_use_repeated_layer and len(depths) < 2:
        raise ConfigError(
            f"model.mtp_use_repeated_layer=true has no effect with {len(depths)} depths of multi-token prediction in "
            f"model.pattern={config.pattern}; add depths, as in {config.main_pattern}/*E/*E, or leave it at false"
        )
    for mixer in mixers_of(config.pattern):
        mixer.check(config)


def check(config: Config) -> None:
    """`check_model`, and raise ConfigError for a model that is too large for any run."""
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
    """Raise ConfigError for an exception (`precision.exceptions`) with an unknown block letter."""
    for i, exception in enumerate(exceptions):
        for letter in exception.blocks:
            if letter not in MIXERS:
                raise ConfigError(
                    f"{key}.exceptions[{i}].blocks={exception.blocks} has {letter!r}; block letters are "
                    f"{', '.join(MIXERS)}, and an empty string means all"
                )


def divided_counts(config: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """By the key of a mesh axis: key of a checked configuration -> (count that the axis's ranks divide among them, the
    key's value)."""
    shared, experts = {"model.vocab_size": (config.vocab_size, config.vocab_size)}, dict[str, tuple[int, int]]()
    for mixer in reversed(mixers_of(config.pattern)):  # the most frequent reasons for a refusal come first
        shared |= mixer.shared_by_tensor_ranks(config)
        experts |= mixer.shared_by_expert_ranks(config)
    if config.mtp_patterns:
        shared["model.hidden_dim"] = (2 * config.hidden_dim, config.hidden_dim)
    return {"tensor": shared, "expert": experts}


def linear_shapes(config: ModelConfig) -> list[LinearShape]:
    """Every linear of the blocks, in order of execution. These are the linears of a precision plan."""
    shapes, hidden = _linears_of_blocks(config, config.main_pattern), config.hidden_dim
    title = "the input projection of multi-token prediction"
    project = LinearShape("eh_proj", 0, 2 * hidden, hidden, "/", "2 x model.hidden_dim", True, title)
    for number, pattern in enumerate(sets := config.mtp_sets):
        first = config.num_blocks + number * len(pattern)
        for shape in (replace(project, block=first), *_linears_of_blocks(config, pattern, first)):
            name, uses = f"mtp.{number}.{shape.name}", len(config.mtp_patterns) // len(sets)
            shapes.append(replace(shape, name=name, uses=uses))
    return shapes


def _linears_of_blocks(config: ModelConfig, pattern: str, first: int = 0) -> list[LinearShape]:
    return [
        replace(shape, name=f"blocks.{block}.mixer.{shape.name}", block=first + block, letter=letter)
        for block, letter in enumerate(pattern)
        for shape in MIXERS[letter].linears(config)
    ]


def choose_execution(config: Config, device_type: str) -> Execution:
    """The execution for `train.kernels` and `train.activation_checkpointing` on `cuda` or `cpu`.

    `torch` is the reference path. `fused` needs CUDA, BF16, Triton and the packages of the model's mixers. `auto` on
    CUDA with BF16 uses each fused kernel that is installed and supports the model's sizes; elsewhere it is `torch`.
    Raises ConfigError if `fused` cannot run.
    """
    train, compute_dtype = config.train, config.precision.compute_dtype
    plain = Execution(recompute=train.activation_checkpointing)
    if train.kernels == "torch":
        return plain
    refusals = []  # why `fused` cannot run; the first reason is reported
    if device_type != "cuda":
        refusals.append(f"needs CUDA, but this run is on {device_type}")
    if compute_dtype != "bfloat16":
        refusals.append(f"computes in BF16, but precision.compute_dtype={compute_dtype}")
    if not _installed("triton"):
        refusals.append("needs Triton: pip install triton")
    kernels = {}
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
    if train.kernels == "fused" and refusals:
        raise ConfigError(f"train.kernels=fused {refusals[0]}; or use auto or torch")
    if device_type != "cuda" or compute_dtype != "bfloat16":
        return plain
    return replace(plain, kernels=kernels, compile=torch_compile if _installed("triton") else None)


def describe_execution(execution: Execution, config: Config) -> str:
    """One line for the log: the kernels of a run."""
    mixers, masked = mixers_of(config.model.pattern), config.data.documents == "masked"
    parts = [line for mixer in mixers for line in mixer.describe_kernels(execution, masked)]
    parts.append(f"norms and activations: {'torch.compile' if execution.compiled else 'torch'}")
    parts.append(f"loss: {'Triton' if execution.compiled else 'torch'}")
    return ", ".join(parts)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def kernel_facts(model: Any, config: Config, device_type: str) -> dict[str, str | None]:
    """Facts for the log: which kernels compute the model, and whether determinism makes it slower."""
    slower = config.run.deterministic and device_type == "cuda"
    return {
        "kernels": describe_execution(model.execution, config),
        "activation checkpointing": model.execution.recompute,
        "determinism": "on; run.deterministic=false is faster" if slower else None,
    }


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs per token of the forward pass in training, in sequences of `sequence_length` tokens."""
    linears = sum(linear.flops_per_token for linear in linear_shapes(config))
    letters, num_heads = config.pattern.replace("/", ""), 1 + len(config.mtp_patterns)
    mixing = sum(MIXERS[letter].flops_per_token(config, sequence_length) for letter in letters)
    return linears + mixing + num_heads * 2 * config.hidden_dim * config.vocab_size


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs per token of a forward and a backward pass."""
    return 3 * forward_flops_per_token(config, sequence_length)


class ParameterCount(NamedTuple):
    """Number of parameters of each part. `other`: norms, convolutions, A_log, D and dt_bias."""

    embedding: int
    linears: int
    other: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


def parameter_count(config: ModelConfig) -> ParameterCount:
    """The number of parameters of the model; all are trained."""
    letters = config.main_pattern + "".join(config.mtp_sets)
    norms = (len(letters) + 1 + 3 * len(config.mtp_sets)) * config.hidden_dim
    return ParameterCount(
        embedding=config.vocab_size * config.hidden_dim,
        linears=sum(linear.parameters for linear in linear_shapes(config)),
        other=norms + sum(MIXERS[letter].other_parameters(config) for letter in letters),
        head=config.vocab_size * config.hidden_dim,
    )


def active_parameters(config: ModelConfig) -> int:
    """The number of parameters that a token uses: of the experts those that it passes; the embedding counts."""
    idle = sum(linear.parameters - round(linear.parameters * linear.active) for linear in linear_shapes(config))
    return parameter_count(config).total - idle


def parts(model: Any, config: Config) -> list[tuple[str, int, int]]:
    """The model's parts: name, how many there are, and their number of parameters."""
    counts, pattern = parameter_count(config.model), config.model.main_pattern
    rows = [("embedding", 1, counts.embedding)]
    for letter, mixer in MIXERS.items():
        blocks = [block for block, its_letter in zip(model.blocks, pattern, strict=True) if its_letter == letter]
        if blocks:
            num_parameters = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            rows.append((f"{mixer.name} blocks", len(blocks), num_parameters))
    rows += [("final norm", 1, config.model.hidden_dim), ("head", 1, counts.head)]
    if model.mtp:
        num_parameters = sum(parameter.numel() for parameter in model.mtp.parameters())
        rows.append(("multi-token prediction", len(model.mtp), num_parameters))
    return rows
