"""Compare what several ranks should hold identically, every `run.replicas_interval` steps and before each checkpoint.

    ranks along an axis of the mesh     weights and moments that are not sharded over it: all of a replica
                                        (parallel.replicate); norms, dt bias, ... of a tensor-parallel group
    all ranks                           buffers, the position in the data, the step's state, torch's generators

Losses and norms are sums over all these ranks, so a wrong copy on one rank is not visible in them, and each update
keeps the difference. Ranks exchange checksums in one small message; only after a difference they exchange more.

It cannot detect a wrong shard that only one rank holds (measure/replay.py checks computations), or copies that are
wrong in the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.measure.replay import checksum
from megatron_fp4.parallel.parameters import copy_axes
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.runtime.errors import WrongNumbersError
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.trainer import Callback, Step, Trainer, is_due

# The most groups of ranks whose differences are located; the elements of a tensor that are compared at once to locate
# them; and the most numbers that are recorded.
_LOCATED, _PART, _SHOWN = 4, 1 << 16, 8


@dataclass(frozen=True)
class Difference:
    """The difference between the ranks of one group.

    names: of the tensors or states that differ. sums: checksums of the first one, by rank. values: if that is a tensor,
    its first numbers that differ, by rank. places: the positions of these numbers in a rank's part, flattened.
    """

    names: list[str]
    sums: dict[int, list[int]]
    places: list[int] = field(default_factory=list)
    values: dict[int, list[float]] = field(default_factory=dict)

    @property
    def wrong(self) -> list[int]:
        """The ranks that differ from a majority; empty if there is no majority."""
        [(most, number)] = Counter(map(tuple, self.sums.values())).most_common(1)
        return [rank for rank, sums in self.sums.items() if tuple(sums) != most] if 2 * number > len(self.sums) else []

    def __str__(self) -> str:
        ranks, more = ", ".join(map(str, self.sums)), len(self.names) - 1
        text = f"ranks {ranks} hold different {self.names[0]}{f' (and {more} more)' if more else ''}"
        if self.values:
            text += f" ({', '.join(f'{values[0]:.9g}' for values in self.values.values())} at place {self.places[0]})"
        return f"{text}, against the majority: {', '.join(map(str, self.wrong))}" if self.wrong else text


class Replicas(Callback):
    """Ends the run if ranks that should hold the same do not."""

    def start(self, done: int) -> None:
        self._agreed: int | None = None
        self._compared: int | None = None
        self.compare(done)

    def after_step(self, step: Step) -> None:
        if is_due(self.trainer.config.run.replicas_interval, step.done):
            self.compare(step.done)

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        self._compared = None

    def on_checkpoint(self, done: int) -> None:
        self.compare(done)

    def compare(self, done: int) -> None:
        """Raises WrongNumbersError on all ranks, with the same message. A collective."""
        trainer, mesh = self.trainer, self.trainer.mesh
        if self._compared == done or mesh.world_size == 1:
            return
        trainer.progress.at(done, "compare replicas")
        number, differences = compare(trainer)
        if not number:
            self._agreed = self._compared = done
            return
        records = [vars(difference) for difference in differences]
        trainer.log.metrics.event(
            done, "replicas", agreed=self._agreed, mesh=mesh.sizes, groups=number, differences=records
        )
        since = "at the start" if self._agreed is None else f"after step {self._agreed}"
        more = f". {number - len(differences)} more groups of ranks differ" if number > len(differences) else ""
        find = (
            f"torchrun --nproc-per-node {mesh.world_size} scripts/replay.py --trust-config {trainer.config.run.dir} "
            f"--step {done} (on as many ranks, on several nodes if need be) finds which of them is wrong; "
        )
        raise WrongNumbersError(
            f"after step {done} {'. '.join(map(str, differences))}{more}. They agreed {since}. "
            f"{'' if differences[0].wrong or not done else find}continue from a checkpoint without that machine, or "
            "set run.replicas_interval=0 to continue without this check"
        )


def tensors_of(trainer: Trainer) -> dict[str, tuple[Tensor, list[str]]]:
    """This rank's part of each tensor that other ranks hold too, and along which axes of the mesh."""
    mesh, parameters = trainer.mesh, dict(trainer.model.named_parameters())
    moments = optimizer_state(trainer.model, trainer.optimizer)
    copied = {}
    for name, tensor in {**parameters, **moments}.items():
        parameter = parameters[name if name in parameters else name.rpartition(".")[0]]
        if axes := [axis for axis in copy_axes(parameter, mesh) if mesh.sizes[axis] > 1]:
            copied[name] = local_part(tensor), axes
    return copied


