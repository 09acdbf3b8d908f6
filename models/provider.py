"""What a trainer asks of the models of this package: `pretrain.py` hands this module over, as Megatron's pretrain
scripts hand over their model provider. megatron_fp4/training/providers.py describes each name."""

from __future__ import annotations

from megatron_fp4.config.schema import Config
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from models.pattern import (
    MIXERS,
    agreed_execution,
    check_exceptions,
    check_model,
    check_size,
    choose_execution,
    describe_execution,
    forward_flops_per_token,
    linear_shapes,
    parameter_count,
    shared_by_tensor_ranks,
    training_flops_per_token,
)
from models.planned import planned_execution

__all__ = [
    "agreed_execution",
    "build_model",
    "check",
    "check_exceptions",
    "choose_execution",
    "describe_execution",
    "forward_flops_per_token",
    "initialize",
    "kernel_facts",
    "linear_shapes",
    "parameter_count",
    "parts",
    "planned_execution",
    "shared_by_tensor_ranks",
    "training_flops_per_token",
]


def check(config: Config) -> None:
    """Raise ConfigError for a model that cannot be."""
    check_model(config.model)
    check_size(config.model)


def parts(model: HybridModel, config: Config) -> list[tuple[str, int, int]]:
    """What the model consists of: name, number and parameters, in the order of the forward pass."""
    counts, pattern = parameter_count(config.model), config.model.pattern
    rows = [("embedding", 1, counts.embedding)]
    for letter, mixer in MIXERS.items():
        if own := [block for block, of in zip(model.blocks, pattern, strict=True) if of == letter]:
            numel = sum(parameter.numel() for block in own for parameter in block.parameters())
            rows.append((f"{mixer.name} blocks", len(own), numel))
    return [*rows, ("final norm", 1, config.model.hidden_dim), ("head", 1, counts.head)]


def kernel_facts(model: HybridModel, config: Config, device_type: str) -> dict[str, str | None]:
    """Which kernels compute the model, and what determinism costs there: for people."""
    pattern, masked = config.model.pattern, config.data.documents == "masked"
    slower = config.run.deterministic and device_type == "cuda"
    return {
        "kernels": describe_execution(model.execution, pattern, masked),
        "activation checkpointing": model.execution.recompute,
        "determinism": "on; run.deterministic=false is faster" if slower else None,
    }
