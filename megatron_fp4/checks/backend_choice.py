"""Which backend a run computes with, decided once from configuration and machine.

`emulated` runs anywhere. `transformer_engine` and `torch` are refused, with the reason, where they cannot run. `auto`
is transformer_engine where the run's recipes, the GPU and the installation all allow it, and else emulated; either way
the reason is shown with the backend's name, because speed depends on it. `auto` is never `torch`, which no chip has run
yet: who has one names it, and the self-test says whether it computes what it should.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fp4.checks.precision import parts, transformer_engine_refusal
from megatron_fp4.checks.torch_backend import torch_refusal
from megatron_fp4.config.schema import Config, ConfigError, PrecisionConfig
from megatron_fp4.precision import torch_scaled_mm
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.sizes import native_size_refusal
from megatron_fp4.precision.te_releases import outdated


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and why this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def open(self) -> Backend:
        """The backend itself."""
        if self.name == "torch":
            return torch_scaled_mm.TorchBackend()
        return te.TransformerEngineBackend() if self.name == "transformer_engine" else EMULATED


def choose_backend(config: Config, device_type: str, plans: Iterable[Plan | None]) -> BackendChoice:
    """The backend for a checked `config` on this machine's `device_type`. plans: before and after its switch, if any.

    Raises ConfigError if `precision.backend=transformer_engine` or `torch` cannot be had, or if the first would be used
    and an environment variable asks it for inexact arithmetic.
    """
    wanted = config.precision.backend
    if wanted == "emulated":
        return BackendChoice("emulated", "as precision.backend says")
    precisions = {"precision": config.precision}
    if config.after_switch is not None:
        precisions[f"precision.switch.target={config.precision.switch.target}: precision"] = config.after_switch
    if wanted == "auto" and not any(recipe.quantized for recipe in _recipes(precisions)):
        return BackendChoice("emulated", "nothing is quantized")
    if wanted == "torch":
        return _torch(precisions, device_type)
    refusal = _refusal(precisions, plans, config.parallel.tensor, device_type)
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


def _refusal(
    precisions: Mapping[str, PrecisionConfig], plans: Iterable[Plan | None], tensor: int, device_type: str
) -> str | None:
    for key, precision in precisions.items():
        if refusal := transformer_engine_refusal(precision, key):
            return f"it cannot do {refusal[0]}"
    for plan in plans:
        if plan is not None and (refusal := native_size_refusal(plan, tensor)):
            return f"it cannot do {refusal[0]}"
    if device_type != "cuda":
        return f"the run is on {device_type}"
    if torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability()
    for recipe in _recipes(precisions):
        if reason := te.unsupported(recipe, capability) or outdated(recipe, capability):
            return reason
    return te.not_installed()


def _torch(precisions: Mapping[str, PrecisionConfig], device_type: str) -> BackendChoice:
    """The backend `torch`; ConfigError where it cannot run."""
    refusal = None
    for where, part in _parts(precisions):
        if found := torch_refusal(part, where):
            refusal = refusal or f"it cannot do {found[0]}"
    if refusal is None and device_type != "cuda":
        refusal = f"the run is on {device_type}"
    for recipe in _recipes(precisions):
        if refusal is None:
            refusal = torch_scaled_mm.unsupported(recipe, torch.cuda.get_device_capability())
    if refusal is not None:
        raise ConfigError(
            f"precision.backend=torch: {refusal}; use precision.backend=emulated, which has the same codes"
        )
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return BackendChoice("torch", f"our codes, tensor cores of compute capability {capability}")


def _parts(precisions: Mapping[str, PrecisionConfig]) -> list[tuple[str, PrecisionConfig]]:
    """The precision configs and what their exceptions make of them, with their keys."""
    return [found for key, whole in precisions.items() for found in parts(whole, key)]


def _recipes(precisions: Mapping[str, PrecisionConfig]) -> list[Recipe]:
    """Of the precision configs and of their exceptions."""
    return [recipe_from_config(part) for _, part in _parts(precisions)]


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
