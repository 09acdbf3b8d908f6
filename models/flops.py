"""Model FLOPs and parameter counts, from a `ModelConfig` alone.

A multiplication with its addition counts 2. Per token, forward, with hidden size h:

    attention   2 h (2 q + 2 kv) + 2 S q     q, kv: total width of query and of KV heads; S: sequence length. The second
                                             term is the causal half of the two products with [S, S] matrices.
    FFN         4 h f                        f: FFN width
    Mamba-2     2 h (2 d + 2 G N + H) + 2 d h + 7 d N     d: inner width, G: groups, N: state, H: heads. The last term
                                             is the recurrence's cost (the chunked scan does more arithmetic).
    head        2 h V                        V: vocabulary

Embedding look-up, norms and the convolution are not counted. The backward pass costs twice the forward pass. Where
documents are masked, attention counts as if they were not: what is left out would differ from batch to batch, and runs
could not be compared by it. With short documents and long sequences the reported TFLOP/s are then too high.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp4.config.schema import ConfigError, ModelConfig
from models.pattern import MIXERS, linear_shapes


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of the forward pass, by part. `mixing`: attention's products with the [S, S] matrices, scans."""

    linears: int
    mixing: int
    head: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.linears + self.mixing + self.head


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, by part. `other`: norms, convolutions, A_log, D and dt_bias."""

    embedding: int
    linears: int
    other: int
    head: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.embedding + self.linears + self.other + self.head


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> ForwardFlops:
    """Model FLOPs of the forward pass, per token, in sequences of `sequence_length` tokens."""
    return ForwardFlops(
        linears=sum(linear.flops_per_token for linear in linear_shapes(config)),
        mixing=sum(MIXERS[letter].flops_per_token(config, sequence_length) for letter in config.pattern),
        head=2 * config.hidden_dim * config.vocab_size,
    )


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of a forward and a backward pass, per token."""
    return 3 * forward_flops_per_token(config, sequence_length).total


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Parameters of the model, all of them trained."""
    return ParameterCount(
        embedding=config.vocab_size * config.hidden_dim,
        linears=sum(linear.parameters for linear in linear_shapes(config)),
        other=(config.num_blocks + 1) * config.hidden_dim
        + sum(MIXERS[letter].other_parameters(config) for letter in config.pattern),
        head=config.vocab_size * config.hidden_dim,
    )


# A hundred times the largest model that anybody trains; beyond it sizes leave 64 bits somewhere.
_MOST_PARAMETERS = 10**14


def check_size(config: ModelConfig) -> None:
    """Raise ConfigError for a model, checked otherwise, that nobody can have meant."""
    counts = parameter_count(config)
    if counts.total > _MOST_PARAMETERS:
        part, count = max(vars(counts).items(), key=lambda item: item[1])
        raise ConfigError(
            f"model={config.name} has {counts.total:,} parameters, {count:,} of them in its {part}, more than any run "
            f"can hold ({_MOST_PARAMETERS:.0e}); lower model.hidden_dim={config.hidden_dim} or what it is multiplied by"
        )
