"""How large the inputs of quantized linears get, measured on held-out text.

Serving engines that quantize activations (W4A4) want a tensor scale for each linear's input that is fixed beforehand.
Training has none: it takes the maximum of every tensor anew. So the model runs forward over sequences of the run's own
held-out data, as it was trained (quantized weights and activations, by the plan), and the largest magnitude that each
linear is given is kept. What is larger later saturates; what is smaller in all of the text leaves codes unused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.loader import MicroBatch
from data.opening import open_held_out
from data.validation import ValidationSet
from exchange.nvfp4 import TrainedPlan, activations_in_fp4
from megatron_fp4.config.schema import Config
from megatron_fp4.precision.linear import LinearCall
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController
from models.hybrid import HybridModel


@dataclass
class InputMaxima:
    """An observer of linears (precision/linear.py) that keeps the largest magnitude of each one's input, by name:
    FP32 0-dim."""

    found: dict[str, Tensor] = field(default_factory=dict)

    def forward(self, call: LinearCall, x: Tensor, y: Tensor) -> None:
        """x: [tokens, in], without padding, before it is quantized."""
        name, amax = call.context.name, x.detach().abs().amax().to(torch.float32)
        self.found[name] = torch.maximum(self.found[name], amax) if name in self.found else amax


class Calibration(NamedTuple):
    """input_amax: linear -> FP32 0-dim on the CPU. sequences, tokens: how many were read. loss: their mean, in nats."""

    input_amax: dict[str, Tensor]
    sequences: int
    tokens: int
    loss: float


def check_calibration(trained: TrainedPlan, num_samples: int) -> None:
    """Raise ValueError, with the remedy, where activations must not be quantized or nothing would be measured."""
    if num_samples < 1:
        raise ValueError(f"--calibrate-samples {num_samples} measures nothing; give 1 or more")
    if not activations_in_fp4(trained):
        raise ValueError(
            "--activations calibrated: some of the linears with NVFP4 weights were trained with activations in another "
            "format, or without their means, which W4A4 would change; leave it out (weights in 4 bits, activations in "
            "BF16)"
        )


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


@torch.no_grad()
def calibrate(
    model: HybridModel, trained: TrainedPlan, batches: Iterable[MicroBatch], device: torch.device, seed: int = 0
) -> Calibration:
    """The largest input of every linear in `trained.fp4()`.

    model: the checkpoint's, in the run's compute dtype on `device`, of one process. It follows the plan from now on.
    Raises ValueError if there is no batch, or an input is zero or not finite throughout.
    """
    linears = {name: module.context for name, module in model.linears()}
    PrecisionController(linears, trained.plan, StepState(seed=seed))
    maxima = InputMaxima()
    for name in trained.fp4():
        linears[name].probe = maxima
    sequences = tokens = 0
    loss = 0.0
    for batch in batches:
        documents = None if batch.documents is None else batch.documents.to(device)
        options: Mapping[str, Any] = {"num_documents": batch.num_documents, "num_targets": batch.num_targets}
        mean = model(batch.tokens.to(device), batch.targets.to(device), documents, **options)
        loss += float(mean) * batch.tokens.shape[0]
        sequences, tokens = sequences + batch.tokens.shape[0], tokens + batch.tokens.numel()
    for name in trained.fp4():
        linears[name].probe = None
    if not sequences:
        raise ValueError("there was no held-out text to calibrate with")
    for name, amax in maxima.found.items():
        if not (amax.isfinite() and amax > 0):
            raise ValueError(
                f"{name}: the largest input in {sequences} sequences was {float(amax)}, which gives no scale; give an "
                "earlier checkpoint, or more --calibrate-samples"
            )
    return Calibration({name: amax.cpu() for name, amax in maxima.found.items()}, sequences, tokens, loss / sequences)
