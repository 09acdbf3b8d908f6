from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.parallel.parameters import new_parameter
from megatron_fp4.planning.dry_run import fake_ranks
from megatron_fp4.precision.fp32_gradients import gradient_of, gradient_spec, local_part
from tests.training.harness import shard_by_fsdp


class Keeper(nn.Module):
    """Remembers the parameter that FSDP2 hands to its forward pass."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight
        return x


def test_the_gradient_equals_that_of_from_local() -> None:
    with fake_ranks(2):
        mesh = build_mesh(ParallelConfig(tensor=2), torch.device("cpu"))
        for shard_dim, fsdp in ((0, True), (1, True), (None, True), (0, False)):
            keeper = Keeper(new_parameter((6, 4), mesh, shard_dim))
            if fsdp:
                settings: Any = {"units": [], "fp32_units": [], "compute_dtype": torch.bfloat16, "reshard": False}
                shard_by_fsdp(keeper, mesh, **settings)
            keeper(torch.zeros(()))
            parameter = keeper.seen
            assert isinstance(parameter, DTensor)
            assert parameter.dtype == (torch.bfloat16 if fsdp else torch.float32)
            gradient = torch.randn(local_part(parameter).shape)
            expected = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False)
            for _ in range(2):
                found = gradient_of(gradient, gradient_spec(parameter))
                assert isinstance(found, DTensor) and not found.requires_grad
                assert found.device_mesh == parameter.device_mesh and found._spec == expected._spec
                assert found._spec.tensor_meta == expected._spec.tensor_meta
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(found.to_local(), gradient)
            assert gradient_spec(parameter) is gradient_spec(parameter)


def test_a_plain_parameter_has_a_plain_gradient() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(3)), torch.ones(3)
    assert gradient_of(gradient, gradient_spec(parameter)) is gradient
