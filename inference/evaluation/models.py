"""The models of a command line: folders as they are, and checkpoints, exported for as long as they are looked at."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import PlainEncoder, export_hf
from exchange.tokenizer import tokenizer_of
from inference.evaluation.folder import is_folder
from megatron_fp4.checkpoint.files import MANIFEST, step_of


@dataclass(frozen=True)
class Model:
    """One of the command line. checkpoint: None if it is a folder already."""

    name: str
    path: Path
    checkpoint: Checkpoint | None

    @property
    def facts(self) -> dict[str, Any]:
        """For the record."""
        if self.checkpoint is None:
            return {"path": str(self.path)}
        return {"path": self.checkpoint.name, "step": self.checkpoint.step, "tokens": self.checkpoint.tokens}


def models_of(texts: Sequence[str], config_dir: Path) -> list[Model]:
    """The models that are named, each as MODEL or NAME=MODEL.

    Raises ValueError for one that is not there, and for names that are not told apart.
    """
    found = []
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            name, rest = "", text
        path = Path(rest)
        checkpoint = None if is_folder(path) else open_checkpoint(path, config_dir)
        found.append(Model(name or name_of(path), path, checkpoint))
    names = [model.name for model in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two models are called {name}; name them, as first={name} second=...")
    return found


def name_of(path: Path) -> str:
    """`nvfp4@200` of a run's checkpoint `runs/nvfp4/checkpoints/step_00000200`; of others the folder's name."""
    path = path.resolve()
    of_run = (path / MANIFEST).is_file() and path.parent.name == "checkpoints"
    return f"{path.parent.parent.name}@{step_of(path)}" if of_run else path.name


@contextmanager
def as_folder(model: Model, dtype: str, tokenizer: TextTokenizer | None = None) -> Iterator[Path]:
    """Its Hugging Face folder; of a checkpoint one that is there for as long as it is needed."""
    if model.checkpoint is None:
        yield model.path
        return
    with tempfile.TemporaryDirectory(prefix="megatron_fp4_evaluate_") as temporary:
        folder = Path(temporary) / "model"
        export_hf(model.checkpoint, folder, encoder=PlainEncoder(getattr(torch, dtype)), tokenizer=tokenizer)
        yield folder


def tokenizers_of(models: Sequence[Model], given: str | None) -> dict[str, TextTokenizer]:
    """Of the models that are checkpoints, by name. Raises ValueError for one that is not there."""
    found = {}
    for model in models:
        if model.checkpoint is not None:
            tokenizer = tokenizer_of(model.checkpoint, given)
            if tokenizer is None:
                raise ValueError(f"{model.path}: its run knew of no tokenizer; give the one of its data as --tokenizer")
            found[model.name] = tokenizer
    if given is not None and not found:
        raise ValueError(f"--tokenizer {given} is for checkpoints, and folders have their own; leave it out")
    return found
