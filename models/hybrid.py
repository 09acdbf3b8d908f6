"""A language model from a pattern of blocks: embedding, blocks, final norm, head.

Each character of the pattern is one block, `h = h + mixer(norm(h))`; models/pattern.py has the table of mixers.

The hidden state between blocks is h_td [tokens, hidden] in the compute dtype, tokens = batch * sequence, with the
sequence as the inner dimension. With sequence parallelism each tensor-parallel rank holds a contiguous slice of the
tokens. The first projection of a mixer gathers them and the second scatters them, so mixers see whole sequences.

Multi-token prediction (MTP) is what follows each `/` of the pattern. Depth k = 1, 2, ... has token t + k, too, and
predicts the token after it (DeepSeek-V3, arXiv:2412.19437, section 2.2; Megatron's multi_token_prediction.py):

    h_k = norm(blocks(W [norm(embedding of token t + k); norm(h_(k-1))]))
    loss = loss_0 + mtp_loss_scaling_factor / depths * sum_k loss_k

h_0 is after the final norm, as in Megatron (hybrid_block.py: HybridStack.forward ends with it). Embedding and head are
the model's own. Every use of them returns an FP32 gradient, which autograd adds up over depths and micro-batches: a sum
in BF16 made Nemotron 3 Ultra diverge. Only training computes MTP.

A sequence holds several documents. If mixers get the document of each token, they keep documents apart
(models/positions.py). Everything between mixers works on single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel import layers
from megatron_fp4.parallel.cross_entropy import head_cross_entropy
from megatron_fp4.parallel.mesh import ParallelMesh
from models.execution import PLAIN, Execution, contexts_of_decisions, recompute_saved
from models.initialization import Rule
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


def _through(
    blocks: Iterable[nn.Module], h_td: Tensor, sequence_length: int, documents: Documents | None
) -> tuple[Tensor, list[Tensor]]:
    """The hidden state after `blocks`, and their auxiliary losses, each FP32 [sequences]."""
    auxiliary_losses = list[Tensor]()
    for block in blocks:
        h_td = block(h_td, sequence_length, documents)
        if isinstance(h_td, tuple):
            h_td, auxiliary_loss = h_td
            auxiliary_losses.append(auxiliary_loss)
    return h_td, auxiliary_losses


class _PairProjection(layers.RowParallelLinear):
    """The projection of embedding and hidden state, 2 hidden -> hidden."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__(2 * config.hidden_dim, config.hidden_dim, mesh)
        self.std = config.init_std

    def initial_values(self) -> dict[str, Rule]:
        return {"weight": lambda draws: draws.normal(self.std)}

    def forward(self, x_td: Tensor) -> Tensor:
        """[tokens (local with sequence parallelism), 2 hidden] -> [tokens (local), hidden]; ranks have all features."""
        x_td, size = layers.enter_tensor_parallel(x_td, self.mesh), self.in_features // self.mesh.tensor.size
        return super().forward(x_td.narrow(1, self.mesh.tensor.rank * size, size).contiguous())


