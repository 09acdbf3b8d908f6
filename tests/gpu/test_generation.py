"""Texts on a GPU: as the whole computed again, whatever the execution, and with weights as they were trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from inference.generation import Request, Settings, generate, lower_weights, weights_as_trained
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from megatron_fp4.precision.plan import build_plan
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from models.pattern import linear_shapes
from tests.distributed.hybrid import NVFP4
from tests.models.builders import small_config

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = small_config(pattern="M-*-M-", hidden_dim=64, ffn_dim=64, rope=True, init_std=0.2)
LENGTH = 40


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    yield build_mesh(ParallelConfig(), init_distributed(DEVICE, 60))
    dist.destroy_process_group()


def model_of(mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> HybridModel:
    with mesh.device:
        model = build_model(CONFIG, mesh, dtype)
    initialize(model, CONFIG, seed=0)
    return model


def text() -> Tensor:
    return torch.randint(96, (3, LENGTH), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def decoded(model: HybridModel, pieces: list[int]) -> Tensor:
    """Logits after each piece, FP32 [3, pieces, ids]."""
    cache = model.new_cache(3, LENGTH)
    return torch.stack([model(piece, cache=cache).float() for piece in text().split(pieces, 1)], 1)


@pytest.mark.parametrize("pieces", [[1] * LENGTH, [7, 13, 1, 19]], ids=["token by token", "pieces"])
def test_logits_are_those_of_the_whole(mesh: ParallelMesh, pieces: list[int]) -> None:
    ends = torch.tensor(pieces).cumsum(0) - 1
    with torch.no_grad():
        whole = model_of(mesh)(text())
        rounded = model_of(mesh, torch.bfloat16)(text()).float()
    torch.testing.assert_close(decoded(model_of(mesh), pieces), whole[:, ends], rtol=0, atol=1e-4)
    error = (decoded(model_of(mesh, torch.bfloat16), pieces) - whole[:, ends]).norm()
    assert error < 1.2 * (rounded - whole)[:, ends].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_as_trained(mesh: ParallelMesh, dtype: torch.dtype) -> None:
    """A linear with the weight that its codes decode to, in FP64."""
    model = model_of(mesh, dtype)
    plan = build_plan(linear_shapes(CONFIG), NVFP4, Bf16BlocksConfig(last=1), CONFIG.num_blocks)
    linear = dict(model.linears())["blocks.1.mixer.up_proj"]
    master = linear.weight.detach().to_local().to(torch.bfloat16).float().cpu()
    weights_as_trained(model, plan, torch.bfloat16, shards=1)
    lower_weights(model, dtype)
    encoded = NVFP4.fprop.right.encode(master)
    weight = encoded.block_values().double() * encoded.decode_scale().double()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    with torch.no_grad():
        y = linear(x).double().cpu()
    expected = x.double().cpu() @ weight.t()
    assert (y - expected).norm() < (1e-5 if dtype == torch.float32 else 3e-3) * expected.norm()
    assert generate(model, [Request([1, 2])], Settings(5))[0].tokens
