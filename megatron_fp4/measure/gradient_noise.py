"""How much of a gradient is quantization noise: the measurement behind `precision.switch.when=gradient_noise`.

The criterion ("FP4 All the Way", arXiv 2505.19115, section 4.1 and appendix B.1): a step along g = grad L + e, with
zero-mean noise e of standard deviation sigma_q in each of d coordinates, no longer reduces the loss when

    ||grad L|| / (sigma_q sqrt(d))  <  sqrt(3)

sigma_q sqrt(d) is the (root mean square) norm of e, so the measured ratio is

    ||g_ref|| / ||g_q - g_ref||

    g_q     the gradient that the next training step would use: its micro-batches, plan and rounding draws
    g_ref   the gradient of the same micro-batches with dgrad and wgrad in BF16 and the forward pass as it is

over all coordinates of all parameters on all ranks, before clipping. How these differ from the paper's quantities:

- ||g_q - g_ref|| is one draw of the norm of e, not its expectation. For d independent coordinates the two agree to a
  relative 1/sqrt(d), so sigma_q = ||g_q - g_ref|| / sqrt(d).
- e is the *whole* effect of quantizing the backward pass. It includes a bias, because W in dgrad and x in wgrad are
  rounded to nearest; the paper's zero-mean e has none. This makes the ratio smaller.
- g_ref is the gradient of one global batch and has its sampling noise, so it is longer than grad L, most of all with
  small batches. This makes the ratio larger.
- g_ref is computed in BF16; this rounding (relative 1e-3) is far below the ratios that matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import holds_first_copy
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import Gemm, Recipe
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import accumulate, sum_replicated_gradients


@dataclass(frozen=True)
class GradientNoise:
    """Norms (L2) of the gradient and of its quantization noise; the same numbers on all ranks.

    reference_norm: of g_ref. noise_norm: of g_q - g_ref. num_coordinates: d.
    parameters: name -> (reference norm, noise norm) of each parameter.
    """

    reference_norm: float
    noise_norm: float
    num_coordinates: int
    parameters: dict[str, tuple[float, float]]

    @property
    def ratio(self) -> float:
        """||g_ref|| / ||g_q - g_ref||, infinite without noise."""
        return _ratio(self.reference_norm, self.noise_norm)

    def as_record(self) -> dict[str, Any]:
        """The fields of a record in `metrics.jsonl`, besides `kind` and `step`. sigma_q: the standard deviation of the
        noise in each coordinate. parameters: the ratio of each parameter, by name."""
        return {
            "ratio": self.ratio,
            "gradient_norm": self.reference_norm,
            "noise_norm": self.noise_norm,
            "sigma_q": self.noise_norm / math.sqrt(self.num_coordinates),
            "parameters": {name: _ratio(*norms) for name, norms in self.parameters.items()},
        }


def bf16_backward(recipe: Recipe) -> Recipe:
    """`recipe` without quantization in dgrad and wgrad. fprop does not change."""
    return replace(recipe, name=f"{recipe.name}, backward bf16", dgrad=Gemm(), wgrad=Gemm())


def gradient_noise(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, controller: PrecisionController
) -> GradientNoise:
    """Compute the gradient of the controller's step twice, without an update; see the top of this file. A collective.

    model, micro_batches, mesh: as for `accumulate`, which the caller may call next: gradients are dropped, weights and
    recipes are as before, and quantized weights are dropped and made again, with the same codes. controller: of all
    linears; its StepState has the step. The model draws nothing. Ranks have equally many.

    Costs two forward and backward passes over the micro-batches, and memory for one more sharded FP32 gradient.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())

    def gradients() -> list[Tensor | None]:
        """The local part of each parameter's mean gradient over the global batch, as in a training step."""
        accumulate(model, micro_batches, mesh, controller.step_state)
        sum_replicated_gradients(parameters, mesh)
        found = [None if parameter.grad is None else local_part(parameter.grad) for parameter in parameters]
        model.zero_grad()
        return found

    quantized = gradients()
    with controller.other_recipes(bf16_backward):
        reference = gradients()
    sums = torch.zeros(len(parameters), 2, dtype=torch.float64, device=mesh.device)  # reference, noise
    for row, parameter, g_q, g_ref in zip(sums, parameters, quantized, reference, strict=True):
        if g_q is not None and g_ref is not None and holds_first_copy(parameter, mesh):
            row[0] = torch.linalg.vector_norm(g_ref, dtype=torch.float64).square()
            row[1] = torch.linalg.vector_norm(g_q - g_ref, dtype=torch.float64).square()
    dist.all_reduce(sums)
    squares = sums.tolist()
    return GradientNoise(
        reference_norm=math.sqrt(sum(reference for reference, _ in squares)),
        noise_norm=math.sqrt(sum(noise for _, noise in squares)),
        num_coordinates=sum(parameter.numel() for parameter in parameters),
        parameters={name: (math.sqrt(r), math.sqrt(n)) for name, (r, n) in zip(named, squares, strict=True)},
    )


def _ratio(reference: float, noise: float) -> float:
    return math.inf if noise == 0 else reference / noise
