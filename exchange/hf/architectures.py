"""Which architecture of transformers a model is."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from exchange.hf import arcee, nemotron_h
from megatron_fp4.config.schema import ModelConfig

ARCHITECTURES: dict[str, ModuleType] = {module.MODEL_TYPE: module for module in (arcee, nemotron_h)}
"""model_type -> the module with its `misfit`, `sections`, `to_hf` and `from_hf`."""


def architecture_of(config: ModelConfig) -> ModuleType:
    """The architecture that computes what `config` computes. Raises ValueError, with the reasons, if there is none."""
    reasons = {}
    for name, module in ARCHITECTURES.items():
        reason = module.misfit(config)
        if reason is None:
            return module
        reasons[name] = reason
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no architecture of transformers is this model ({listing}), so there is nothing to export it as")


def architecture_in(config: Mapping[str, Any]) -> ModuleType:
    """The architecture that a config.json names. Raises ValueError if it is none of ours."""
    name = config.get("model_type")
    if name not in ARCHITECTURES:
        raise ValueError(f"model_type={name} cannot be imported; {', '.join(ARCHITECTURES)} can")
    return ARCHITECTURES[name]
