"""Small models as checkpoints and as Hugging Face folders, with a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import export_hf
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh, init_distributed, leave_distributed
from pretrain import CONFIGS, configure
from tests.models.builders import build, small_config

TEXT = "the quick brown fox jumps over the lazy dog and then returns to sleep under its tree\n"
MODELS = {
    "hybrid": small_config(vocab_size=300, pattern="M-*-", mamba_num_heads=4, mamba_num_groups=2),
    "transformer": small_config(vocab_size=300, pattern="*-*-", rope=True, hidden_dim=64, head_dim=16),
}


def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer([TEXT * 4, "def function(argument):\n    return argument + 1\n"], 300)


def checkpoint_of(folder: Path, name: str, overrides: Sequence[str] = (), seed: int = 0) -> Checkpoint:
    """Weights large enough that every token's probability depends on what is before it. Leaves no process group."""
    model = build(MODELS[name], build_mesh(ParallelConfig(), init_distributed("cpu", 60)), seed=seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.to_local().dim() > 1 and "embedding" not in key:
                parameter.to_local().mul_(4)
    config = replace(configure(["model=tiny", "train.sequence_length=64", *overrides]), model=MODELS[name])
    new = [NewTensor(key, tuple(p.shape), lambda p=p: p.to_local().clone()) for key, p in model.named_parameters()]  # type: ignore[misc]
    write_weights_only(folder, config, new, imported={"format": "a test's"})
    leave_distributed()
    return open_checkpoint(folder, CONFIGS)


def folder_of(path: Path, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Path:
    export_hf(checkpoint, path, dtype=dtype, tokenizer=tokenizer())
    return path
