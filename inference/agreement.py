"""Scores a run's own validation windows with the framework and with transformers, whose losses must agree.

Both score the same tokens: the windows of every held-out set as the run opens them, and in each window the targets that
have a loss. If the run masks documents, transformers gets each document's part of a window as a separate row, because
its Mamba-2 blocks carry their state into the next document for any mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data.loader import UNCOUNTED, MicroBatch
from data.provider import open_held_out
from data.validation import TargetStatistics, ValidationSet
from exchange.checkpoint import Checkpoint, load_model
from inference.models import OpenedFolder
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import markdown, tracked
from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.validation import evaluate

TOLERANCE = 1e-5
Losses = Mapping[str, float]
"""Mean loss per target, in nats, by held-out set."""


class Windows(NamedTuple):
    """The held-out sets of a run, and the statistics of their targets."""

    sets: Sequence[ValidationSet]
    statistics: Mapping[str, TargetStatistics]
    micro_batch_size: int


def open_windows(config: Config) -> Windows:
    """The validation windows of a run. Raises ValueError or OSError if the data is missing, or not held out."""
    bundle, sets = open_held_out(config)
    if not sets:
        raise ValueError("the run has no validation set; name held-out data with --set data.validation=...")
    lengths = None if bundle.tokenizer is None else bundle.tokenizer.byte_lengths()
    statistics = {s.name: s.statistics(s.target_counts(), lengths) for s in sets}
    return Windows(sets, statistics, config.train.micro_batch_size)


def framework_losses(checkpoint: Checkpoint, windows: Windows, device: str) -> Losses:
    """The losses by the framework, in FP32 without quantization, with the run's micro-batch size."""
    model = load_model(checkpoint, device=device)
    batches: dict[str, Any] = {s.name: s.batches(windows.micro_batch_size, 0, 1) for s in windows.sets}
    return evaluate(model, batches, model.mesh, StepState(seed=0))


def folder_losses(opened: OpenedFolder, windows: Windows) -> Losses:
    """The losses by transformers. Raises ValueError for a model with a smaller vocabulary than the run's."""
    vocab_size, ours = opened.model.config.vocab_size, max(held_out.vocab_size for held_out in windows.sets)
    if vocab_size < ours:
        raise ValueError(f"the folder's model has {vocab_size} tokens and the run's {ours}: it is not its export")
    losses = {}
    for held_out in windows.sets:
        loss, count = 0.0, 0
        for batch in tracked(held_out.batches(1, 0, 1), f"transformers, {held_out.name}"):
            for tokens, targets in pieces_of(batch):
                with torch.no_grad():
                    logits = opened.model(tokens[None].to(opened.model.device), use_cache=False).logits[0].float()
                nats = cross_entropy(logits, targets.to(logits.device), ignore_index=UNCOUNTED, reduction="none")
                loss, count = loss + float(nats.double().sum()), count + int((targets != UNCOUNTED).sum())
        losses[held_out.name] = loss / count
    return losses


def pieces_of(window: MicroBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of a window or, with the numbers of documents, of each document in it. Left out are those in
    which no target has a loss."""
    (tokens,), (targets,), ends = window.tokens, window.targets, list[int]()
    if window.documents is not None:
        ends = (window.documents[0].diff().nonzero().flatten() + 1).tolist()
    pieces = zip(tokens.tensor_split(ends), targets.tensor_split(ends), strict=True)
    return ((piece, of_piece) for piece, of_piece in pieces if (of_piece != UNCOUNTED).any())


def recorded_losses(checkpoint: Checkpoint) -> Losses | None:
    """The validation losses in the run's metrics.jsonl for the checkpoint's step; None if there are none."""
    record = last_validation(checkpoint.folder.absolute().parent.parent, checkpoint.step)
    losses = record["losses"] if record is not None and record["step"] == checkpoint.step else {}
    return losses if losses and None not in losses.values() else None


def agreement_table(windows: Windows, found: Mapping[str, Losses], reference: str) -> str:
    """A table of losses in nats and bits per byte, and their differences to the row `reference`. found: by title."""
    names = [held_out.name for held_out in windows.sets]
    header = [f"{name}{what}" for name in names for what in (", nats", ", bits/byte", " less FP32")]
    rows = []
    for title, nats in found.items():
        cells = [title]
        for name in names:
            bits = windows.statistics[name].bits_per_byte(nats[name])
            apart = "" if title == reference else f"{nats[name] - found[reference][name]:+.1e}"
            cells += [f"{nats[name]:.6f}", "-" if bits is None else f"{bits:.6f}", apart]
        rows.append(cells)
    return markdown(["validation loss", *header], rows)
