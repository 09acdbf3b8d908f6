"""Initial weights: one function, one table, any mesh.

Every element is a pure function of (seed, parameter name, position in the global tensor), drawn by the counter-based
generator of `quantization/rounding.py`. Each rank fills its own shard, without communication, and the model is the
same on any mesh. (Between CPU and GPU logarithms and cosines may differ in the last bit.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.parameters import global_offsets
from megatron_fp4.quantization.rounding import random_uniform, rounding_key

A_RANGE = (1.0, 16.0)
DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4
# Rows are filled in pieces of about this many elements, so that the temporaries stay small beside the weights.
_PIECE = 2**24


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill the (materialized, possibly sharded) parameters of a `HybridModel` in place.

    | parameter                             | initial values                                                 |
    |---------------------------------------|----------------------------------------------------------------|
    | embedding, head                       | N(0, init_std^2)                                               |
    | input projections (qkv, up, in)       | N(0, init_std^2)                                               |
    | output projections (out, down)        | N(0, init_std^2 / number of blocks)                            |
    | norm weights, D                       | 1                                                              |
    | convolution weight and bias           | U(-1/sqrt(width), 1/sqrt(width))                               |
    | A_log                                 | log U(1, 16)                                                   |
    | dt_bias                               | softplus^-1(dt), dt log-uniform in [0.001, 0.1], floor 0.0001  |

    Output projections: one residual is added per block, and a Transformer of L double blocks has 2L of them here, so
    the scale is 1/sqrt(2L) there. The last three rows are mamba-ssm's (`nn.Conv1d`'s default for the convolution).

    Raises ValueError for a parameter that is still on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: call model.to_empty(device=...) first")
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        offsets = global_offsets(parameter)
        matrix, row_offset = (local, offsets[0]) if local.dim() == 2 else (local[None], 0)
        step = max(1, _PIECE // max(1, matrix.shape[1]))
        for first in range(0, matrix.shape[0], step):
            piece = matrix[first : first + step]
            position = _Position(seed, name, row_offset + first, offsets[-1], piece.shape, piece.device)
            values = _values(position, config)
            piece.copy_(values) if isinstance(values, Tensor) else piece.fill_(values)


@dataclass(frozen=True)
class _Position:
    """A rectangle of one parameter: where its draws come from."""

    seed: int
    name: str
    row: int
    column: int
    shape: torch.Size
    device: torch.device

    def uniform(self, low: float = 0.0, high: float = 1.0, draw: str = "uniform") -> Tensor:
        """FP32 draws in [low, high)."""
        key = rounding_key(self.seed, self.name, draw, row_offset=self.row, column_offset=self.column)
        return random_uniform(key, self.shape[0], self.shape[1], self.device).mul_(high - low).add_(low)

    def normal(self, std: float) -> Tensor:
        """FP32 draws of N(0, std^2) by Box and Muller's transform; beyond 5.5 std there are none (22-bit draws)."""
        radius = (1 - self.uniform(draw="radius")).log_().mul_(-2 * std**2).sqrt_()
        return self.uniform(high=2 * math.pi, draw="angle").cos_().mul_(radius)


def _values(at: _Position, config: ModelConfig) -> Tensor | float:
    module, _, kind = at.name.rpartition(".")
    owner = module.rpartition(".")[2]
    if kind == "A_log":
        return at.uniform(*A_RANGE).log_()
    if kind == "D" or owner in ("norm", "final_norm"):
        return 1.0
    if kind == "dt_bias":
        low, high = (math.log(bound) for bound in DT_RANGE)
        dt = at.uniform(low, high).exp_().clamp_(min=DT_FLOOR)
        return dt + (-torch.expm1(-dt)).log_()
    if owner == "conv":
        bound = config.mamba_conv_width**-0.5
        return at.uniform(-bound, bound)
    if owner in ("out_proj", "down_proj"):
        return at.normal(config.init_std * config.num_blocks**-0.5)
    if owner in ("embedding", "head", "qkv_proj", "up_proj", "in_proj"):
        return at.normal(config.init_std)
    raise AssertionError(f"no rule for parameter {at.name}")
