"""A run on one rank, in this process, for tests of checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.files import origin_state
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from tests.training.harness import toy

NONE: Mapping[str, Any] = MappingProxyType({})


class Job:
    """One start of a run: a model and its checkpointer. All weights of a saved model are equal to its step.

    settings: of the checkpointer.
    """

    def __init__(self, root: Path, mesh: ParallelMesh, settings: Mapping[str, Any] = NONE, **identity: Any) -> None:
        self.root = root
        self.model, self.optimizer = toy(mesh)
        self.step_state = StepState(0)
        self.checkpointer = Checkpointer(root, mesh, keep=0, identity={"hidden": 12, **identity}, **settings)
        self.checkpointer.prepare(self.model, self.optimizer)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def save(self, step: int, last: bool = False, **trainer: Any) -> Path:
        self.fill(step)
        state = {**trainer, "origin": origin_state(self.checkpointer.origin)}
        return self.checkpointer.save(
            step, self.model, self.optimizer, state, consumed_samples=step, consumed_tokens=step, last=last
        )

    def resume(self, resume: str = "auto", allow_mismatch: bool = False) -> int | None:
        self.fill(-1)
        resumed = self.checkpointer.resume(
            resume, self.model, self.optimizer, self.step_state, allow_mismatch=allow_mismatch
        )
        if resumed is None:
            return None
        weights = {local_part(parameter).unique().item() for parameter in self.model.parameters()}
        assert weights == {resumed.step} and self.step_state.weights_version >= 1
        return resumed.step


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, name: str, content: bytes | str, **changes: Any) -> None:
    """Replace a file of a checkpoint and its record in the manifest, and change other fields of the manifest."""
    record, manifest = files.write_file(folder / name, content), files.read_manifest(folder)
    files.write_manifest(folder, replace(manifest, files={**manifest.files, name: record}, **changes))


def rewrite_trainer(folder: Path, state: Any, **changes: Any) -> None:
    rewrite(folder, files.TRAINER, json.dumps(state), **changes)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
