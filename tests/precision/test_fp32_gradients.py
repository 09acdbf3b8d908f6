import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.parallel.parameters import gathered_parameter, new_parameter
from megatron_fp4.planning.dry_run import fake_ranks
from megatron_fp4.precision.fp32_gradients import gradient_of, gradient_spec, local_part


def test_the_gradient_equals_that_of_from_local() -> None:
    with fake_ranks(2):
        mesh = build_mesh(ParallelConfig(tensor=2), torch.device("cpu"))
        for shard_dim, dtype in ((0, torch.bfloat16), (1, torch.bfloat16), (None, torch.bfloat16), (0, torch.float32)):
            parameter = new_parameter((6, 4), mesh, shard_dim)
            assert isinstance(parameter, DTensor)
            parameter = gathered_parameter(local_part(parameter).to(dtype), parameter._spec, True)
            assert isinstance(parameter, DTensor) and parameter.dtype == dtype
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
