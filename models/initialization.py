"""Initial weights, the same on any mesh.

Every element is a pure function of (seed, parameter name, position in the global tensor), drawn by the counter-based
generator of `quantization/rounding.py`. So each rank fills its own shard without communication. (CPU and GPU may differ
in the last bit of logarithms and cosines.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import OutputHead, QuantizedLinear, RowParallelLinear, VocabParallelEmbedding
from megatron_fp4.parallel.parameters import global_offsets
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.quantization.rounding import Place, Span, random_uniform, rounding_key

# Rows are filled in pieces of about this many elements, so that temporaries stay small, and in a CPU's caches.
_PIECE = 2**24
_PIECE_ON_CPU = 2**18

Rule = Callable[["Draws"], Tensor | float]


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill the (materialized, possibly sharded) parameters and buffers of a `HybridModel` in place.

    embedding, head, input projections (qkv, up, in)    N(0, init_std^2)
    output projections (out, down)                      N(0, init_std^2 / number of blocks)
    norm weights, D                                     1
    convolution weight and bias                         U(-1/sqrt(width), 1/sqrt(width))
    A_log                                               log U(1, 16)
    dt_bias                                             softplus^-1(dt), dt log-uniform in [0.001, 0.1], floor 0.0001

    Output projections: every block adds once to the residual stream. A Transformer of L layers has 2L blocks here, so
    their scale is the usual 1/sqrt(2L). The first two rules are below, the others in their modules (`initial_values`).

    Raises ValueError for a parameter on the meta device.
    """
    for prefix, module in model.named_modules():
        for name, parameter in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            rule: Rule
            if rules := getattr(module, "initial_values", None):
                rule = rules()[name]
            elif isinstance(module, RowParallelLinear):
                rule = partial(Draws.normal, std=config.init_std * config.num_blocks**-0.5)
            else:
                assert isinstance(module, QuantizedLinear | VocabParallelEmbedding | OutputHead), prefix
                rule = partial(Draws.normal, std=config.init_std)
            _fill(parameter, f"{prefix}.{name}", rule, seed)


def _fill(parameter: Tensor, name: str, rule: Rule, seed: int) -> None:
    if parameter.is_meta:
        raise ValueError(f"parameter {name} is on the meta device: call model.to_empty(device=...) first")
    local, offsets = local_part(parameter), global_offsets(parameter)
    while local.dim() < 2:
        local, offsets = local[None], (0, *offsets)
    step = max(1, (_PIECE_ON_CPU if local.device.type == "cpu" else _PIECE) // max(1, local.shape[-1]))
    for index in itertools.product(*map(range, local.shape[:-2])):  # of the matrices in a tensor of more dimensions
        matrix, row = local[index], 0
        for axis, size in enumerate(parameter.shape[:-1]):
            row = row * size + offsets[axis] + (index[axis] if axis < len(index) else 0)
        for first in range(0, matrix.shape[0], step):
            piece = matrix[first : first + step]
            values = rule(Draws(seed, name, row + first, offsets[-1], piece.shape, piece.device))
            piece.copy_(values) if isinstance(values, Tensor) else piece.fill_(values)


@dataclass(frozen=True)
class Draws:
    """A rectangle of one parameter, and random numbers for it. row, column: where it begins in the global tensor."""

    seed: int
    name: str
    row: int
    column: int
    shape: torch.Size
    device: torch.device

    def uniform(self, low: float = 0.0, high: float = 1.0, draw: str = "uniform") -> Tensor:
        """FP32 draws of U[low, high). draw: a name; different names give independent draws."""
        key = rounding_key(self.seed, self.name, draw).at(Place(Span(self.row), Span(self.column)))
        return random_uniform(key, self.shape[0], self.shape[1], self.device).mul_(high - low).add_(low)

    def normal(self, std: float) -> Tensor:
        """FP32 draws of N(0, std^2) by the Box-Muller transform; none is beyond 5.5 std, because draws have 22 bits."""
        radius = (1 - self.uniform(draw="radius")).log_().mul_(-2 * std**2).sqrt_()
        return self.uniform(high=2 * math.pi, draw="angle").cos_().mul_(radius)


def ones(draws: Draws) -> float:
    """The rule for parameters that are 1 everywhere."""
    return 1.0
