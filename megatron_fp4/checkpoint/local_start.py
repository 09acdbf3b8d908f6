"""Which local checkpoint a start goes on from, and reading it.

The first rank of every node lists what lies on its disk, and rank 0 decides: the newest checkpoint of which every
rank's part is on some node, of one save, for as many ranks that hold the same parts of the tensors. A rank whose part
is not on its node gets it from one that has it. Reading is the check; where a part is damaged its other copy is tried,
then the checkpoint before. All learn of each outcome before rank 0 names the next.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_fp4.checkpoint import files, local_files
from megatron_fp4.checkpoint.choice import Check, Chosen, Load, check_origin, choose, is_own
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest
from megatron_fp4.checkpoint.local import LocalCheckpoints
from megatron_fp4.checkpoint.local_files import Key, Part
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.origin import origin_in
from megatron_fp4.checkpoint.random_state import restore_random_state
from megatron_fp4.checkpoint.shards import layout_digest, own_pieces, read_shards, verify, wholes_of
from megatron_fp4.checkpoint.transfer import Incoming, Outgoing, exchange

logger = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A part on a node's disk whose record can be read."""

    key: Key
    save: str
    world_size: int
    layout: str


class _OfRank(NamedTuple):
    """What rank 0 hears of a rank: what is on its node (from the first rank there), and what it would read."""

    found: list[_Found]
    layout: str


@dataclass
class _Candidate:
    """One save, as rank 0 knows it. nodes: of each rank's part, where it lies."""

    start: str
    step: int
    world_size: int
    nodes: dict[int, set[int]] = field(default_factory=dict)
    other_layout: bool = False


class _Plan(NamedTuple):
    """What is to be read. transfers: (from rank, to rank), where a part is not on the node."""

    start: str
    step: int
    save: str
    transfers: list[tuple[int, int]]


class _Problem(NamedTuple):
    """Why a rank could not read its part, and the node whose copy that was."""

    node: int
    text: str


def choose_with_local(
    local: LocalCheckpoints,
    state: dict[str, Any],
    device: torch.device,
    resume: str,
    load: Load,
    check: Check,
    check_identity: Callable[[Path, Manifest], None],
) -> Chosen | None:
    """As `choose`, with local checkpoints: the newest of all that can be had. For a start that goes on with its run.

    check_identity: a collective, which raises ValueError on all ranks for a checkpoint of another run.
    """
    root, together = local.root, local.together
    local.open()
    given = None if resume == "auto" else Path(os.path.realpath(resume))
    if resume == "never" or (given is not None and is_own(root, given)):
        return choose(root, resume, together, load, check)
    search = LocalSearch(local, state, device)
    # Behind all shared ones, whole or not: those that are not are moved aside before anything older is taken.
    found, shared = search.newest(after=together.first("scan", lambda: _newest_step(root))), None
    if found is None:
        shared = choose(root, resume, together, load, check)
        if shared is None and search.touched:
            raise ValueError(
                f"there are local checkpoints of this run, but none is whole ({search.why_unused()}), and no shared "
                f"one under {root}; begin anew with checkpoint.resume=never, or choose another run.dir"
            )
        if shared is not None and shared.damaged:
            search.touched = False
            found = search.newest(after=shared.manifest.step)
            if search.touched:
                load(shared.folder, shared.manifest)
    if found is None:
        search.say_unused(shared)
        return shared
    check_identity(found.folder, found.manifest)
    if given is not None:
        check_origin(found, given, root, together)
    if together.rank == 0:
        logger.warning("going on from the nodes' own disks, which have step %d", found.manifest.step)
    return replace(found, damaged=shared.damaged if shared is not None else ())


def _newest_step(root: Path) -> int:
    return max((files.step_of(folder) for folder in files.list_checkpoints(root)), default=0)


