"""Model FLOPs and parameter counts, from a `ModelConfig` alone.

A multiplication with its addition counts 2. Per token, forward, with hidden size h:

    attention   2 h (2 q + 2 kv) + 2 S q     q, kv: total width of query and of KV heads; S: sequence length. The second
                                             term is the causal half of the two products with [S, S] matrices.
    FFN         4 h f                        f: FFN width
    Mamba-2     2 h (2 d + 2 G N + H) + 2 d h + 7 d N     d: inner width, G: groups, N: state, H: heads. The last term
                                             is the recurrence's cost (the chunked scan does more arithmetic).
    head        2 h V                        V: vocabulary

Embedding look-up, norms and the convolution are not counted. The backward pass costs twice the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp4.config.schema import ModelConfig


@dataclass(frozen=True)
class LinearCost:
    """One linear: `name` as in `HybridModel.linears()`, `block` its index in the pattern."""

    name: str
    block: int
    out_features: int
    in_features: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features

    @property
    def flops_per_token(self) -> int:
        """Of the forward pass; each of the three GEMMs of training costs as much."""
        return 2 * self.parameters


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of the forward pass, by part. `scores`: attention's products with the [S, S] matrices."""

    linears: int
    scores: int
    scan: int
    head: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.linears + self.scores + self.scan + self.head


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


def linear_costs(config: ModelConfig) -> list[LinearCost]:
    """Every linear of the blocks, in order of execution: those that a precision plan decides about."""
    hidden, inner = config.hidden_dim, config.mamba_inner_dim
    query_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    in_proj_dim = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + config.mamba_num_heads
    shapes = {
        "M": (("in_proj", in_proj_dim, hidden), ("out_proj", hidden, inner)),
        "-": (("up_proj", config.ffn_dim, hidden), ("down_proj", hidden, config.ffn_dim)),
        "*": (("qkv_proj", query_dim + 2 * kv_dim, hidden), ("out_proj", hidden, query_dim)),
    }
    return [
        LinearCost(f"blocks.{block}.mixer.{name}", block, out_features, in_features)
        for block, kind in enumerate(config.pattern)
        for name, out_features, in_features in shapes[kind]
    ]


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> ForwardFlops:
    """Model FLOPs of the forward pass, per token, in sequences of `sequence_length` tokens."""
    return ForwardFlops(
        linears=sum(linear.flops_per_token for linear in linear_costs(config)),
        scores=config.pattern.count("*") * 2 * sequence_length * config.num_query_heads * config.head_dim,
        scan=config.pattern.count("M") * 7 * config.mamba_inner_dim * config.mamba_state_dim,
        head=2 * config.hidden_dim * config.vocab_size,
    )


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of a forward and a backward pass, per token."""
    return 3 * forward_flops_per_token(config, sequence_length).total


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Parameters of the model, all of them trained."""
    conv_channels = config.mamba_inner_dim + 2 * config.mamba_num_groups * config.mamba_state_dim
    mamba_other = conv_channels * (config.mamba_conv_width + 1) + 3 * config.mamba_num_heads + config.mamba_inner_dim
    return ParameterCount(
        embedding=config.vocab_size * config.hidden_dim,
        linears=sum(linear.parameters for linear in linear_costs(config)),
        other=(config.num_blocks + 1) * config.hidden_dim + config.pattern.count("M") * mamba_other,
        head=config.vocab_size * config.hidden_dim,
    )
