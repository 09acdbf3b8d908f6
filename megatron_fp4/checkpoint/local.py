"""Checkpoints on the nodes' own disks, between the shared ones: written fast, of use while the nodes' disks last.

Every rank writes all that it holds into `checkpoint.local_dir`, and sends it to its partner on the next node, whose
disk then holds it too. A local checkpoint is complete once every part is on its disk: only after all ranks said so do
they rename their folders. local_files.py says what lies where, local_start.py how a start finds and reads it.

What may go wrong here never ends a run: a local save that fails is left out, and the shared ones are as they were.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_fp4.checkpoint import files, local_files
from megatron_fp4.checkpoint.local_files import Key, Lineage, Part
from megatron_fp4.checkpoint.metadata import METADATA, metadata_of
from megatron_fp4.checkpoint.saves import Snapshot
from megatron_fp4.checkpoint.shards import layout_digest, write_shards
from megatron_fp4.checkpoint.together import CheckpointError, Together
from megatron_fp4.checkpoint.transfer import Incoming, Outgoing, exchange

logger = logging.getLogger(__name__)
_KEEP = 2


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on which node. per_node: ranks of each, which follow each other."""

    rank: int
    world_size: int
    per_node: int

    @property
    def first_here(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank % self.per_node == 0

    @property
    def several(self) -> bool:
        """Whether there is another node that can hold a copy."""
        return self.world_size > self.per_node

    @property
    def partner(self) -> int:
        """The rank, on the next node, that keeps this rank's copy."""
        return (self.rank + self.per_node) % self.world_size

    @property
    def ward(self) -> int:
        """The rank whose copy this one keeps."""
        return (self.rank - self.per_node) % self.world_size

    def node_of(self, rank: int) -> int:
        """The number of the node that a rank is on."""
        return rank // self.per_node

    def neighbour_on(self, node: int, rank: int) -> int:
        """The rank of a node that has the place there which `rank` has on its own."""
        return node * self.per_node + rank % self.per_node


class LocalCheckpoints:
    """The local checkpoints of one start of a run; every method is a collective unless it says otherwise.

    local_dir: a folder on each node's own disk. root: the folder of the shared checkpoints. in_background: the group of
    the saves, which may run in a thread. before: only those of
    earlier steps are of use (the last step's is always a shared one).
    kept: the newest that are complete, as (start, step), the newest first. before_publish: called on rank 0 before a
    local checkpoint gets its name.
    """

    def __init__(self, local_dir: Path, root: Path, together: Together, in_background: Together, before: int) -> None:
        self.local_dir, self.root, self.before = local_dir.absolute(), root, before
        self.together, self._in_background = together, in_background
        self.kept: list[tuple[str, int]] = []
        self.before_publish: Callable[[], None] = lambda: None
        self._noted: Lineage | None = None

    def open(self) -> None:
        """Look at the nodes and their folders. Raises ValueError, the same on all ranks, if they cannot be used."""
        together = self.together
        found = together.first("read which local checkpoints count", lambda: local_files.read_lineage(self.root))
        self._noted = found
        self.lineage = found or together.first("begin", lambda: Lineage(local_files.new_id()))
        self.start: str = together.first("begin", local_files.new_id)
        places = together.collect("look at nodes", _place)
        per_node, problem = together.first("look at nodes", lambda: _per_node(places))
        if problem is not None:
            raise ValueError(problem)
        self.nodes = Nodes(together.rank, together.world_size, per_node)
        probe = self.local_dir / f".probe_{self.start}"
        try:
            together.each("use checkpoint.local_dir", lambda: self._leave(probe))
            seen = together.collect("use checkpoint.local_dir", lambda: len([*self.local_dir.glob(f"{probe.name}_*")]))
        except CheckpointError as error:
            raise ValueError(f"checkpoint.local_dir cannot be used on every node: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                probe.with_name(f"{probe.name}_{self.nodes.rank}").unlink()
        if together.first("use checkpoint.local_dir", lambda: max(seen) > 1):
            raise ValueError(
                f"checkpoint.local_dir={self.local_dir} is one folder that several nodes share; name a folder on each "
                "node's own disk, or set checkpoint.local_dir=null"
            )

    @cached_property
    def run_folder(self) -> Path:
        """Of this run on this node."""
        return local_files.run_folder(self.local_dir, self.lineage.run)

    def folder(self, key: Key) -> Path:
        """Where a part lies on this node, or would."""
        return local_files.part_folder(self.run_folder, key)

    def save(self, snapshot: Snapshot, abandoned: Callable[[], bool]) -> None:
        """Write one. Raises CheckpointError on all ranks if it is not complete everywhere."""
        together, nodes, step = self._in_background, self.nodes, snapshot.manifest.step
        own = self.folder(Key(self.start, nodes.rank, step))
        copy = self.folder(key := Key(self.start, nodes.ward, step))
        written = [own, copy] if nodes.several else [own]
        try:
            save = together.first("begin a local checkpoint", local_files.new_id)
            together.each("find room for a local checkpoint", lambda: self._look_for_space(snapshot))
            together.each("write a local checkpoint", lambda: self._write_own(own, snapshot, save, abandoned))
            if nodes.several:
                outgoing = Outgoing(local_files.temporary(own), nodes.partner)
                incoming = Incoming(local_files.temporary(copy), nodes.ward, key)
                together.each("keep a partner's copy", lambda: exchange(together.group, outgoing, incoming))
            together.each("name a local checkpoint", lambda: self._publish(written, abandoned))
        except CheckpointError:
            for folder in written:
                shutil.rmtree(local_files.temporary(folder), ignore_errors=True)
            raise
        self.kept = [(self.start, step), *self.kept][:_KEEP]
        together.first("note which local checkpoints count", self.note)
        if nodes.first_here:
            try:
                local_files.prune(self.run_folder, self.kept)
            except OSError as error:  # the new one is complete, and that is what matters
                logger.warning("could not remove old local checkpoints: %s", error)

    def note(self) -> None:
        """Note in run.dir that what this start saves counts, instead of what others saved that it did not go on from.

        Not a collective: the first rank does it, once something of this start is saved, here or in run.dir.
        """
        starts = dict.fromkeys([self.start, *(start for start, _ in self.kept)])
        lineage = Lineage(self.lineage.run, tuple(starts))
        if lineage != self._noted:
            local_files.write_lineage(self.root, lineage)
            self._noted = lineage

    def clear_unfinished(self) -> None:
        """Remove what interrupted saves left on this node. Not a collective."""
        if self.nodes.first_here:
            try:
                local_files.remove_unfinished(self.run_folder)
            except OSError as error:
                logger.warning("could not remove unfinished local checkpoints: %s", error)

    def _look_for_space(self, snapshot: Snapshot) -> None:
        """On the first rank of a node, whose others have about as much. Raises OSError."""
        if not self.nodes.first_here:
            return
        own = sum(piece.values.nbytes for piece in snapshot.pieces)
        needed = own * self.nodes.per_node * (2 if self.nodes.several else 1)
        self.local_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.local_dir).free
        if needed > free:
            text = f"a local checkpoint needs {needed / 1e9:.2f} GB on each node, and {free / 1e9:.2f} GB are free"
            raise OSError(errno.ENOSPC, text, str(self.local_dir))

    def _write_own(self, final: Path, snapshot: Snapshot, save: str, abandoned: Callable[[], bool]) -> None:
        folder = local_files.temporary(final)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        written = write_shards(folder, self.nodes.rank, snapshot.pieces, abandoned)
        records = {name: file.record for name, file in written.items()}
        layouts = {name: file.layout for name, file in written.items()}
        for name, content in (
            (METADATA, metadata_of(snapshot.tensors, layouts)),
            (files.RANDOM_STATE, snapshot.generators),
            (files.TRAINER, snapshot.trainer.encode()),
        ):
            records[name] = files.write_file(folder / name, content)
        manifest = snapshot.manifest
        part = Part(
            run=self.lineage.run,
            start=self.start,
            save=save,
            rank=self.nodes.rank,
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            consumed_tokens=manifest.consumed_tokens,
            world_size=self.nodes.world_size,
            layout=layout_digest(snapshot.tensors, snapshot.pieces),
            identity=manifest.identity,
            files=records,
            torch_version=manifest.torch_version,
        )
        files.write_file(folder / local_files.RECORD, local_files.encode(part))
        files.sync_folder(folder)

    def _publish(self, written: list[Path], abandoned: Callable[[], bool]) -> None:
        if abandoned():
            raise InterruptedError("the run ended while it was being written")
        if self.nodes.rank == 0:
            self.before_publish()
        for folder in written:
            local_files.publish(folder)

    def _leave(self, probe: Path) -> None:
        self.local_dir.mkdir(parents=True, exist_ok=True)
        if self.nodes.first_here:
            files.write_file(probe.with_name(f"{probe.name}_{self.nodes.rank}"), b"")


def _place() -> tuple[int, int]:
    """Ranks on this node, and this one's place among them, as torchrun says; 0 ranks if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)), int(os.environ.get("LOCAL_RANK", 0))


def _per_node(places: list[tuple[int, int]]) -> tuple[int, str | None]:
    """Ranks of each node, and what is wrong with `places`, those of all ranks."""
    per_node = places[0][0] or (1 if len(places) == 1 else 0)
    if per_node == 0:
        return 0, "checkpoint.local_dir needs torchrun's LOCAL_WORLD_SIZE; start with torchrun, or set it to null"
    for rank, place in enumerate(places):
        if len(places) > 1 and place != (per_node, rank % per_node):
            return 0, (
                "checkpoint.local_dir needs as many ranks on every node, numbered node by node; rank "
                f"{rank} is number {place[1]} of {place[0]} on its node, rank 0's node has {per_node}; "
                "set checkpoint.local_dir=null"
            )
    if len(places) % per_node:
        return 0, f"{len(places)} ranks are not a multiple of the {per_node} of a node; set checkpoint.local_dir=null"
    return per_node, None
