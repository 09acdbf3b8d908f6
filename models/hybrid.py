"""A language model from a pattern of blocks: embedding, blocks, final norm, head.

Each character of the pattern is one block, `h = h + mixer(norm(h))`:

    M  Mamba-2        models/mamba2.py
    *  attention      models/attention.py
    -  FFN            models/mlp.py

The hidden state between blocks is token-major, h_td [tokens, hidden] in the compute dtype, tokens = batch * sequence
with the sequence inside. With sequence parallelism each tensor-parallel rank holds a contiguous slice of the tokens;
a mixer's first projection gathers them and its second scatters them again, so mixers see whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.collectives import enter_tensor_parallel
from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.parallel.layers import OutputHead, QuantizedLinear, VocabParallelEmbedding
from megatron_fp4.parallel.mesh import ParallelMesh
from models.attention import Attention
from models.execution import PLAIN, Execution
from models.mamba2 import Mamba2, SSMParameters
from models.mlp import MLP
from models.norm import RMSNorm

MIXERS: dict[str, type[Mamba2] | type[Attention] | type[MLP]] = {"M": Mamba2, "*": Attention, "-": MLP}


class Block(nn.Module):
    """h + mixer(norm(h)); `kind` is the pattern's character."""

    def __init__(self, kind: str, config: ModelConfig, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, mesh, execution)
        self.mixer = MIXERS[kind](config, mesh, execution)
        self.recompute_all = execution.recompute == "block"

    def forward(self, h_td: Tensor, sequence_length: int) -> Tensor:
        """[tokens (local with sequence parallelism), hidden] -> the same."""
        # A module that FSDP2 gathers by itself: it must not be entered again in the middle of the backward pass.
        inputs = (self.mixer.ssm(),) if isinstance(self.mixer, Mamba2) else ()
        if self.recompute_all and torch.is_grad_enabled():
            # Nothing is drawn from a generator here: what is random depends on the run's clock alone.
            return checkpoint(
                self._forward, h_td, sequence_length, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(h_td, sequence_length, *inputs)

    def _forward(self, h_td: Tensor, sequence_length: int, *inputs: tuple[Tensor, ...]) -> Tensor:
        # Through the mixer's own `recompute`, whose first linear is given the result.
        x_td = self.mixer.recompute.cheap(self.norm.function, h_td, self.norm.local_weight())
        return h_td + self.mixer(x_td, sequence_length, *inputs)


class HybridModel(nn.Module):
    """The whole model. Parameters are uninitialized until `models.initialization.initialize` has run."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Execution
    ) -> None:
        super().__init__()
        self.mesh, self.execution = mesh, execution
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_dim, mesh, compute_dtype)
        self.blocks = nn.ModuleList(Block(kind, config, mesh, execution) for kind in config.pattern)
        self.final_norm = RMSNorm(config.hidden_dim, config.norm_eps, mesh, execution)
        self.head = OutputHead(config.hidden_dim, config.vocab_size, mesh)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: int64 [batch, sequence], the same on all tensor-parallel ranks.

        With targets: the mean loss over tokens, FP32, 0-dim, in nats. Without: logits [batch, sequence, vocab / tp].
        """
        h_td = self.embedding(tokens)
        for block in self.blocks:
            h_td = block(h_td, tokens.shape[1])
        h_td = self.final_norm(h_td)
        if targets is None:
            return self.head(h_td).unflatten(0, tokens.shape)
        h_td = enter_tensor_parallel(h_td, self.mesh)
        head, fused = self.head, self.execution.compiled
        return head_cross_entropy(h_td, head.weight, targets.flatten(), head.first, self.mesh, fused=fused)

    def linears(self) -> Iterator[tuple[str, QuantizedLinear]]:
        """Name and module of every linear that a precision plan decides about, in order of execution."""
        for name, module in self.named_modules():
            if isinstance(module, QuantizedLinear):
                yield name, module

    def fp32_units(self) -> list[nn.Module]:
        """The modules whose parameters must stay FP32 in the forward pass."""
        return [module for module in self.modules() if isinstance(module, SSMParameters)]


def build_model(
    config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Execution = PLAIN
) -> HybridModel:
    """The model of `config` with uninitialized parameters, on the default device (try `torch.device("meta")`).

    compute_dtype: of the hidden state. execution: which kernels, and what is recomputed.
    Raises ValueError for a pattern with an unknown letter and for sizes that do not divide.
    """
    check_pattern(config.pattern)
    return HybridModel(config, mesh, compute_dtype, execution)


def check_pattern(pattern: str) -> None:
    """Raises ValueError, naming letter and position, unless `pattern` consists of known block letters."""
    if not pattern:
        raise ValueError("model.pattern is empty: give at least one of M (Mamba-2), - (FFN), * (attention)")
    for position, letter in enumerate(pattern):
        if letter not in MIXERS:
            raise ValueError(
                f"model.pattern={pattern!r} has {letter!r} at position {position}: "
                "block letters are M (Mamba-2), - (FFN) and * (attention)"
            )
