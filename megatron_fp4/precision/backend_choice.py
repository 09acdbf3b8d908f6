"""Which backend a run computes with, decided once from configuration and machine.

`emulated` runs anywhere. `transformer_engine` and `torch` are refused, with the reason, where they cannot run. `auto`
is transformer_engine where the run's recipes, the GPU and the installation all allow it, and else emulated; either way
the reason is shown with the backend's name, because speed depends on it. `auto` is never `torch`, which no chip has run
yet: who has one names it, and the self-test says whether it computes what it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.refusals import first_refusal, recipes_by_key, refused_here
from megatron_fp4.precision.sizes import native_size_refusal
from megatron_fp4.precision.torch_scaled_mm import TorchBackend

BACKENDS: dict[str, Callable[[], Backend]] = {
    "emulated": lambda: EMULATED,
    "transformer_engine": te.TransformerEngineBackend,
    "torch": TorchBackend,
}


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and why this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def open(self) -> Backend:
        """The backend itself."""
        return BACKENDS[self.name]()


def choose_backend(config: Config, device_type: str, plans: Iterable[Plan | None]) -> BackendChoice:
    """The backend for a checked `config` on this machine's `device_type`. plans: before and after its switch, if any.

    Raises ConfigError if `precision.backend=transformer_engine` or `torch` cannot be had, or if the first would be used
    and an environment variable asks it for inexact arithmetic.
    """
    wanted = config.precision.backend
    if wanted == "emulated":
        return BackendChoice("emulated", "as precision.backend says")
    recipes = recipes_by_key(config.precision, "precision")
    if config.after_switch is not None:
        key = f"precision.switch.target={config.precision.switch.target}: precision"
        recipes |= recipes_by_key(config.after_switch, key)
    if wanted == "auto" and not any(recipe.quantized for recipe in recipes.values()):
        return BackendChoice("emulated", "nothing is quantized")
    native = "transformer_engine" if wanted == "auto" else wanted
    refusal = first_refusal(native, recipes, config.precision.compute_dtype)
    if native == "transformer_engine" and refusal is None:
        sizes = (native_size_refusal(plan, config.parallel.tensor) for plan in plans if plan is not None)
        refusal = next(filter(None, sizes), None)
    reason = f"it cannot do {refusal.problem}" if refusal else refused_here(native, recipes.values(), device_type)
    if reason is not None and wanted == "auto":
        return BackendChoice("emulated", f"not {native}: {reason}")
    if reason is not None:
        same = ", which has the same codes" if native == "torch" else ""
        raise ConfigError(f"precision.backend={native}: {reason}; use precision.backend=emulated{same}")
    if native == "transformer_engine" and (variable := te.fast_math_variable()):
        raise ConfigError(
            f"{variable} is set, which makes Transformer Engine quantize inexactly; unset it, or use "
            "precision.backend=emulated"
        )
    why = {"transformer_engine": "native on", "torch": "our codes, tensor cores of"}[native]
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return BackendChoice(native, f"{why} compute capability {capability}")


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
