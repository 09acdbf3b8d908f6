"""A linear that is given the same input and output gradient has the same codes at every tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, QuantizedLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.demands import block_demands
from megatron_fp4.precision.emulated import quantize_operand
from models.pattern import linear_shapes
from tests.distributed.hybrid import NVFP4, RECIPES, operand, watched_gemms, whole
from tests.training.harness import launch

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"

TOKENS, IN, GROUPS, GROUP_ROWS = 128, 256, 8, 18
GEMMS = ("fprop", "dgrad", "wgrad")

# Eight groups of 18 rows: as the 12B's in_proj (8 groups of 2836), no multiple of 16.
LINEARS: dict[str, Callable[[ParallelMesh], QuantizedLinear]] = {
    "grouped": lambda mesh: ColumnParallelLinear(IN, GROUPS * GROUP_ROWS, mesh, num_groups=GROUPS),
    "column": lambda mesh: ColumnParallelLinear(IN, 128, mesh),
    "row": lambda mesh: RowParallelLinear(IN, 48, mesh),
}
# The dimension of each operand that tensor-parallel ranks share: fprop's x [tokens, in] and W [out, in], dgrad's dy
# [tokens, out] and W^T [in, out], wgrad's dy^T [out, tokens] and x^T [in, tokens]. None: every rank has all of it.
COLUMN_SHARDS: dict[str, tuple[int | None, int | None]] = {"fprop": (None, 0), "dgrad": (1, 1), "wgrad": (0, None)}
ROW_SHARDS: dict[str, tuple[int | None, int | None]] = {"fprop": (1, 1), "dgrad": (None, 0), "wgrad": (None, 0)}


def tensors(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, in], W [out, in], dy [tokens, out], with outliers on one end so that shards have unequal maxima."""
    generator = torch.Generator().manual_seed(len(name))
    out = {"grouped": GROUPS * GROUP_ROWS, "column": 128, "row": 48}[name]
    shapes = ((TOKENS, IN), (out, IN), (TOKENS, out))
    x, w, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x * torch.linspace(1, 9, IN), w * torch.linspace(5, 1, out)[:, None], dy * torch.linspace(1, 4, out)


def run(rank: int, tensor: int, precision: str, sequence: bool) -> dict[str, dict[str, Any]]:
    """What the three GEMMs of every linear were given, and the gradients of x and W (whole)."""
    mesh = build_mesh(ParallelConfig(tensor=tensor, sequence=sequence and tensor > 1), torch.device("cpu"))
    found: dict[str, dict[str, Any]] = {}
    for name, make in LINEARS.items():
        x, w, dy = tensors(name)
        linear = make(mesh)
        shard_dim = 1 if name == "row" else 0
        linear.weight.data._local_tensor.copy_(w.chunk(tensor, shard_dim)[rank])
        linear.context.name, linear.context.recipe = name, RECIPES[precision]
        linear.context.clock = RunClock(seed=3, step=4, micro_batch=5)
        if name == "row":
            x = x.chunk(tensor, 1)[rank]
            dy = dy.chunk(tensor)[rank] if mesh.sequence_parallel else dy
        else:
            x = x.chunk(tensor)[rank] if mesh.sequence_parallel else x
            dy = dy.chunk(tensor, 1)[rank]
        x = x.contiguous().requires_grad_()
        calls: list[Any] = []
        with watched_gemms(lambda a, b, calls=calls: calls.append((operand(a), operand(b)))):
            linear(x).backward(dy.contiguous())
        assert linear.weight.grad is not None
        found[name] = {**dict(zip(GEMMS, calls, strict=True)), "dw": whole(linear.weight.grad)}
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Any]]:
    return launch(run, 1, 1, "nvfp4", False)[0]


@pytest.fixture(scope="module")
def one_in_mxfp8() -> dict[str, dict[str, Any]]:
    return launch(run, 1, 1, "mxfp8", False)[0]


@pytest.mark.parametrize(("tensor", "sequence"), [(2, True), (2, False), (4, True), (8, True)])
def test_codes_do_not_depend_on_the_tensor_parallel_size(tensor, sequence, one):
    check_codes(launch(run, tensor, tensor, "nvfp4", sequence), one)


@pytest.mark.parametrize(("tensor", "sequence"), [(2, False), (4, True)])
def test_nor_do_those_of_mxfp8(tensor, sequence, one_in_mxfp8):
    check_codes(launch(run, tensor, tensor, "mxfp8", sequence), one_in_mxfp8)


def check_codes(ranks: list[dict[str, dict[str, Any]]], one: dict[str, dict[str, Any]]) -> None:
    for name in LINEARS:
        for gemm in GEMMS:
            shards = (ROW_SHARDS if name == "row" else COLUMN_SHARDS)[gemm]
            for which, dim in enumerate(shards):
                parts = [rank[name][gemm][which] for rank in ranks]
                values, scale = one[name][gemm][which]
                if dim is None:
                    assert all(torch.equal(part[0], values) for part in parts), (name, gemm, which)
                else:
                    assert torch.equal(torch.cat([part[0] for part in parts], dim), values), (name, gemm, which)
                assert all(part[1] is scale is None or torch.equal(part[1], scale) for part in parts), (name, which)
        # Each element of dW is a sum over tokens that one rank computes alone.
        torch.testing.assert_close(ranks[0][name]["dw"], one[name]["dw"], rtol=1e-5, atol=1e-4)


def test_amax_per_shard_quantizes_every_shard_on_its_own(one):
    """`precision.amax=shard`: each shard's codes are those of a tensor of its own."""
    ranks = launch(run, 2, 2, "nvfp4_shard", True)
    x, w, _ = tensors("row")
    for rank, found in enumerate(ranks):
        expected = quantize_operand(x.chunk(2, 1)[rank], NVFP4.fprop.left)
        values, scale = found["row"]["fprop"][0]
        assert torch.equal(values, expected.values)
        assert torch.equal(scale, expected.scale)
        values, scale = found["row"]["fprop"][1]
        expected = quantize_operand(w.chunk(2, 1)[rank], NVFP4.fprop.right)
        assert torch.equal(values, expected.values)
        assert torch.equal(scale, expected.scale)
    for name, gemm, which in (("row", "fprop", 0), ("row", "wgrad", 1), ("column", "fprop", 1), ("column", "dgrad", 0)):
        (_, first), (_, second) = (rank[name][gemm][which] for rank in ranks)
        assert not torch.equal(first, second)
    # What every rank holds whole is quantized as ever.
    assert torch.equal(ranks[1]["column"]["fprop"][0][0], one["column"]["fprop"][0][0])


def test_the_groups_above_are_like_those_of_the_12b_model():
    """Its in_proj has 2836 rows a group: each is padded to 2848, whichever rank holds it."""
    model = compose_config(["model=nemotron_h_12b"], CONFIGS).model
    rows, rest = divmod(linear_shapes(model)[0].out_features, model.mamba_num_groups)
    assert (model.mamba_num_groups, rows, rest) == (GROUPS, 2836, 0)
    assert rows % block_demands(NVFP4).group_outputs != 0
    assert GROUP_ROWS % block_demands(NVFP4).group_outputs != 0
