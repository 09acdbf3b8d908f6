"""Small models as checkpoints and as Hugging Face folders, with a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from exchange.checkpoint import Checkpoint
from exchange.hf_export import export_hf
from tests.exchange import models
from tests.models.builders import build, small_config
from tests.training.harness import alone

TEXT = "the quick brown fox jumps over the lazy dog and then returns to sleep under its tree\n"
MODELS = {
    "hybrid": small_config(vocab_size=300, pattern="M-*-", mamba_num_heads=4, mamba_num_groups=2),
    "transformer": small_config(vocab_size=300, pattern="*-*-", rope=True, hidden_dim=64, head_dim=16),
}


def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer([TEXT * 4, "def function(argument):\n    return argument + 1\n"], 300)


def checkpoint_of(folder: Path, name: str, overrides: Sequence[str] = (), seed: int = 0) -> Checkpoint:
    """Weights large enough that every token's probability depends on what is before it."""
    with alone() as mesh:
        model = build(MODELS[name], mesh, seed=seed)
        tensors = {key: parameter.to_local().detach() for key, parameter in model.named_parameters()}
    for key, values in tensors.items():
        values *= 4 if values.dim() > 1 and "embedding" not in key else 1
    return models.checkpoint_of(folder, MODELS[name], tensors, overrides)


def folder_of(path: Path, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Path:
    export_hf(checkpoint, path, dtype=dtype, tokenizer=tokenizer())
    return path
