"""Initial weights do not depend on the mesh."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import ModelConfig, ParallelConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from models.hybrid import build_model
from models.initialization import initialize
from tests.training.harness import launch

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    pattern="M-*",
    vocab_size=102,
    hidden_dim=37,
    ffn_dim=48,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mamba_num_heads=10,
    mamba_head_dim=5,
    mamba_num_groups=2,
    mamba_state_dim=3,
)


def run(rank: int, tensor: int) -> dict[str, torch.Tensor]:
    """The whole weights of a model that was initialized as shards of the world's ranks."""
    mesh = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu"))
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.bfloat16)
    units, fp32_units = list(model.blocks), model.fp32_units()
    apply_data_parallel(model, mesh, units=units, fp32_units=fp32_units, compute_dtype=torch.bfloat16, reshard=False)
    model.to_empty(device="cpu")
    initialize(model, CONFIG, seed=5)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach().clone()


# Hidden size 37 and 5 heads a group do not divide by 2: FSDP's shards are uneven.
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 2)])
def test_every_mesh_gives_the_same_weights(mesh: ParallelMesh, world: int, tensor: int) -> None:
    model = build_model(CONFIG, mesh, torch.bfloat16)
    initialize(model, CONFIG, seed=5)
    for weights in launch(run, world, tensor):
        assert weights.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], whole(parameter)), name
