"""Fixed tensor scales for the inputs of quantized linears, for serving engines that quantize activations (W4A4).

Training computes the amax of every tensor in every step; engines need a constant. So the model reads held-out text of
its run, with weights and activations quantized as in training, and the largest amax of each linear's input is used.
Larger inputs saturate in the engine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from data.provider import open_held_out
from exchange.checkpoint import Checkpoint, load_model
from exchange.nvfp4 import TrainedPlan
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import FPROP_ACTIVATION
from megatron_fp4.precision.rng import StepState


def largest_inputs(checkpoint: Checkpoint, trained: TrainedPlan, config: Config, num_samples: int) -> dict[str, Tensor]:
    """The amax of the input of each of `trained.nvfp4_linears()` over `num_samples` sequences of each held-out source:
    FP32 0-dim, on the CPU.

    config: of the run, with paths that may be opened. Raises ValueError if a linear was trained with activations in
    another format, the run has no held-out text, or an amax is zero or not finite; ValueError or OSError for data that
    cannot be opened.
    """
    if num_samples < 1:
        raise ValueError(f"--calibrate {num_samples}: give 1 or more")
    if any(row.recipe[FPROP_ACTIVATION].format != "nvfp4" for row in trained.nvfp4_linears().values()):
        raise ValueError(
            "--calibrate: some linears with NVFP4 weights were trained with activations in another format; leave "
            "--calibrate out"
        )
    _, sets = open_held_out(replace(config, validation=replace(config.validation, num_samples=num_samples)))
    if not sets:
        raise ValueError("--calibrate: the run has no held-out text (data.validation); leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Tensor] = {}

    def keep(name: str, _: object, inputs: tuple[Tensor, ...]) -> None:
        amax = inputs[0].detach().abs().amax().to(torch.float32)
        found[name] = torch.maximum(found[name], amax) if name in found else amax

    try:
        model = load_model(checkpoint, compute_dtype=trained.compute_dtype, device=device)
        linears = dict(model.linears())
        PrecisionController({name: of.context for name, of in linears.items()}, trained.plan, StepState(seed=0))
        for name in trained.nvfp4_linears():
            linears[name].register_forward_pre_hook(partial(keep, name))
        for batch in (batch for held_out in sets for batch in held_out.batches(1, 0, 1)):
            documents = None if batch.documents is None else batch.documents.to(device)
            with torch.no_grad():
                model(batch.tokens.to(device), documents=documents, num_documents=batch.num_documents)
    finally:
        leave_distributed()
    for name, amax in found.items():
        if not (amax.isfinite() and amax > 0):
            raise ValueError(
                f"{name}: the largest input is {float(amax)}, which is no valid scale; try another checkpoint"
            )
    return {name: amax.cpu() for name, amax in found.items()}
