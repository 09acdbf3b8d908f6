"""Initial weights do not depend on the mesh."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from megatron_fp4.config import ModelConfig, ParallelConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import build_mesh
from models.hybrid import build_model
from models.initialization import initialize

CONFIG = ModelConfig(
    pattern="M-*",
    vocab_size=102,
    hidden_dim=37,
    ffn_dim=50,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mamba_num_heads=10,
    mamba_head_dim=5,
    mamba_num_groups=2,
    mamba_state_dim=3,
)


def run(rank: int, world: int, tensor: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world}", rank=rank, world_size=world)
    mesh = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu"))
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.bfloat16)
    apply_data_parallel(
        model,
        mesh,
        units=list(model.blocks),
        fp32_units=model.fp32_units(),
        compute_dtype=torch.bfloat16,
        reshard=False,
    )
    model.to_empty(device="cpu")
    initialize(model, CONFIG, seed=5)
    whole = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole[name] = parameter.full_tensor().detach()
    if rank == 0:
        torch.save(whole, f"{folder}/whole_{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


# Hidden size 37 and 5 heads a group do not divide by 2: FSDP's shards are uneven.
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (2, 2), (4, 2)])
def test_every_mesh_gives_the_same_weights(tmp_path: Path, world: int, tensor: int) -> None:
    for size, tp in ((1, 1), (world, tensor)):
        mp.spawn(run, (size, tp, str(tmp_path)), nprocs=size)  # type: ignore[attr-defined]
    one, many = (torch.load(tmp_path / f"whole_{size}.pt") for size in (1, world))
    assert one.keys() == many.keys()
    for name, value in one.items():
        assert torch.equal(value, many[name]), name
