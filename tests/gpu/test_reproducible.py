"""`parallel.reproducible` gives the same bits on 1, 2 and 4 ranks that share one GPU, over gloo."""

from pathlib import Path

import pytest
import torch

from megatron_fp4.training.build import set_determinism
from megatron_fp4.training.callbacks.kernels import Kernels
from scripts.fingerprint import state_digest
from tests.distributed.test_reproducible import STEPS, trained
from tests.spiked_run import small_corpus
from tests.training.harness import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE = ["model.pattern=M-*-", "model.hidden_dim=256", "model.ffn_dim=512", "model.num_query_heads=8"]
WIDE += ["model.head_dim=32", "model.mamba_num_heads=8", "model.mamba_head_dim=64", "model.mamba_state_dim=64"]
WIDE += ["train.sequence_length=128", "precision.switch.when=2"]
MESHES = {
    1: "parallel.reduce_gradients=once",
    2: "parallel.reduce_gradients=each parallel.reshard=true",
    4: "parallel.reduce_gradients=once parallel.replicate=2",
}


def _on_a_rank(rank: int, overrides: list[str], folder: Path) -> list[tuple[float, float]]:
    set_determinism(True)
    torch.cuda.set_device(0)  # otherwise building a mesh chooses a GPU for each rank
    kernels = Kernels(folder.parent / "kernels")  # otherwise each process would tune its own kernels
    return trained(overrides, folder, device="cuda:0", callbacks=[kernels])[1]


def test_ranks_that_share_a_gpu_have_the_bits_of_one(tmp_path: Path) -> None:
    """It compares checkpoints, because ranks end with a segmentation fault if gloo gathers DTensors on CUDA."""
    corpus, found = small_corpus(tmp_path), []
    for ranks, mesh in MESHES.items():
        folder = tmp_path / str(ranks)
        of_ranks = launch(_on_a_rank, ranks, [*corpus, *WIDE, *mesh.split()], folder, seconds=240.0)
        found += [(numbers, state_digest(folder / f"checkpoints/step_{STEPS:08}")) for numbers in of_ranks]
    assert len(found) == 7 and len({loss for loss, _ in found[0][0]}) == STEPS
    assert found == [found[0]] * len(found)
