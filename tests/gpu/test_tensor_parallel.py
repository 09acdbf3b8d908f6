"""Linears on two GPUs with sequence parallelism: the operands of all GEMMs are those of one GPU, bit for bit."""

from __future__ import annotations

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
from megatron_fp4.quantization.fp4_cuda import FusedFP4, PackedRows
from megatron_fp4.quantization.rounding import rounding_key
from tests.distributed.test_linear_codes import calls_on, check_codes
from tests.gpu.test_linear_cuda import RECIPES
from tests.training.harness import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Kernels that pack, kernels that do not, PyTorch on the GPU, and a linear without quantization.
CASES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8, powers of two", "nvfp4, four over six", "nvfp4 forward only", "bf16")


@pytest.mark.parametrize("key", [None, rounding_key(3)])
@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(32, 32), (96, 4128), (4096, 2048)])
def test_packed_rows_unpack_to_the_values(format_: str, shape: tuple[int, int], key: Any) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x[3] *= -300
    made = FusedFP4(x, Side(format_, (1, 16 if format_ == "nvfp4" else 32), key=key), None)
    packed = made.along_columns(keep=True)
    assert isinstance(packed, PackedRows)
    assert packed.codes.dtype == packed.scales.dtype == torch.uint8
    assert torch.equal(packed.values(), made.along_columns())


def on_a_gpu(rank: int, folder: str, tokens: int, keeps: bool) -> dict[str, tuple[Any, Any]]:
    """What the linears' GEMMs were given, of every recipe: on this GPU alone, and shared with the other."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/nccl", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank)
    alone, shared = (build_mesh(ParallelConfig(tensor=tensor), device) for tensor in (1, 2))
    found = {}
    for name in CASES:
        pair = tuple(calls_on(mesh, RECIPES[name], torch.bfloat16, tokens, keeps) for mesh in (alone, shared))
        found[name] = tuple(_on_cpu(one) for one in pair)
    return found


def _on_cpu(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {name: _on_cpu(part) for name, part in found.items()}
    return tuple(_on_cpu(part) for part in found) if isinstance(found, tuple) else found


# 256 tokens are whole blocks of every format on each rank, 40 are not, and are gathered before they are quantized.
@two_gpus
@pytest.mark.parametrize(("tokens", "keeps"), [(256, False), (256, True), (40, False)])
def test_codes_on_two_gpus_are_those_of_one(tokens: int, keeps: bool, tmp_path: Path) -> None:
    ranks = launch(on_a_gpu, 2, str(tmp_path), tokens, keeps, seconds=120.0)
    for name in CASES:
        check_codes([rank[name][1] for rank in ranks], ranks[0][name][0], rtol=0.03)
