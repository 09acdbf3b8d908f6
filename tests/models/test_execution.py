"""Which kernels a run uses, and what it recomputes in the backward pass."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.precision_schema import PrecisionConfig
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig, TrainConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import BackendChoice
from megatron_fp4.training import build
from megatron_fp4.training.step import accumulate
from models import pattern
from models import provider as models
from models.execution import PLAIN, Execution, torch_compile
from models.mamba2 import fused_conv_silu
from models.pattern import choose_execution
from models.ssd import fused_scan
from tests.composing import composed
from tests.distributed.hybrid import controlled_model, micro_batches
from tests.models.builders import small_config
from tests.training.harness import launch, whole

EVERYTHING = {"triton", "mamba_ssm", "causal_conv1d"}
SCAN, CONV = {"scan": fused_scan}, {"conv": fused_conv_silu}


def choose(
    monkeypatch, kernels="auto", installed=EVERYTHING, device="cuda", dtype="bfloat16", recompute="none", **model
):
    monkeypatch.setattr(pattern, "_installed", lambda module: module in installed)
    sizes = small_config(**({"mamba_chunk_size": 128, "mamba_state_dim": 8} | model))
    train = TrainConfig(kernels=kernels, activation_checkpointing=recompute)
    config = Config(model=sizes, train=train, precision=PrecisionConfig(compute_dtype=dtype))
    return choose_execution(config, device)


def test_auto_uses_the_kernels_that_are_installed_and_support_the_sizes(monkeypatch):
    assert choose(monkeypatch) == Execution({**SCAN, **CONV}, torch_compile)
    assert choose(monkeypatch, installed={"triton", "causal_conv1d"}) == Execution(CONV, torch_compile)
    assert choose(monkeypatch, pattern="*-") == Execution(compile=torch_compile)
    assert choose(monkeypatch, mamba_conv_width=7) == Execution(SCAN, torch_compile)
    assert choose(monkeypatch, device="cpu") == choose(monkeypatch, dtype="float32") == PLAIN
    assert choose(monkeypatch, device="cpu", recompute="block") == Execution(recompute="block")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "train.kernels=fused needs CUDA"),
        ({"dtype": "float32"}, "precision.compute_dtype=float32"),
        ({"installed": EVERYTHING - {"triton"}}, "pip install triton"),
        ({"installed": EVERYTHING - {"mamba_ssm"}}, "pip install --no-build-isolation mamba-ssm"),
        ({"mamba_chunk_size": 96}, "mamba_chunk_size"),
        ({"mamba_state_dim": 7}, "multiple of 8 channels"),
    ],
)
def test_fused_says_what_it_needs(monkeypatch, changes, words):
    with pytest.raises(ConfigError, match=words):
        choose(monkeypatch, "fused", **changes)


def _join(rank: int, executions: list[Execution], backends: list[str]) -> str:
    """The refusal of ranks that chose these; rank 0 has the first."""
    choices = {
        "execution_of": lambda *_: executions[rank],
        "backend_of": lambda *_: BackendChoice(backends[rank], "because"),
        "init_distributed": lambda *_: torch.device("cpu"),
    }
    with mock.patch.multiple(build, **choices), pytest.raises(ConfigError) as refused:
        build.join_ranks(composed("model=tiny"), models)
    return str(refused.value)


def test_if_one_rank_lacks_a_package_all_ranks_refuse():
    """Otherwise ranks with mamba-ssm's scan would wait for the others in the collective that pins its kernels."""
    first, second = launch(_join, 2, [PLAIN, Execution(SCAN)], ["emulated", "torch"])
    assert first == second and "has precision.backend=torch, and rank 0 has emulated; kernels=" in first


CONFIG = small_config(hidden_dim=64, ffn_dim=64, rope=True)
STOCHASTIC, WEIGHT = Operand("nvfp4", (1, 16), "stochastic"), Operand("nvfp4", (16, 16))
# Stochastic in the forward pass too, because a recomputed block must draw the same numbers again.
RECIPES = {
    "bf16": BF16,
    "nvfp4": Recipe("nvfp4", Gemm(STOCHASTIC, WEIGHT), Gemm(STOCHASTIC, WEIGHT), Gemm(STOCHASTIC, STOCHASTIC, 16)),
}


def gradients(recompute: str, recipe: str, mesh: ParallelMesh, reshard: bool) -> dict[str, Tensor]:
    """Gradients of two micro-batches per rank."""
    state, execution = StepState(seed=3), Execution(recompute=recompute)
    model, _ = controlled_model(mesh, RECIPES[recipe], state, CONFIG, torch.bfloat16, reshard, execution)
    accumulate(model, micro_batches(0, mesh, 2 * mesh.batch.size), mesh, state)
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_gradients_have_the_same_bits(mesh, recompute, recipe):
    plain, with_recompute = (gradients(how, recipe, mesh, reshard=False) for how in ("none", recompute))
    assert all(torch.equal(plain[name], with_recompute[name]) for name in plain)


def different_gradients(rank: int, tensor: int, reshard: bool) -> list[str]:
    """The parameters whose gradients recomputation changes."""
    mesh = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu"))
    plain, different = gradients("none", "nvfp4", mesh, reshard), []
    for recompute in ("block", "selective"):
        with_recompute = gradients(recompute, "nvfp4", mesh, reshard)
        different += [f"{recompute} {name}" for name in plain if not torch.equal(plain[name], with_recompute[name])]
    return different


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "reshard"), [(1, True), (2, False)])
def test_gradients_have_the_same_bits_on_two_ranks(tensor, reshard):
    assert launch(different_gradients, 2, tensor, reshard) == [[], []]
