"""Which backend a run computes with, decided once from configuration and machine.

`emulated` runs anywhere. `transformer_engine` is refused, with the reason, where it cannot run. `auto` is
transformer_engine where the run's recipes, the GPU and the installation all allow it, and else emulated; either way
the reason is shown with the backend's name, because speed depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fp4.config import Config, ConfigError, PrecisionConfig
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.validate_precision import parts, transformer_engine_refusal


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and why this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def open(self) -> Backend:
        """The backend itself."""
        return te.TransformerEngineBackend() if self.name == "transformer_engine" else EMULATED


def choose_backend(config: Config, target: PrecisionConfig, device_type: str) -> BackendChoice:
    """The backend for a checked `config` that may switch to `target`, on this machine's `device_type`.

    Raises ConfigError if `precision.backend=transformer_engine` cannot be had, or if it would be used and an
    environment variable asks it for inexact arithmetic.
    """
    wanted = config.precision.backend
    if wanted == "emulated":
        return BackendChoice("emulated", "as precision.backend says")
    precisions = {"precision": config.precision}
    if config.precision.switch.when != "never":
        precisions[f"precision.switch.target={config.precision.switch.target}: precision"] = target
    if wanted == "auto" and not any(recipe.quantized for recipe in _recipes(precisions)):
        return BackendChoice("emulated", "nothing is quantized")
    refusal = _refusal(precisions, config, device_type)
    if refusal is not None and wanted == "transformer_engine":
        raise ConfigError(f"precision.backend=transformer_engine: {refusal}; use precision.backend=emulated")
    if refusal is not None:
        return BackendChoice("emulated", f"not transformer_engine: {refusal}")
    if variable := te.fast_math_variable():
        raise ConfigError(
            f"{variable} is set, which makes Transformer Engine quantize inexactly; unset it, or use "
            "precision.backend=emulated"
        )
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return BackendChoice("transformer_engine", f"native on compute capability {capability}")


def _refusal(precisions: Mapping[str, PrecisionConfig], config: Config, device_type: str) -> str | None:
    for key, precision in precisions.items():
        if refusal := transformer_engine_refusal(precision, config, key):
            return f"it cannot do {refusal[0]}"
    if device_type != "cuda":
        return f"the run is on {device_type}"
    if torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    for recipe in _recipes(precisions):
        if reason := te.unsupported(recipe, torch.cuda.get_device_capability()):
            return reason
    return te.not_installed()


def _recipes(precisions: Mapping[str, PrecisionConfig]) -> list[Recipe]:
    """Of the precision configs and of their exceptions."""
    return [recipe_from_config(part) for key, whole in precisions.items() for _, part in parts(whole, key)]


def agreed_backend(choice: BackendChoice) -> BackendChoice:
    """`choice`, if all ranks chose alike; a collective. Raises ConfigError if they did not."""
    choices: list[BackendChoice] = [choice] * dist.get_world_size()
    dist.all_gather_object(choices, choice)
    for rank, other in enumerate(choices):
        if other.name != choices[0].name:
            raise ConfigError(
                f"precision.backend=auto is {choices[0]} on rank 0, but {other} on rank {rank}; make the machines "
                "alike, or name the backend"
            )
    return choice