class LocalSearch:
    """The local checkpoints that a start may go on from; every method is a collective.

    state: `state_of` the run, which is loaded into. touched: whether it was loaded into without success since; then
    something else has to be loaded.
    """

    def __init__(self, local: LocalCheckpoints, state: dict[str, Any], device: torch.device) -> None:
        self._local, self._state, self._device = local, state, device
        self._pieces = own_pieces(state, local.nodes.rank, everything=True)
        self._layout = layout_digest(wholes_of(state), self._pieces)
        self.touched = False
        self._candidates: dict[str, _Candidate] = {}  # rank 0's, by the name of the save
        self._reasons: list[str] = []
        of_ranks = local.together.collect("list local checkpoints", lambda: _OfRank(self._list(), self._layout))
        if local.together.rank == 0:
            self._sort(of_ranks)

    def newest(self, after: int) -> Chosen | None:
        """Load the newest one of a step after `after` that is whole; None if there is none.

        Raises CheckpointError on all ranks if it cannot be known.
        """
        together = self._local.together
        while (plan := together.first("choose a local checkpoint", lambda: self._next(after))) is not None:
            if (chosen := self._try(plan)) is not None:
                return chosen
        return None

    def _try(self, plan: _Plan) -> Chosen | None:
        together, local = self._local.together, self._local
        self.touched = True
        loaded: list[tuple[Part, dict[str, Any]]] = []
        problems = together.collect("load a local checkpoint", lambda: self._load(plan, loaded))
        if not together.first("load a local checkpoint", lambda: self._judge(plan, problems)):
            return None
        part, own = loaded[0]
        trainer = together.first("load a local checkpoint", lambda: own)
        local.kept = [(plan.start, plan.step)]
        self.touched = False
        return Chosen(self._folder(plan), part.manifest, trainer, origin=origin_in(trainer), local=True)

    def say_unused(self, shared: Chosen | None) -> None:
        """Say why no local checkpoint is used, where there are some. shared: what is used instead."""
        reasons = list(self._reasons)
        if shared is not None:
            for other in self._candidates.values():
                reasons.append(f"step {other.step}: not newer than the shared one of step {shared.manifest.step}")
        if reasons:
            logger.warning("local checkpoints are not used: %s", "; ".join(reasons))

    def why_unused(self) -> str:
        """Why those that were tried could not be used; the same on all ranks."""
        return self._local.together.first("choose a local checkpoint", lambda: "; ".join(self._reasons))

    # What rank 0 decides

    def _sort(self, of_ranks: list[_OfRank]) -> None:
        """Make candidates of what was found, the newest first."""
        nodes, starts = self._local.nodes, list(self._local.lineage.starts)
        for rank, of_rank in enumerate(of_ranks):
            for found in of_rank.found:
                candidate = self._candidates.setdefault(
                    found.save, _Candidate(found.key.start, found.key.step, found.world_size)
                )
                if found.key[::2] != (candidate.start, candidate.step) or found.world_size != candidate.world_size:
                    continue  # made up
                candidate.nodes.setdefault(found.key.rank, set()).add(nodes.node_of(rank))
                if found.key.rank < len(of_ranks) and found.layout != of_ranks[found.key.rank].layout:
                    candidate.other_layout = True
        newest_first = sorted(self._candidates.items(), key=lambda item: (starts.index(item[1].start), -item[1].step))
        self._candidates = dict(newest_first)

    def _next(self, after: int) -> _Plan | None:
        """The newest candidate after a step that can be had; those that cannot are left out, with the reason."""
        nodes = self._local.nodes
        for save, candidate in list(self._candidates.items()):
            if candidate.step <= after:
                continue
            if reason := self._unfit(candidate):
                del self._candidates[save]
                self._reasons.append(f"step {candidate.step}: {reason}")
                continue
            transfers = []
            for rank in range(nodes.world_size):
                if nodes.node_of(rank) not in candidate.nodes[rank]:
                    transfers.append((nodes.neighbour_on(min(candidate.nodes[rank]), rank), rank))
            return _Plan(candidate.start, candidate.step, save, transfers)
        return None

    def _unfit(self, candidate: _Candidate) -> str | None:
        world_size = self._local.nodes.world_size
        if candidate.world_size != world_size:
            return f"of {candidate.world_size} ranks, the run has {world_size}"
        if candidate.other_layout:
            return "the tensors were cut in another way over the ranks"
        if candidate.step >= self._local.before:
            return f"not before the last step of the run, {self._local.before}"
        missing = [rank for rank in range(world_size) if not candidate.nodes.get(rank)]
        if missing:
            return f"no node has the part of rank {', '.join(map(str, missing))}"
        return None

    def _judge(self, plan: _Plan, problems: list[_Problem | None]) -> bool:
        """Whether all ranks have it. Copies that cannot be read are not asked for again."""
        for rank, problem in enumerate(problems):
            if problem is not None:
                logger.error("LOCAL CHECKPOINT DAMAGED: step %d, part of rank %d: %s", plan.step, rank, problem.text)
                self._candidates[plan.save].nodes[rank].discard(problem.node)
        return not any(problems)

    # What every rank does

    def _list(self) -> list[_Found]:
        """What is on this node's disk, on its first rank."""
        local, found = self._local, []
        if not local.nodes.first_here:
            return []
        for folder, key in local_files.parts_here(local.run_folder, local.lineage.starts):
            try:
                part = local_files.read_part(folder, local.lineage.run, key)
            except (DamagedCheckpointError, OSError) as error:
                logger.warning("%s: %s", folder, error)
            else:
                found.append(_Found(key, part.save, part.world_size, part.layout))
        return found

    def _folder(self, plan: _Plan) -> Path:
        return self._local.folder(Key(plan.start, self._local.nodes.rank, plan.step))

    def _load(self, plan: _Plan, loaded: list[tuple[Part, dict[str, Any]]]) -> _Problem | None:
        """Get this rank's part, if it has to, and read it; appends it to `loaded`, or returns what is wrong with it."""
        nodes = self._local.nodes
        problem: _Problem | None = None
        for holder, rank in plan.transfers:  # in the same order everywhere, so that no two wait for each other
            if nodes.rank not in (holder, rank):
                continue
            error = self._transfer(plan, holder, rank)
            if nodes.rank == rank and error is not None:
                problem = _Problem(nodes.node_of(holder), error)
        if problem is not None:
            return problem
        try:
            loaded.append(self._read(plan))
        except Exception as error:  # whatever is made of damaged bytes
            text = str(error) if isinstance(error, DamagedCheckpointError) else f"{type(error).__name__}: {error}"
            return _Problem(nodes.node_of(nodes.rank), f"{self._folder(plan)}: {text}")
        return None

    def _transfer(self, plan: _Plan, holder: int, rank: int) -> str | None:
        """Send a part, or receive it and store it here; returns what went wrong."""
        local, key = self._local, Key(plan.start, rank, plan.step)
        folder = local.folder(key)
        try:
            if local.nodes.rank == holder:
                exchange(local.together.group, Outgoing(folder, rank), None)
            else:
                exchange(local.together.group, None, Incoming(local_files.temporary(folder), holder, key))
                local_files.publish(folder)
        except (DamagedCheckpointError, OSError) as error:
            return f"the copy of rank {holder}'s node: {error}"
        return None

    def _read(self, plan: _Plan) -> tuple[Part, dict[str, Any]]:
        """Read this rank's part into the run; returns its record and the trainer's state."""
        folder, nodes = self._folder(plan), self._local.nodes
        part = local_files.read_part(folder, self._local.lineage.run, Key(plan.start, nodes.rank, plan.step))
        if (part.save, part.world_size, part.layout) != (plan.save, nodes.world_size, self._layout):
            raise DamagedCheckpointError(f"{local_files.RECORD} is of another save")
        small = {
            name: files.read_checked(folder, name, _record(part, name))
            for name in (METADATA, files.RANDOM_STATE, files.TRAINER)
        }
        metadata = read_metadata(small[METADATA])
        wholes = wholes_of(self._state)
        held = {(wholes[piece.tensor].name, piece.offsets) for piece in self._pieces}
        if held != {(place.fqn, tuple(place.offset or ())) for place in metadata.storage_data}:
            raise DamagedCheckpointError(f"{METADATA} does not describe what this rank holds")
        read = read_shards(folder, metadata, part.files, self._state)
        verify(folder, part.files, part.files.keys() - read - small.keys())
        trainer = json.loads(small[files.TRAINER])
        restore_random_state(small[files.RANDOM_STATE], self._device)
        return part, trainer


def _record(part: Part, name: str) -> files.FileRecord:
    if name not in part.files:
        raise DamagedCheckpointError(f"{local_files.RECORD} does not name {name}")
    return part.files[name]
