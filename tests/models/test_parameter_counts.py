import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ModelConfig
from models.hybrid import build_model
from models.pattern import parameter_count
from tests.models.builders import small_config

CONFIGS = Path(__file__).parents[2] / "configs"


def load(name: str) -> ModelConfig:
    return compose_config([f"model={name}"], CONFIGS).model


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("transformer_1_2b", 1_291_929_600),
        ("nemotron_h_8b", 8_084_075_520),
        ("nemotron_h_12b", 12_314_591_360),
    ],
)
def test_the_papers_models_have_the_papers_sizes(mesh, name, published):
    config = load(name)
    with torch.device("meta"):
        model = build_model(config, mesh, torch.bfloat16)
    assert config.vocab_size == 131072
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert parameter_count(config).total == published


def test_the_patterns_have_the_papers_blocks():
    for name, counts in {
        "nemotron_h_8b": (24, 24, 4),
        "nemotron_h_12b": (28, 28, 6),
        "transformer_1_2b": (0, 20, 20),
    }.items():
        pattern = load(name).pattern
        assert (pattern.count("M"), pattern.count("-"), pattern.count("*")) == counts


@pytest.mark.parametrize("pattern", ["M", "-", "*", "M-*-M-"])
def test_counts_by_part(mesh, pattern):
    config = dataclasses.replace(small_config(), pattern=pattern)
    with torch.device("meta"):
        model = build_model(config, mesh, torch.float32)
    count = parameter_count(config)
    assert count.embedding == model.embedding.weight.numel()
    assert count.head == model.head.weight.numel()
    assert count.linears == sum(linear.weight.numel() for _, linear in model.linears())
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
