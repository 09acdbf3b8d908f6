"""How large the inputs of quantized linears get, measured on held-out text.

Serving engines that quantize activations (W4A4) want a tensor scale for each linear's input that is fixed beforehand.
Training has none: it takes the maximum of every tensor anew. So the model runs forward over sequences of the run's own
held-out data, as it was trained (quantized weights and activations, by the plan), and the largest magnitude that each
linear is given is kept. What is larger later saturates; what is smaller in all of the text leaves codes unused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.loader import MicroBatch
from data.provider import open_held_out
from data.validation import ValidationSet
from exchange.checkpoint import Checkpoint, load_model
from exchange.nvfp4 import TrainedPlan
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.linear import LinearCall
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController


class InputMaxima:
    """An observer of linears (precision/linear.py) that keeps the largest magnitude of each one's input, by name:
    FP32 0-dim."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> None:
        """x: [tokens, in], without padding, before it is quantized."""
        name, amax = call.context.name, x.detach().abs().amax().to(torch.float32)
        self.found[name] = torch.maximum(self.found[name], amax) if name in self.found else amax


@dataclass(frozen=True)
class Calibration:
    """input_amax: linear -> FP32 0-dim on the CPU. sequences, tokens: how many were read. loss: their mean, in nats."""

    input_amax: dict[str, Tensor]
    sequences: int
    tokens: int
    loss: float


def calibrated_inputs(checkpoint: Checkpoint, trained: TrainedPlan, config: Config, num_samples: int) -> Calibration:
    """The largest input of every linear in `trained.fp4()`, over `num_samples` held-out sequences of the run.

    config: of the run, with its data where that is now. Raises ValueError, with the remedy, where activations must not
    be quantized, nothing is measured, or an input is zero or not finite throughout; ValueError or OSError for data that
    cannot be opened.
    """
    if num_samples < 1:
        raise ValueError(f"--calibrate-samples {num_samples} measures nothing; give 1 or more")
    if not trained.activations_in_fp4():
        raise ValueError(
            "--activations calibrated: some of the linears with NVFP4 weights were trained with activations in another "
            "format, which W4A4 would change; leave it out (weights in 4 bits, activations in BF16)"
        )
    batches = held_out_batches(config, num_samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    maxima, sequences, tokens, loss = InputMaxima(), 0, 0, 0.0
    try:
        model = load_model(checkpoint, compute_dtype=trained.compute_dtype, device=device)
        linears = {name: module.context for name, module in model.linears()}
        PrecisionController(linears, trained.plan, StepState(seed=0))
        for name in trained.fp4():
            linears[name].probe = maxima
        for batch in batches:
            documents = None if batch.documents is None else batch.documents.to(device)
            options: dict[str, Any] = {"num_documents": batch.num_documents, "num_targets": batch.num_targets}
            with torch.no_grad():
                mean = model(batch.tokens.to(device), batch.targets.to(device), documents, **options)
            loss += float(mean) * batch.tokens.shape[0]
            sequences, tokens = sequences + batch.tokens.shape[0], tokens + batch.tokens.numel()
    finally:
        leave_distributed()
    for name, amax in maxima.found.items():
        if not (amax.isfinite() and amax > 0):
            raise ValueError(
                f"{name}: the largest input in {sequences} sequences was {float(amax)}, which gives no scale; give an "
                "earlier checkpoint, or more --calibrate-samples"
            )
    return Calibration({name: amax.cpu() for name, amax in maxima.found.items()}, sequences, tokens, loss / sequences)


def held_out_batches(config: Config, num_samples: int) -> Iterator[MicroBatch]:
    """`num_samples` sequences of the run's held-out data, of all its sources in turn and spread over each, one at a
    time; fewer if it has no more. Raises ValueError or OSError for data that cannot be opened."""
    everything = replace(config, validation=replace(config.validation, num_samples=None))
    _, validation = open_held_out(everything)
    if not validation:
        raise ValueError(
            "the run has no held-out text to calibrate with; name some by --data-override data.validation.NAME=PATH"
        )
    each = -(-num_samples // len(validation))

    def spread(held_out: ValidationSet) -> Iterator[MicroBatch]:
        count = min(each, held_out.num_samples)
        for index in range(count):
            window = index * held_out.num_samples // count
            yield held_out.batch(index, window, window + 1)

    rounds = itertools.zip_longest(*map(spread, validation))
    return itertools.islice((batch for batches in rounds for batch in batches if batch is not None), num_samples)
