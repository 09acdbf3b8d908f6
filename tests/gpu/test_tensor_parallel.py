"""Linears on two GPUs with sequence parallelism: the operands of all GEMMs have the bits of one GPU."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.fp4 import FusedFP4
from megatron_fp4.quantization.rounding import rounding_key
from tests.distributed.test_linear_codes import calls_on, check_codes
from tests.gpu.test_linear_cuda import RECIPES
from tests.training.harness import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Kernels that pack, kernels that do not, PyTorch on the GPU, and a linear without quantization. Of 256 tokens each rank
# has complete blocks of every format; of 40 it does not, and they are gathered before they are quantized.
CASES = {
    "nvfp4": (256, False),
    "nvfp4, input kept": (256, True),
    "nvfp4, incomplete blocks": (40, False),
    "mxfp4": (256, False),
    "fp8": (256, False),
    "nvfp4, four over six": (256, False),
    "bf16": (256, False),
}


@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2])
def test_packed_operands_unpack_to_the_values(format_: str, parts: int) -> None:
    """Along both dimensions, also when they are joined from the messages of several ranks."""
    block = 16 if format_ == "nvfp4" else 32
    side = Side(format_, (1, block), key=rounding_key(3))
    for rows, columns in ((2 * block, block), (192, 4128), (4096, 2048)):
        made = []
        for slice_ in range(parts):
            x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            x[3 + slice_] *= -300
            made.append(FusedFP4(x, side, side))
        for along in ("columns", "rows"):
            values = [one.operand(along) for one in made]
            packed = [one.operand(along, keep=True) for one in made]
            assert all(torch.equal(one.values(), each) for one, each in zip(packed, values, strict=True))
            joined = packed[0].joined()(torch.cat([one.message() for one in packed]))
            assert torch.equal(joined.values(), torch.cat(values, 0 if along == "columns" else 1))


def on_a_gpu(rank: int, folder: str) -> dict[str, tuple[Any, Any]]:
    """The operands of the linears' GEMMs for every case: on this GPU alone, and on both GPUs."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/nccl", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank)
    alone, shared = (build_mesh(ParallelConfig(tensor=tensor), device) for tensor in (1, 2))
    found = {}
    for name, (tokens, keeps) in CASES.items():
        recipe = RECIPES[name] if name in RECIPES else RECIPES["nvfp4"]
        pair = tuple(calls_on(mesh, recipe, torch.bfloat16, tokens, keeps) for mesh in (alone, shared))
        found[name] = tuple(_on_cpu(one) for one in pair)
    return found


def _on_cpu(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {name: _on_cpu(part) for name, part in found.items()}
    return tuple(_on_cpu(part) for part in found) if isinstance(found, tuple) else found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_codes_on_two_gpus_have_the_bits_of_one(tmp_path: Path) -> None:
    ranks = launch(on_a_gpu, 2, str(tmp_path), seconds=120.0)
    for name in CASES:
        check_codes([rank[name][1] for rank in ranks], ranks[0][name][0], rtol=0.03)
