"""The multi-tensor kernels of Transformer Engine and apex against torch's AdamW, on sharded parameters.

In a process of its own: Transformer Engine cannot be loaded once attention has loaded PyTorch's cuDNN.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_fp4.config.schema import ConfigError, OptimizerConfig
from megatron_fp4.parallel.mesh import init_distributed
from megatron_fp4.training.optimizer import BuiltOptimizer, build_optimizer, optimizer_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    began = not dist.is_initialized()
    if began:
        init_distributed("cuda", 60)
    yield
    if began:
        dist.destroy_process_group()


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 500), nn.LayerNorm(500), nn.Linear(500, 7)).cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)))
    return model


def build(model: nn.Module, implementation: str) -> BuiltOptimizer:
    try:
        return build_optimizer(model, OptimizerConfig(lr=1e-2, implementation=implementation))
    except ConfigError as error:
        pytest.skip(str(error))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        model(torch.randn(64, 300, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("implementation", ["transformer_engine", "apex"])
def test_updates_are_torchs_up_to_rounding(implementation: str) -> None:
    models = [sharded(), sharded()]
    for model, which in zip(models, (implementation, "torch"), strict=True):
        steps(model, build(model, which).optimizer, range(20))
    for a, b in zip(*map(weights, models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("then", ["torch", "transformer_engine"])
@pytest.mark.parametrize("first", ["torch", "transformer_engine"])
def test_a_run_moves_between_implementations_and_resumes_bitwise_with_its_own(first: str, then: str) -> None:
    whole, resumed = sharded(), sharded()
    optimizer = build(whole, first).optimizer
    steps(whole, optimizer, range(5))
    with torch.no_grad():
        for target, source in zip(resumed.parameters(), whole.parameters(), strict=True):
            target.copy_(source)
    other = build(resumed, then).optimizer
    saved = {name: value.clone() for name, value in optimizer_state(whole, optimizer).items()}
    for name, value in optimizer_state(resumed, other).items():
        value.copy_(saved[name])
    steps(whole, optimizer, range(5, 10))
    steps(resumed, other, range(5, 10))
    for a, b in zip(weights(whole), weights(resumed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert first != then or torch.equal(a, b)
