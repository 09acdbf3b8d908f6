"""Small models for tests, copies of their parameters in FP64, and Mamba-2's recurrence."""

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


def ssd_recurrence(
    x_bshp: Tensor, dt_bsh: Tensor, a_h: Tensor, b_bsgn: Tensor, c_bsgn: Tensor, documents_bs: Tensor | None = None
) -> Tensor:
    """`models.ssd.ssd_scan` by its definition, token by token, in any dtype; autograd differentiates it."""
    repeats = x_bshp.shape[2] // b_bsgn.shape[2]
    b_bshn, c_bshn = b_bsgn.repeat_interleave(repeats, 2), c_bsgn.repeat_interleave(repeats, 2)
    state_bhpn = x_bshp.new_zeros(x_bshp.shape[0], *x_bshp.shape[2:], b_bsgn.shape[3])
    outputs = []
    for t in range(x_bshp.shape[1]):
        decay_bh = (dt_bsh[:, t] * a_h).exp()
        if documents_bs is not None and t > 0:
            decay_bh = decay_bh * (documents_bs[:, t] == documents_bs[:, t - 1])[:, None]
        update_bhp = dt_bsh[:, t, :, None] * x_bshp[:, t]
        state_bhpn = decay_bh[..., None, None] * state_bhpn + update_bhp[..., None] * b_bshn[:, t, :, None]
        outputs.append((state_bhpn * c_bshn[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)
