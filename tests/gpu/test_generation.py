"""Texts on a GPU: as the whole computed again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
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
