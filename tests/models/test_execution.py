import dataclasses
import os
from typing import Any

import pytest
import torch

import assembly
from assembly import configure
from megatron_fp4.config.schema import ConfigError, ParallelConfig, TrainConfig
from megatron_fp4.parallel.mesh import build_mesh
from models import pattern
from models.conv import fused_conv_silu
from models.execution import PLAIN, Execution, torch_compile
from models.pattern import agreed_execution, choose_execution, describe_execution
from models.sdpa import attend_in_tiles
from models.ssd import fused_scan
from tests.models.builders import small_config
from tests.training.harness import launch

EVERYTHING = {"triton", "mamba_ssm", "causal_conv1d"}
SCAN, CONV = {"scan": fused_scan}, {"conv": fused_conv_silu}


def choose(
    monkeypatch, kernels="auto", installed=EVERYTHING, device="cuda", dtype="bfloat16", recompute="none", **model
):
    monkeypatch.setattr(pattern, "_installed", lambda module: module in installed)
    config = small_config(**({"mamba_chunk_size": 128, "mamba_state_dim": 8} | model))
    train = TrainConfig(kernels=kernels, activation_checkpointing=recompute)
    return choose_execution(train, config, 1, device, dtype)


def test_auto_takes_what_is_there(monkeypatch):
    assert choose(monkeypatch) == Execution({**SCAN, **CONV}, torch_compile)
    assert choose(monkeypatch, installed={"triton", "causal_conv1d"}) == Execution(CONV, torch_compile)
    assert choose(monkeypatch, pattern="*-") == Execution(compile=torch_compile)
    assert choose(monkeypatch, mamba_conv_width=7) == Execution(SCAN, torch_compile)
    assert choose(monkeypatch, device="cpu") == choose(monkeypatch, dtype="float32") == PLAIN
    assert choose(monkeypatch, device="cpu", recompute="block") == Execution(recompute="block")


def test_torch_is_the_reference_everywhere(monkeypatch):
    assert choose(monkeypatch, "torch") == PLAIN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "train.kernels=fused needs CUDA"),
        ({"dtype": "float32"}, "precision.compute_dtype=float32"),
        ({"installed": EVERYTHING - {"triton"}}, "pip install triton"),
        ({"installed": EVERYTHING - {"mamba_ssm"}}, "pip install --no-build-isolation mamba-ssm"),
        ({"installed": EVERYTHING - {"causal_conv1d"}}, "pip install --no-build-isolation causal-conv1d"),
        ({"mamba_chunk_size": 96}, "mamba_chunk_size"),
        ({"mamba_conv_width": 7}, "mamba_conv_width"),
        ({"mamba_state_dim": 7}, "multiple of 8 channels"),
    ],
)
def test_fused_says_what_it_needs(monkeypatch, changes, words):
    with pytest.raises(ConfigError, match=words):
        choose(monkeypatch, "fused", **changes)


def test_fused_needs_no_mamba_packages_for_a_transformer(monkeypatch):
    assert choose(monkeypatch, "fused", installed={"triton"}, pattern="*-") == Execution(compile=torch_compile)


@pytest.mark.parametrize("kernels", ["auto", "fused"])
def test_attention_in_tiles_is_taken_where_it_can_be(monkeypatch, kernels):
    """And is no part that `fused` insists on: cuDNN's and FlashAttention's kernels take its place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no GPU's memory counts
    chosen = choose(monkeypatch, kernels, pattern="*-", head_dim=16)
    assert chosen == Execution({"attention": attend_in_tiles}, torch_compile)
    assert choose(monkeypatch, kernels, pattern="*-", head_dim=24) == Execution(compile=torch_compile)


def test_the_log_says_what_runs():
    assert "scan: mamba-ssm, convolution: torch" in describe_execution(Execution(SCAN, torch_compile), "M-")
    assert describe_execution(dataclasses.replace(PLAIN), "*-").startswith("attention: PyTorch's SDPA")


@pytest.mark.parametrize(("cores", "ranks", "compilers"), [(64, 4, 8), (16, 4, 4), (2, 4, 1), (96, 1, 8)])
def test_ranks_of_a_machine_share_its_cores_when_they_compile(monkeypatch, cores, ranks, compilers):
    from torch._inductor import config

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    with config.patch(compile_threads=32):
        torch_compile(lambda x: x)
        assert config.compile_threads == 32, "who says how many gets as many"
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        torch_compile(lambda x: x)
        assert config.compile_threads == compilers


def _build(rank: int, executions: list[Execution]) -> str:
    """What `build` says on a rank whose packages lead to executions[rank]."""
    config = configure(["model=tiny"])
    assembly.execution_of = lambda config: executions[rank]  # type: ignore[assignment]
    mesh: Any = build_mesh(ParallelConfig(), torch.device("cpu"))
    with pytest.raises(ConfigError) as refused:
        assembly.build(config, mesh)
    return str(refused.value)


def test_a_rank_without_a_package_is_refused_on_all_ranks():
    """Else ranks with mamba-ssm's scan would wait for the others in the collective that pins its kernels."""
    first, second = launch(_build, 2, [PLAIN, Execution(SCAN)])
    assert first == second
    assert "`scan` is not used on rank 0, unlike on rank 1" in first


def test_ranks_that_agree(monkeypatch):
    chosen = [Execution({**SCAN, **CONV})] * 4
    monkeypatch.setattr(pattern.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(pattern.dist, "all_gather_object", lambda others, mine: others.__setitem__(slice(4), chosen))
    assert agreed_execution(chosen[1]) is chosen[1]
    chosen[1] = chosen[3] = Execution(SCAN)
    with pytest.raises(ConfigError, match=r"`conv` is used on rank 0, unlike on rank 1, 3; install the same"):
        agreed_execution(chosen[0])
