"""Checkpoints of runs that have trained a few steps, of any mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data import provider as data
from data.indexed import IndexedDatasetWriter
from data.tokenizer import train_tokenizer
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.training.callbacks.numerics import Switch
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import configure
from tests.training.harness import launch

# in_proj's groups have 139 rows, which are padded to 144.
HYBRID = [
    "model=tiny", "model.pattern=M-*-M-", "model.vocab_size=300", "model.hidden_dim=64", "model.ffn_dim=96",
    "model.num_query_heads=8", "model.num_kv_heads=2", "model.head_dim=8", "model.mamba_num_heads=6",
    "model.mamba_head_dim=16", "model.mamba_num_groups=2", "model.mamba_state_dim=20",
    "model.nvfp4_bf16_blocks.last=1",
]  # fmt: skip
# qkv_proj's groups have 40 rows, which are padded to 48.
TRANSFORMER = [
    "model=transformer_30m", "model.pattern='*-*-'", "model.vocab_size=300", "model.hidden_dim=48",
    "model.ffn_dim=96", "model.num_query_heads=6", "model.num_kv_heads=2", "model.head_dim=8",
    "model.nvfp4_bf16_blocks.last=1",
]  # fmt: skip
_RUN = [
    "train.global_batch_size=2", "train.micro_batch_size=1", "train.sequence_length=32", "train.steps=3",
    "validation.num_samples=2", "checkpoint.asynchronous=false", "checkpoint.keep=0", "run.device=cpu",
    "logging.report=false",
]  # fmt: skip


def train(run_dir: Path, overrides: Sequence[str], *, ranks: int = 1) -> Path:
    """Train two steps on a little text and save after each; returns `run_dir`."""
    data = _text(run_dir.with_name(f"{run_dir.name}_text"))
    whole = [*_RUN, *data, *overrides, f"run.dir={run_dir}", f"parallel.tensor={ranks}"]
    launch(_train, ranks, ranks, whole, seconds=300)
    return run_dir


def _text(folder: Path) -> list[str]:
    """Text for training and held-out text of two kinds, and the overrides that name them."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    words = ["".join(chr(97 + letter) for letter in generator.integers(26, size=5)) for _ in range(40)]
    documents = [" ".join(generator.choice(words, 60)) for _ in range(16)]
    tokenizer = train_tokenizer(documents, 290)
    (folder / "tokenizer.json").write_text(tokenizer.content)
    for name in ("text", "held_out", "other"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for document in documents[:8] if name == "text" else documents[8:]:
                writer.add_document([*tokenizer.encode_batch([document])[0], tokenizer.eod_id])
    return [
        "data=indexed", f"data.sources={{text: {folder}/text}}", "data.num_workers=0",
        f"data.validation={{first: {folder}/held_out, second: {folder}/other}}",
        f"data.tokenizer={folder}/tokenizer.json", "data.phases=[{name: all, blend: {text: 1}}]",
    ]  # fmt: skip


def _train(rank: int, ranks: int, overrides: list[str]) -> None:
    os.environ["WORLD_SIZE"] = str(ranks)  # torchrun's
    config = configure(overrides)
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    trainer = Trainer(config, models, data, [Switch()], mesh, quiet=True)
    trainer.begin(0)
    with trainer.checkpointer:
        for step in trainer.steps(0, 2):
            trainer.save(step.done)
        trainer.checkpointer.finish()