def checksums_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Checksums (int64 [3] on the mesh's device) of what this rank should hold like the others along each axis of the
    mesh, and like `all` ranks; by name."""
    device, state = trainer.mesh.device, trainer.precision.step_state
    shared: dict[str, dict[str, Tensor]] = {**{axis: {} for axis in trainer.mesh.sizes}, "all": {}}
    for name, (tensor, axes) in tensors_of(trainer).items():
        own_sum = checksum(tensor).to(device)
        for axis in axes:
            shared[axis][name] = own_sum
    shared["all"] |= {name: checksum(buffer).to(device) for name, buffer in trainer.model.named_buffers()}
    states = {
        "data": json.dumps(trainer.data.loader.state_dict()).encode(),
        "seed, step and version of weights": repr((state.seed, state.step, state.weights_version)).encode(),
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        states["the GPU's generator"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    for name, content in states.items():
        digest = bytearray(hashlib.blake2b(content, digest_size=24).digest())
        shared["all"][name] = torch.frombuffer(digest, dtype=torch.int64).to(device)
    return shared


def compare(trainer: Trainer) -> tuple[int, list[Difference]]:
    """How many groups of ranks differ, and the first differences; the same on all ranks. A collective."""
    mesh, shared = trainer.mesh, checksums_of(trainer)
    summed = torch.stack([_sum_of(sums, mesh.device) for sums in shared.values()])
    of_ranks = [torch.empty_like(summed) for _ in range(mesh.world_size)]
    dist.all_gather(of_ranks, summed)
    found, ranks = torch.stack(of_ranks).cpu(), mesh.device_mesh.mesh
    groups = {axis: ranks.movedim(i, -1).reshape(-1, size) for i, (axis, size) in enumerate(mesh.sizes.items())}
    groups["all"] = ranks.reshape(1, -1)
    differing = [
        (kind, group.tolist())
        for index, kind in enumerate(shared)
        for group in groups[kind]
        if not bool((found[group, index] == found[group[0], index]).all())
    ]
    return len(differing), [_difference(trainer, shared[kind], group) for kind, group in differing[:_LOCATED]]


def _sum_of(sums: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One checksum of several, int64 [3]. Each is multiplied by another odd number, so that any change shows."""
    if not sums:
        return torch.zeros(3, dtype=torch.int64, device=device)
    together = torch.stack(list(sums.values()))
    return (together * torch.arange(1, 2 * len(together), 2, device=device)[:, None]).sum(0)


def _difference(trainer: Trainer, sums: Mapping[str, Tensor], group: list[int]) -> Difference:
    """Where the ranks of `group` differ. A collective of all ranks."""

    def from_group(mine: Any) -> dict[int, Any]:
        of_ranks = [None] * trainer.mesh.world_size
        dist.all_gather_object(of_ranks, mine if trainer.mesh.rank in group else None)
        return {rank: of_ranks[rank] for rank in group}

    of_ranks = from_group({name: found.tolist() for name, found in sums.items()})
    names = [name for name in sums if any(found[name] != of_ranks[group[0]][name] for found in of_ranks.values())]
    difference = Difference(names, {rank: found[names[0]] for rank, found in of_ranks.items()})
    tensor, _ = tensors_of(trainer).get(names[0], (None, []))
    if tensor is None:
        return difference
    # First find the part that differs, then the numbers in it. Compare bits: zeros and NaN have several patterns.
    parts = tensor.flatten().split(_PART)
    of_parts = from_group([checksum(part).tolist() for part in parts])
    sums_of_parts = zip(*of_parts.values(), strict=True)
    part = next(i for i, found in enumerate(sums_of_parts) if any(one != found[0] for one in found))
    mine = parts[part] if trainer.mesh.rank in group else tensor.new_zeros(0)
    bits, numbers = from_group(mine.view(torch.int32).tolist()), from_group(mine.tolist())
    places = [i for i, values in enumerate(zip(*bits.values(), strict=True)) if len(set(values)) > 1][:_SHOWN]
    values = {rank: [found[place] for place in places] for rank, found in numbers.items()}
    return replace(difference, places=[part * _PART + place for place in places], values=values)
