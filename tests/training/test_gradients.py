from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fp4.training.step import (
    clip_gradients,
    squared_norm_share,
    sum_replicated_gradients,
)
from tests.training.harness import alone, launch, toy_mesh


def gradient_norm(parameters: list[nn.Parameter], mesh: Any) -> float:
    """The global L2 norm, as a training step finds it."""
    total = squared_norm_share(parameters, mesh)
    dist.all_reduce(total)
    return math.sqrt(total.item())


def _parameter(local: torch.Tensor, mesh: Any, placements: list[Any], gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(gradient, mesh, placements, run_check=False)
    return parameter


def _grid_norm(rank: int) -> tuple[float, float, float]:
    """dp 2 x tp 2: one parameter for each way to lie on the mesh; the global gradient of each is 3s."""
    mesh = toy_mesh(tp_size=2)
    grid = mesh.device_mesh
    plain = nn.Parameter(torch.zeros(5))
    plain.grad = torch.full((5,), 3.0)
    parameters = [
        _parameter(torch.zeros(2, 2), grid, [Shard(0), Shard(1)], torch.full((2, 2), 3.0)),  # 16 elements
        _parameter(torch.zeros(4), grid, [Shard(0), Replicate()], torch.full((4,), 3.0)),  # 8
        _parameter(torch.zeros(3), grid, [Replicate(), Replicate()], torch.full((3,), 3.0)),  # 3
        _parameter(torch.zeros(2), grid["tp"], [Shard(0)], torch.full((2,), 3.0)),  # 4
        _parameter(torch.zeros(2), grid["dp"], [Shard(0)], torch.full((2,), 3.0)),  # 4
        plain,  # 5
        nn.Parameter(torch.zeros(7)),  # no gradient
    ]
    norm = gradient_norm(parameters, mesh)
    clip_gradients(parameters, torch.tensor(norm, dtype=torch.float64), clip_norm=1.0)
    clipped = gradient_norm(parameters, mesh)
    clip_gradients(parameters, torch.tensor(clipped, dtype=torch.float64), clip_norm=0.0)
    return norm, clipped, gradient_norm(parameters, mesh)


def test_every_element_counts_once() -> None:
    results = launch(_grid_norm, 4)
    assert len(set(results)) == 1
    norm, clipped, unclipped = results[0]
    assert norm == pytest.approx(3.0 * math.sqrt(40), rel=1e-12)
    assert clipped == pytest.approx(1.0, rel=1e-6)
    assert unclipped == clipped


def test_neither_overflow_nor_underflow() -> None:
    with alone() as mesh:
        parameter = nn.Parameter(torch.zeros(4))
        for size in (1e30, 1e-30):
            parameter.grad = torch.full((4,), size)
            assert gradient_norm([parameter], mesh) == pytest.approx(2 * size, rel=1e-6)
        parameter.grad = torch.tensor([1.0, math.nan, 0.0, 0.0])
        assert math.isnan(gradient_norm([parameter], mesh))
        parameter.grad = torch.tensor([1.0, math.inf, 0.0, 0.0])
        assert math.isinf(gradient_norm([parameter], mesh))


@pytest.mark.parametrize("norm", [0.3, 1.0, 1.0000001, 2.7, 1e9, 1e-30])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 0.37])
def test_clipping_has_the_bits_of_the_definition(norm: float, clip_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(257))
    gradient = torch.randn(257) * torch.logspace(-42, 20, 257)
    parameter.grad = gradient.clone()
    clip_gradients([parameter], torch.tensor(norm, dtype=torch.float64), clip_norm)
    assert torch.equal(parameter.grad, gradient * (clip_norm / norm) if 0 < clip_norm < norm else gradient)


def _sum_over_tp(rank: int, sequence_parallel: bool) -> list[torch.Tensor]:
    mesh = toy_mesh(tp_size=2, sequence_parallel=sequence_parallel)
    grid = mesh.device_mesh
    mine = float(rank + 1)  # ranks 0 and 1 are one tensor-parallel group, 2 and 3 the other
    parameters = [
        _parameter(torch.zeros(2), grid, [Shard(0), Replicate()], torch.full((2,), mine)),
        _parameter(torch.zeros(2, 2), grid, [Shard(0), Shard(0)], torch.full((2, 2), mine)),
        _parameter(torch.zeros(3), grid["tp"], [Replicate()], torch.full((3,), mine)),
    ]
    sum_replicated_gradients(parameters, mesh)
    return [p.grad.to_local() for p in parameters]  # type: ignore[union-attr]


def test_replicated_parameters_are_summed_over_tp() -> None:
    for rank, (replicated, sharded, on_tp_only) in enumerate(launch(_sum_over_tp, 4, True)):
        group = 3.0 if rank < 2 else 7.0
        assert replicated.tolist() == [group] * 2
        assert sharded.flatten().tolist() == [rank + 1.0] * 4
        assert on_tp_only.tolist() == [group] * 3
    for rank, gradients in enumerate(launch(_sum_over_tp, 4, False)):
        assert all((g == rank + 1).all() for g in gradients)
