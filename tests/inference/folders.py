"""Small models as checkpoints and as Hugging Face folders, with a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from exchange.checkpoint import Checkpoint
from exchange.hf_export import export_hf
from tests.exchange import models
from tests.exchange.models import CASES
from tests.training.harness import alone

TEXT = "the quick brown fox jumps over the lazy dog and then returns to sleep under its tree\n"
MODELS = ("hybrid", "transformer")


def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer([TEXT * 4, "def function(argument):\n    return argument + 1\n"], 300)


def checkpoint_of(folder: Path, name: str, overrides: Sequence[str] = (), seed: int = 0) -> Checkpoint:
    """A checkpoint with weights so large that each token's probability depends on the tokens before it."""
    with alone() as mesh:
        tensors = models.tensors_of(models.strong_model(CASES[name], mesh, seed))
    return models.checkpoint_of(folder, CASES[name], tensors, overrides)


def folder_of(path: Path, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Path:
    export_hf(checkpoint, path, dtype=dtype, tokenizer=tokenizer())
    return path
