"""Small models for tests, and copies of their parameters in FP64."""

import dataclasses

import torch
from torch import Tensor, nn

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel, build_model
from models.initialization import initialize

SMALL = ModelConfig(
    pattern="M-*-M-", vocab_size=96, hidden_dim=32, ffn_dim=48, num_query_heads=4, num_kv_heads=2, head_dim=8,
    mamba_num_heads=4, mamba_head_dim=8, mamba_num_groups=2, mamba_state_dim=6, mamba_chunk_size=8,
)  # fmt: skip


def small_config(**changes: object) -> ModelConfig:
    return dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]


def build(config: ModelConfig, mesh: ParallelMesh, dtype: torch.dtype = torch.float32, seed: int = 0) -> HybridModel:
    model = build_model(config, mesh, dtype)
    initialize(model, config, seed)
    return model


def tokens_and_targets(config: ModelConfig, batch: int = 2, length: int = 20) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def fp64_parameters(module: nn.Module) -> dict[str, Tensor]:
    """FP64 copies of the parameters, as leaves with gradients."""
    return {n: local(p).detach().double().requires_grad_() for n, p in module.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
