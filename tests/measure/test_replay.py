"""A micro-batch is computed twice to find faulty machines. That this does not change the run is in
test_diagnostics_run.py."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain
from megatron_fp4.measure import replay as replaying
from megatron_fp4.measure.replay import checksum, replay
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.fp32_gradients import local_part
from models.attention import Attention
from tests.measure.test_diagnostics_run import NVFP4, Run
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, records
from tests.training.harness import launch, toy_mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (), (4096,), (5, 3000)])
def test_the_checksum_depends_on_every_bit_and_its_position(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    total, bytes_of, flat = checksum(tensor), tensor.reshape(-1).view(torch.uint8), tensor.reshape(-1)
    assert total.dtype == torch.int64 and total.shape == (3,)
    assert tensor.ndim < 2 or torch.equal(total, checksum(tensor.t().contiguous().t()))
    for place in range(0, len(bytes_of), max(1, len(bytes_of) // 50)):
        flipped = bytes_of.clone()
        flipped[place] ^= 1 << place % 8
        assert not torch.equal(checksum(flipped.view(dtype)), total)
    for one in range(0, tensor.numel() - 1, 97):
        other = (one * 31 + 4096) % tensor.numel()
        exchanged = flat.clone()
        exchanged[[one, other]] = flat[[other, one]]
        assert torch.equal(checksum(exchanged), total) == bool(flat[one] == flat[other])


class Flipping(EmulatedBackend):
    """Flips a bit of the first number of the `call`-th product."""

    def __init__(self, call: int) -> None:
        self.left = call

    def gemm(self, a: Any, b: Any, out_dtype: torch.dtype, total: Any = None, rows: Any = None) -> Tensor:
        product = super().gemm(a, b, out_dtype, total, rows)
        self.left -= 1
        return flipped(product) if self.left == 0 else product


def flipped(tensor: Tensor) -> Tensor:
    """The tensor with the highest mantissa bit of its first number flipped, so that rounding does not hide it."""
    bits = tensor.detach().clone().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits.view(-1)[:1].view(torch.int16)[0] ^= 1 << 6
    else:
        bits.view(-1)[:1].view(torch.int32)[0] ^= 1 << 22
    return tensor + (bits - tensor).detach() if tensor.requires_grad else bits


def _corrupted(rank: int, tp_size: int, kinds: list[str]) -> list[Any]:
    """What a replay finds if the second computation of rank 1 is wrong, for each kind of fault."""
    return [_corrupted_once(rank, tp_size, kind) for kind in kinds]


def _corrupted_once(rank: int, tp_size: int, kind: str) -> Any:
    run = Run(toy_mesh(tp_size, sequence_parallel=tp_size > 1), NVFP4)
    linears = list(run.linears.values())
    compute = replaying.compute
    if rank == 1:
        # Each linear has three products, so the second computation begins with the fourth.
        if kind in ("fprop", "dgrad", "wgrad"):
            linears[1].backend = Flipping(4 + ("fprop", "dgrad", "wgrad").index(kind))
        if kind == "attention":
            mixer = next(module for module in run.model.modules() if isinstance(module, Attention))
            calls = []

            def spoiled(module: Any, inputs: Any) -> Any:
                calls.append(1)
                return (flipped(inputs[0]), *inputs[1:]) if len(calls) == 2 else inputs

            mixer.out_proj.register_forward_pre_hook(spoiled)
        if kind == "weights":
            calls_of = []

            def compute_spoiled(*arguments: Any) -> Any:
                calls_of.append(1)
                if len(calls_of) == 2:
                    shard = local_part(dict(run.model.named_parameters())["blocks.1.mixer.up_proj.weight"])
                    shard.copy_(flipped(shard))
                return compute(*arguments)

            replaying.compute = compute_spoiled
    try:
        found = replay(run.model, run.batches(0), run.mesh, run.controller)
    finally:
        replaying.compute = compute
    return found, str(found)


KINDS = {
    "fprop": "the fprop product of blocks.0.mixer.out_proj",
    "dgrad": "the dgrad product of blocks.0.mixer.out_proj",
    "wgrad": "the wgrad product of blocks.0.mixer.out_proj",
    "attention": "the input of blocks.0.mixer.out_proj",
    "weights": "weights of blocks.1.mixer.up_proj.weight",
}


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2], ids=["sharded", "tensor parallel"])
def test_a_replay_names_the_rank_and_the_first_difference(tp_size: int) -> None:
    for of_rank in launch(_corrupted, 2, tp_size, list(KINDS)):
        for (kind, first), (replayed, text) in zip(KINDS.items(), of_rank, strict=True):
            assert [(one.rank, one.first) for one in replayed.culprits] == [(1, first)], kind
            batch = 0 if tp_size == 2 else 1
            assert replayed.culprits[0].micro_batch == batch
            assert text.startswith("one micro-batch of step 1 computed twice DIFFERS: rank 1 (") and first in text
            # The fault reaches the other rank only through collectives.
            others = [one.rank for one in replayed.differences[1:]]
            spreads = kind == "weights" or (tp_size == 2 and kind in ("fprop", "dgrad", "attention"))
            assert others == ([0] if spreads else []), kind


@pytest.mark.slow
def test_a_difference_ends_the_run_before_the_update(monkeypatch, tmp_path: Path, capsys) -> None:
    """One bit of a product in the second computation of step 3 is wrong."""
    # 6 linears with 3 products each; 4 micro-batches in a step; 2 more before steps 1 and 3 for the replays.
    spoil_at = 6 * 3 * (2 + 4 + 4 + 1) + 2
    calls, gemm = itertools.count(1), EmulatedBackend.gemm
    monkeypatch.setattr(
        EmulatedBackend, "gemm", lambda *given: flipped(gemm(*given)) if next(calls) == spoil_at else gemm(*given)
    )
    settings = [*SMALL, *FAST, *small_corpus(tmp_path), "train.steps=4", "run.replay_interval=2"]
    assert pretrain.main([*settings, f"run.dir={tmp_path}/run"]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("pretrain.py: one micro-batch of step 3 computed twice DIFFERS: rank 0 (")
    assert "the fprop product of blocks." in line and "run.replay_interval=0" in line
    (event,) = records(tmp_path / "run", "replay")
    assert event["step"] == 3 and event["ranks"] == [0] and event["first"] in line
    assert [record["step"] for record in records(tmp_path / "run", "step")] == [1, 2]
