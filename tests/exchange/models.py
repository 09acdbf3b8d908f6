"""Small checkpoints of every kind of model, with weights that make conversion errors visible."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.indexed import write_dataset
from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.weights_only import write_weights_only
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from models.hybrid import HybridModel
from pretrain import CONFIGS, configure
from tests.models.builders import build, small_config

# A conversion could overlook order, grouping or widths. So groups have several heads, all sizes differ, chunks are
# shorter than the sequences, and one convolution has another width.
CASES = {
    "hybrid": small_config(vocab_size=300, head_dim=12, mamba_num_heads=6, mamba_num_groups=3, mamba_head_dim=10),
    "mamba": small_config(pattern="MM", mamba_num_groups=1, mamba_conv_width=3, mamba_state_dim=16),
    "no_positions": small_config(pattern="*-*", num_query_heads=6, num_kv_heads=3, head_dim=10),
    "transformer": small_config(vocab_size=300, pattern="*-*-", rope=True, rope_base=500.0, hidden_dim=48, head_dim=16),
    "llama": small_config(pattern="*G*G", rope=True, hidden_dim=48, ffn_dim=256, norm_eps=1e-6),
    "experts": small_config(
        vocab_size=300, pattern="ME*E", moe_num_experts=8, moe_top_k=3, moe_ffn_dim=48, moe_shared_ffn_dim=32,
        moe_latent_dim=16, moe_scaling=2.5, moe_num_groups=4, moe_top_groups=2,
    ),
    "one_group": small_config(pattern="*-", rope=True, num_query_heads=4, num_kv_heads=1, norm_eps=1e-3),
}  # fmt: skip


def strong_model(config: ModelConfig, mesh: ParallelMesh, seed: int = 0) -> HybridModel:
    """A model with large weights and uneven norms, biases and step sizes, so that a wrong row changes every logit."""
    model, generator = build(config, mesh, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in tensors_of(model).items():
            if values.dim() == 1:
                values.add_(torch.randn(values.shape, generator=generator) * 0.3)
            elif "embedding" not in name:
                values.mul_(4)
    return model


def tensors_of(model: HybridModel) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {name: local_part(tensor) for name, tensor in model.state_dict().items()}


def checkpoint_of(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    overrides: Sequence[str] = (),
    tokenizer: HuggingFaceTokenizer | None = None,
) -> Checkpoint:
    """A weights-only checkpoint of these tensors. overrides: of its configuration. tokenizer: stored in it."""
    whole = replace(configure(["model=tiny", "train.sequence_length=64", *overrides]), model=config)
    kept = {} if tokenizer is None else {"tokenizer.json": tokenizer.content.encode()}
    identity = None if tokenizer is None else tokenizer.fingerprint()
    imported = {"format": "a test's"}
    write_weights_only(folder, whole, tensors.items(), imported=imported, tokenizer=identity, extra_files=kept)
    return open_checkpoint(folder, CONFIGS)


def text_data(folder: Path) -> list[str]:
    """Write a little text, held-out text and a tokenizer of 290 ids to `folder`; returns overrides of a run on it."""
    generator = np.random.default_rng(1)
    words = ["".join(chr(97 + letter) for letter in generator.integers(26, size=5)) for _ in range(40)]
    documents = [" ".join(generator.choice(words, 60)) for _ in range(36)]
    tokenizer = train_tokenizer(documents, 290)
    tokenizer.save(folder / "tokenizer.json")
    for name, written in (("text", documents[:30]), ("held_out", documents[30:])):
        encoded = ([*ids, tokenizer.eod_id] for ids in tokenizer.encode_batch(written))
        write_dataset(folder / name, encoded, np.uint16)
    data = ["data=indexed", f"data.sources={{text: {folder}/text}}", f"data.tokenizer={folder}/tokenizer.json"]
    data.append(f"data.validation={{held_out: {folder}/held_out}}")
    return [*data, "data.phases=[{name: all, blend: {text: 1}}]", "data.num_workers=0"]
