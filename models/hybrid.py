"""A language model from a pattern of blocks: embedding, blocks, final norm, head.

Each character of the pattern is one block, `h = h + mixer(norm(h))`:

    M  Mamba-2        models/mamba2.py
    *  attention      models/attention.py
    -  FFN            models/mlp.py
    G  gated FFN      models/mlp.py
    E  experts        models/moe.py             (the table is in models/pattern.py)

The hidden state between blocks is h_td [tokens, hidden] in the compute dtype, tokens = batch * sequence, with the
sequence as the inner dimension. With sequence parallelism each tensor-parallel rank holds a contiguous slice of the
tokens. The first projection of a mixer gathers them and the second scatters them, so mixers see whole sequences.

A sequence holds several documents. If mixers get the document of each token, they keep documents apart
(models/positions.py). Everything between mixers works on single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.parallel.layers import OutputHead, QuantizedLinear, VocabParallelEmbedding
from megatron_fp4.parallel.mesh import ParallelMesh
from models.execution import PLAIN, Execution, contexts_of_decisions, recompute_saved
from models.mixer import Mixer, RMSNorm
from models.pattern import MIXERS, check_model
from models.positions import Documents, NewTokens


class Block(nn.Module):
    """h + mixer(norm(h)); `letter` is the pattern's. Applies `execution.recompute`."""

    def __init__(self, letter: str, config: ModelConfig, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.execution = execution
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, mesh, execution)
        self.mixer: Mixer = MIXERS[letter](config, mesh, execution)

    def forward(
        self,
        h_td: Tensor,
        sequence_length: int,
        documents: Documents | None = None,
        cache: Any = None,
        new: NewTokens | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[tokens (local with sequence parallelism), hidden] -> the same shape; with the mixer's auxiliary loss, if it
        has one. With `new`, the tokens continue the texts in the mixer's `cache`, and there is no such loss."""
        if new is not None:
            return h_td + self.mixer.decode(self.norm(h_td), cache, new)
        recompute = self.execution.recompute
        if recompute == "block" and torch.is_grad_enabled():
            # No generator state is needed: random numbers here depend only on the run's StepState.
            return checkpoint(
                self._forward, h_td, sequence_length, documents,
                use_reentrant=False, preserve_rng_state=False, context_fn=contexts_of_decisions,
            )  # fmt: skip
        with recompute_saved() if recompute == "selective" else nullcontext():
            return self._forward(h_td, sequence_length, documents)

    def _forward(
        self, h_td: Tensor, sequence_length: int, documents: Documents | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        norm = self.execution.recomputed(self.norm.function)
        mixed = self.mixer(norm(h_td, self.norm.local_weight()), sequence_length, documents)
        return h_td + mixed if isinstance(mixed, Tensor) else (h_td + mixed[0], mixed[1])


class InferenceCache:
    """What a model keeps of earlier tokens, so that it can continue a text without computing these again.

        cache = model.new_cache(batch, max_length)
        logits = model(tokens, cache=cache, counts=counts)    each row is a prompt, a part of a prompt, or one token

    A row is a text. Attention keeps keys and values of all tokens, Mamba-2 the last inputs of its convolution and the
    state of its scan (FP32), an FFN nothing (models/mixer.py: `new_cache`, `decode`).

    In row i of a call the first counts[i] columns are tokens and the others padding. Causal mixers do not see padding,
    its keys and values are not kept, and for Mamba-2 it is a step of size zero. So a row's result depends on the other
    rows only through the rounding of GEMMs, whose kernels depend on the number of tokens.

    mixers: the caches of the blocks' mixers. max_length: limit of tokens per row. lengths: tokens of each row so far.
    """

    def __init__(self, mixers: Sequence[Any], batch: int, max_length: int) -> None:
        self.mixers, self.max_length = list(mixers), max_length
        self.lengths = [0] * batch


class HybridModel(nn.Module):
    """The whole model. Parameters are uninitialized until `models.initialization.initialize` has run."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Execution
    ) -> None:
        super().__init__()
        self.mesh, self.execution = mesh, execution
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_dim, mesh, compute_dtype)
        self.blocks = nn.ModuleList(Block(letter, config, mesh, execution) for letter in config.pattern)
        self.final_norm = RMSNorm(config.hidden_dim, config.norm_eps, mesh, execution)
        self.head = OutputHead(config.hidden_dim, config.vocab_size, mesh)
        if execution.recompute == "selective":
            for _, linear in self.linears():
                # Saving the input takes no memory: it is recomputed, or attention saves it as its result anyway.
                linear.context.keeps_input = True

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        num_documents: int | None = None,
        num_targets: int | None = None,
        cache: InferenceCache | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """tokens, targets: int64 [batch, sequence], the same on all tensor-parallel ranks.

        With targets: the mean loss over tokens, FP32, 0-dim, in nats, with the gradient of the sum of this and all
        auxiliary losses. Without: logits [batch, sequence, vocab / tp].

        documents: int32 [batch, sequence], the number of each token's document in its row, ascending from 0; no token
        then sees another document. None: a row is one document. num_documents: of all rows together; without it, fused
        attention copies it from the GPU, a host sync. num_targets: the number of targets that are not negative; the
        mean is over these, and 0 if there are none. None: all targets count.

        cache: the tokens continue the texts in it; of row i the first counts[i] are tokens (None: all). Returns the
        logits of each row's last token, [batch, vocab / tp], without gradients, computed in plain PyTorch.
        """
        if cache is not None:
            return self._decode(tokens, cache, [tokens.shape[1]] * tokens.shape[0] if counts is None else counts)
        row_documents = None if documents is None else Documents(documents, num_documents)
        h_td, auxiliary_losses = self.embedding(tokens), []
        for block in self.blocks:
            h_td = block(h_td, tokens.shape[1], row_documents)
            if isinstance(h_td, tuple):
                h_td, auxiliary_loss = h_td
                auxiliary_losses.append(auxiliary_loss)
        h_td = self.final_norm(h_td)
        if targets is None:
            return self.head(h_td).unflatten(0, tokens.shape)
        head_loss = self.execution.kernel("loss", head_cross_entropy)
        fused, first = self.execution.compiled, self.head.first

        def loss(x_td: Tensor, weight: Tensor | None) -> Tensor:
            return head_loss(x_td, weight, targets.flatten(), first, self.mesh, fused=fused, num_targets=num_targets)

        mean_loss = self.head(h_td, loss=loss)
        if auxiliary_losses:
            # A sequence has the weight of its targets, as in the loss, so that it is the same in any micro-batch.
            counted = (targets >= 0).sum(1) / (targets.numel() if num_targets is None else max(num_targets, 1))
            auxiliary_loss = torch.stack([(each * counted).sum() for each in auxiliary_losses]).sum()
            # Only the gradient: the value stays comparable.
            mean_loss = mean_loss + (auxiliary_loss - auxiliary_loss.detach())
        return mean_loss

    def new_cache(self, batch: int, max_length: int) -> InferenceCache:
        """An empty cache for `batch` texts of at most `max_length` tokens each, on the mesh's device."""
        device, dtype = self.mesh.device, self.embedding.dtype
        mixers = [mixer.new_cache(batch, max_length, device, dtype) for mixer in self.mixers()]
        return InferenceCache(mixers, batch, max_length)

    @torch.no_grad()
    def _decode(self, tokens: Tensor, cache: InferenceCache, counts: Sequence[int]) -> Tensor:
        # Ranks hold equal slices of tokens.
        while self.mesh.sequence_parallel and tokens.numel() % self.mesh.tensor.size:
            tokens = F.pad(tokens, (0, 1))
        lengths = [n + count for n, count in zip(cache.lengths, counts, strict=True)]
        assert max(counts) <= tokens.shape[1] and max(lengths) <= cache.max_length, "a text does not fit the cache"
        new = NewTokens(cache.lengths, counts, tokens.shape[1], tokens.device)
        # Eager, because compiled functions would be compiled again for every shape.
        with torch.compiler.set_stance("force_eager") if self.execution.compiled else nullcontext():
            h_td = self.embedding(tokens)
            for block, mixer_cache in zip(self.blocks, cache.mixers, strict=True):
                h_td = block(h_td, new.length, None, mixer_cache, new)
            logits = self.head(self.final_norm(h_td), new.last)
        cache.lengths = lengths
        return logits

    def linears(self) -> Iterator[tuple[str, QuantizedLinear]]:
        """Name and module of every linear in a precision plan, in order of execution."""
        return ((name, module) for name, module in self.named_modules() if isinstance(module, QuantizedLinear))

    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.blocks]  # type: ignore[union-attr, misc]

    def fp32_units(self) -> list[nn.Module]:
        """The modules whose parameters must stay FP32 in the forward pass."""
        return [unit for mixer in self.mixers() for unit in mixer.fp32_units()]

    def routers(self) -> dict[str, nn.Module]:
        """The routers of all blocks, in order, by the name of the block."""
        return {f"blocks.{i}": router for i, mixer in enumerate(self.mixers()) for router in mixer.routers()}

    def autotuned_mixers(self) -> list[Mixer]:
        """The first mixer of each type that has autotuned kernels."""
        mixers = {type(mixer): mixer for mixer in reversed(self.mixers()) if mixer.autotuned}
        return list(mixers.values())


def build_model(
    config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Execution = PLAIN
) -> HybridModel:
    """The model of `config` with uninitialized parameters, on the default device (such as `torch.device("meta")`).

    compute_dtype: of the hidden state. execution: which kernels it uses, and what it recomputes.
    Raises ConfigError for a pattern with an unknown letter, and for sizes that a block cannot have.
    """
    check_model(config)
    return HybridModel(config, mesh, compute_dtype, execution)
