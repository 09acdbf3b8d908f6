"""Small models of every kind that Megatron has, as checkpoints of ours and as configurations; and what
torch reads of a folder of Megatron's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.megatron_model import Parameter, parameters
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# No two sizes alike, so that a mistaken axis shows.
_SIZES = {
    "hidden_dim": 64,
    "ffn_dim": 96,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "vocab_size": 300,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 40,
    "mamba_chunk_size": 16,
}
CASES = {
    "hybrid": {"pattern": "M-*-M-"},
    "hybrid with RoPE": {"pattern": "*MM-", "rope": True, "rope_base": 5000.0},
    "transformer": {"pattern": "*-*-", "rope": True},
}
ITERATION = "iter_0000000"


def config_of(case: str, *overrides: str) -> Config:
    """A run of a small model."""
    sizes = {**_SIZES, **CASES[case]}
    texts = [f"model.{name}={value}" for name, value in sizes.items()]
    return compose_config(["model=tiny", *texts, *overrides], CONFIGS)


def write_checkpoint(folder: Path, config: Config) -> Path:
    """Of drawn weights, none of them near its initial value."""
    generator = torch.Generator().manual_seed(0)

    def draw(parameter: Parameter) -> Tensor:
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in parameter.name:
            return 1 + 0.2 * values
        if ".ssm." in parameter.name:
            return 0.5 + 0.5 * values
        return values * (0.3 if "conv" in parameter.name else 0.08)

    new = [NewTensor(p.name, p.shape, lambda p=p: draw(p)) for p in parameters(config.model)]
    write_weights_only(folder, config, new, imported={})
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("ours")
    return {case: open_checkpoint(write_checkpoint(folder / case, config_of(case)), CONFIGS) for case in CASES}


def read_by_torch(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of Megatron's, as torch.distributed.checkpoint reads them."""
    reader = dcp.FileSystemReader(folder)
    state = {
        key: torch.empty(saved.size, dtype=saved.properties.dtype)
        for key, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
