"""What TensorBoard and wandb call the curves of a run: in the few groups that a person looks through.

Both make a group of what stands before the first slash. `metrics.jsonl` has names of its own and more numbers; those of
diagnostics are named where they are made (measure/diagnostics.py, measure/gradient_noise.py):

    loss            train, validation_<source>, validation (their mean)
    bits_per_byte   <source>
    optimizer       lr, grad_norm, skipped
    speed           tokens_per_second, tflops_per_device, mfu, step_seconds, data_wait_seconds
    memory          peak_gib
    data            tokens, epochs_<source>
    quantization_*  what FP4 does to operands and GEMMs: the median over all linears, and the worst of them
    gradient_noise  what it does to gradients
    text            what the model says
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_fp4.logging.step_metrics import StepMetrics


def step_curves(metrics: StepMetrics) -> dict[str, float]:
    """Of a training step."""
    curves = {
        "loss/train": metrics.loss,
        "optimizer/lr": metrics.lr,
        "optimizer/grad_norm": metrics.grad_norm,
        "optimizer/skipped": float(metrics.skipped),
        "speed/tokens_per_second": metrics.tokens_per_second,
        "speed/tflops_per_device": metrics.model_tflops,
        "speed/step_seconds": metrics.step_time,
        "speed/data_wait_seconds": metrics.data_wait,
        "data/tokens": float(metrics.tokens),
        **{f"data/epochs_{name}": epochs for name, epochs in metrics.epochs.items()},
    }
    if metrics.mfu is not None:
        curves["speed/mfu"] = metrics.mfu
    if metrics.peak_memory_gib is not None:
        curves["memory/peak_gib"] = metrics.peak_memory_gib
    return curves


def validation_curves(losses: Mapping[str, float], bits_per_byte: Mapping[str, float] | None) -> dict[str, float]:
    """Of a validation: losses in nats per token, by source."""
    curves = {f"loss/validation_{source}": loss for source, loss in losses.items()}
    curves["loss/validation"] = sum(losses.values()) / len(losses) if losses else math.nan
    return curves | {f"bits_per_byte/{source}": bits for source, bits in (bits_per_byte or {}).items()}