class MTP(nn.Module):
    """One set of weights of multi-token prediction. Its parts have Megatron's names.

    If it serves several depths, these share the draws of stochastic rounding of a micro-batch, and their gradients add
    up in FP32.
    """

    def __init__(self, pattern: str, config: ModelConfig, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_dim, config.norm_eps, mesh, execution)
        self.enorm, self.hnorm, self.eh_proj = norm(), norm(), _PairProjection(config, mesh)
        self.blocks = nn.ModuleList(Block(letter, config, mesh, execution) for letter in pattern)
        self.final_norm = norm()

    def forward(
        self, h_td: Tensor, embedding_td: Tensor, sequence_length: int, documents: Documents | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden state of a depth, from that of the depth before and the embedding of a token further, and the
        auxiliary losses of its blocks."""
        pair_td = torch.cat((self.enorm(embedding_td), self.hnorm(h_td)), -1)
        h_td, auxiliary_losses = _through(self.blocks, self.eh_proj(pair_td), sequence_length, documents)
        return self.final_norm(h_td), auxiliary_losses


def one_further(tokens: Tensor, targets: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the next depth: each position has the token and the target of the position after it, int64 [batch, sequence].

    A target does not count (-1) if it is beyond the sequence, or if between the position and it there is the end of a
    document or a target that does not count. The token beyond the sequence is 0, as in Megatron; no target that counts
    depends on it.
    """
    counts = targets >= 0
    if documents is not None:
        counts = counts & (documents == F.pad(documents[:, 1:], (0, 1), value=-1))
    further = F.pad(targets[:, 1:], (0, 1), value=-1)
    return F.pad(tokens[:, 1:], (0, 1)), further.masked_fill(~counts, -1)


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
    """The whole model. Parameters are uninitialized until `models.initialization.initialize` has run.

    mtp_losses: if it is not None, a forward pass in training adds of each depth of multi-token prediction the sum of
    the losses and the number of the targets that count, FP64 [depths, 2].
    """

    mtp_losses: Tensor | None = None

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Execution
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.execution = config, mesh, execution
        self.embedding = layers.VocabParallelEmbedding(config.vocab_size, config.hidden_dim, mesh, compute_dtype)
        self.blocks = nn.ModuleList(Block(letter, config, mesh, execution) for letter in config.main_pattern)
        self.final_norm = RMSNorm(config.hidden_dim, config.norm_eps, mesh, execution)
        self.head = layers.OutputHead(config.hidden_dim, config.vocab_size, mesh)
        self.mtp = nn.ModuleList(MTP(pattern, config, mesh, execution) for pattern in config.mtp_sets)
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

        With targets: the mean loss over tokens, FP32, 0-dim, in nats, with the gradient of the sum of this, those of
        multi-token prediction and all auxiliary losses. Without: logits [batch, sequence, vocab / tp].

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
        h_td, auxiliary_losses = _through(self.blocks, self.embedding(tokens), tokens.shape[1], row_documents)
        h_td = self.final_norm(h_td)
        if targets is None:
            return self.head(h_td).unflatten(0, tokens.shape)
        mean_loss, others = self._loss(h_td, targets, num_targets), list[Tensor]()
        if self.mtp and torch.is_grad_enabled():
            others, further_losses = self._further_losses(h_td, tokens, targets, documents, row_documents, num_targets)
            auxiliary_losses += further_losses
        if auxiliary_losses:
            # A sequence has the weight of its targets, as in the loss, so that it is the same in any micro-batch.
            counted = (targets >= 0).sum(1) / (targets.numel() if num_targets is None else max(num_targets, 1))
            others += [(loss * counted).sum() for loss in auxiliary_losses]
        if others:
            # Only the gradient: the value stays comparable.
            other_loss = torch.stack(others).sum()
            mean_loss = mean_loss + (other_loss - other_loss.detach())
        return mean_loss

    def _loss(self, h_td: Tensor, targets: Tensor, num_targets: int | None) -> Tensor:
        head_loss = self.execution.kernel("loss", head_cross_entropy)
        fused, first = self.execution.compiled, self.head.first

        def loss(x_td: Tensor, weight: Tensor | None) -> Tensor:
            return head_loss(x_td, weight, targets.flatten(), first, self.mesh, fused=fused, num_targets=num_targets)

        mean_loss: Tensor = self.head(h_td, loss=loss)
        return mean_loss

    def _further_losses(
        self, h_td: Tensor, tokens: Tensor, targets: Tensor, documents: Tensor | None,
        row_documents: Documents | None, num_targets: int | None,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """The weighted loss of each depth of multi-token prediction, and the auxiliary losses of their blocks."""
        # The main loss's number, of which the host knows, and with which a target has the same weight in any
        # micro-batch. Megatron divides by the depth's own number, which is smaller by k in a sequence at depth k.
        number = targets.numel() if num_targets is None else num_targets
        depths = len(self.config.mtp_patterns)
        losses, auxiliary_losses = list[Tensor](), list[Tensor]()
        for depth in range(depths):
            tokens, targets = one_further(tokens, targets, documents)
            part, embedding_td = self.mtp[depth % len(self.mtp)], self.embedding(tokens)
            h_td, its_losses = part(h_td, embedding_td, tokens.shape[1], row_documents)
            # Blocks that are used for several depths have the mean of their losses, as in Megatron.
            auxiliary_losses += [loss * len(self.mtp) / depths for loss in its_losses]
            loss = self._loss(h_td, targets, number)
            losses.append(loss * (self.config.mtp_loss_scaling_factor / depths))
            if self.mtp_losses is not None:
                sums = torch.stack((loss.detach().to(torch.float64) * max(number, 1), (targets >= 0).sum()))
                self.mtp_losses[depth] += sums
        return losses, auxiliary_losses

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

    def linears(self) -> Iterator[tuple[str, layers.QuantizedLinear]]:
        """Name and module of every linear in a precision plan, in order of execution."""
        return ((name, module) for name, module in self.named_modules() if isinstance(module, layers.QuantizedLinear))

    def mixers(self) -> list[Mixer]:
        """Of the blocks that generation uses, in order."""
        return [block.mixer for block in self.blocks]  # type: ignore[union-attr, misc]

    def _all_mixers(self) -> dict[str, Mixer]:
        """Those of multi-token prediction too, by the name of their block."""
        return {name: module.mixer for name, module in self.named_modules() if isinstance(module, Block)}

    def fp32_units(self) -> list[nn.Module]:
        """The modules whose parameters must stay FP32 in the forward pass."""
        return [unit for mixer in self._all_mixers().values() for unit in mixer.fp32_units()]

    def routers(self) -> dict[str, nn.Module]:
        """The routers of all blocks, in order, by the name of the block."""
        return {name: router for name, mixer in self._all_mixers().items() for router in mixer.routers()}

    def autotuned_mixers(self) -> list[Mixer]:
        """The first mixer of each type that has autotuned kernels."""
        mixers = {type(mixer): mixer for mixer in reversed(self._all_mixers().values()) if mixer.autotuned}
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
