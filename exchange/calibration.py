"""How large the inputs of quantized linears get, measured on held-out text.

Serving engines that quantize activations (W4A4) want a fixed tensor scale for each linear's input; training takes the
maximum of every tensor anew. So the model runs forward over the run's own held-out data, as it was trained (quantized
weights and activations, by the plan), and the largest magnitude of each linear's input is kept. What is larger later
saturates; what is smaller in all of the text leaves codes unused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.loader import MicroBatch
from data.provider import open_held_out
from exchange.checkpoint import Checkpoint, load_model
from exchange.nvfp4 import TrainedPlan
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import FPROP_ACTIVATION
from megatron_fp4.precision.rng import StepState


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
    if any(row.recipe[FPROP_ACTIVATION].format != "nvfp4" for row in trained.fp4().values()):
        raise ValueError(
            "--activations calibrated: some of the linears with NVFP4 weights were trained with activations in another "
            "format, which W4A4 would change; leave it out (weights in 4 bits, activations in BF16)"
        )
    batches = _held_out_batches(config, num_samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Tensor] = {}
    sequences, tokens, loss = 0, 0, 0.0

    def keep_amax(name: str, _: object, inputs: tuple[Tensor, ...]) -> None:
        amax = inputs[0].detach().abs().amax().to(torch.float32)
        found[name] = torch.maximum(found[name], amax) if name in found else amax

    try:
        model = load_model(checkpoint, compute_dtype=trained.compute_dtype, device=device)
        linears = dict(model.linears())
        contexts = {name: linear.context for name, linear in linears.items()}
        PrecisionController(contexts, trained.plan, StepState(seed=0))
        for name in trained.fp4():
            linears[name].register_forward_pre_hook(partial(keep_amax, name))
        for batch in batches:
            documents = None if batch.documents is None else batch.documents.to(device)
            options: dict[str, Any] = {"num_documents": batch.num_documents, "num_targets": batch.num_targets}
            with torch.no_grad():
                loss += float(model(batch.tokens.to(device), batch.targets.to(device), documents, **options))
            sequences, tokens = sequences + 1, tokens + batch.tokens.numel()
    finally:
        leave_distributed()
    for name, amax in found.items():
        if not (amax.isfinite() and amax > 0):
            raise ValueError(
                f"{name}: the largest input in {sequences} sequences was {float(amax)}, which gives no scale; give an "
                "earlier checkpoint, or more --calibrate-samples"
            )
    return Calibration({name: amax.cpu() for name, amax in found.items()}, sequences, tokens, loss / sequences)


def _held_out_batches(config: Config, num_samples: int) -> Iterator[MicroBatch]:
    """Sequences of the run's held-out sets in turn, spread over each, one at a time; fewer if there are no more."""
    _, sets = open_held_out(config)
    if not sets:
        raise ValueError(
            "the run has no held-out text to calibrate with; name some by --data-override data.validation.NAME=PATH"
        )
    each = replace(config.validation, num_samples=-(-num_samples // len(sets)))
    _, sets = open_held_out(replace(config, validation=each))
    rounds = itertools.zip_longest(*(held_out.batches(1, 0, 1) for held_out in sets))
    return itertools.islice((batch for batches in rounds for batch in batches if batch is not None), num_samples)
