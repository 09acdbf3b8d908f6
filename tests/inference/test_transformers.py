"""Greedy texts of exported models in transformers, with its caches, are ours token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from exchange.hf_export import export_hf
from inference.generation import Request, Settings, generate
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of

pytestmark = pytest.mark.slow
NEW = 24


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(name: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    model = strong_model(CASES[name], mesh, seed=5)  # which repeats itself little
    checkpoint = checkpoint_of(tmp_path / "checkpoint", CASES[name], tensors_of(model))
    export_hf(checkpoint, tmp_path / "hf", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    generator = torch.Generator().manual_seed(8)
    for length in (1, 5, 40):
        prompt = torch.randint(CASES[name].vocab_size, (1, length), generator=generator)
        # transformers cannot cache what has no attention: its own cache asks for a layer of it.
        expected = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        )
        (found,) = generate(model, [Request(prompt[0].tolist())], Settings(NEW))
        assert found.tokens == expected[0, length:].tolist()
        assert len(set(found.tokens)) > 1
