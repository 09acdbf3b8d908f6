"""The loader: every rank's micro-batches as a pure function of (seed, phases, global sample index).

Global batch b covers the global samples [b * G, (b + 1) * G). Its micro-batch m covers `micro_batch_size` consecutive
ones of them, and data-parallel rank r of R takes m = r, r + R, r + 2R, ...: the same micro-batches exist at any R, so
another number of ranks or workers, or a restart anywhere, changes neither their content nor their order. The whole
state is the number of samples consumed.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from data.order import Samples
from data.resume import data_fingerprint, resume_data
from data.schedule import PhaseSchedule
from data.workers import LoaderError, Prefetcher, RankMicroBatches, SlotContent

_STEPS_AHEAD = 2
UNCOUNTED = -1
"""A target that does not count: its token has no loss, and the mean is over the others."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Micro-batch `index` of its global batch: tokens and targets, int64 [rows, sequence length]. A phase of shorter
    sequences has more rows than micro_batch_size.

    targets[:, t] is the token that follows tokens[:, t], or negative if it does not count. The index is the same at any
    data-parallel size.
    documents: int32, the same shape, where they are masked: the number of each token's document in its row, ascending
    from 0. num_documents: of all rows together. num_targets: how many targets count; None: all.
    """

    index: int
    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    num_documents: int | None = None
    num_targets: int | None = None

    @classmethod
    def of(
        cls,
        index: int,
        samples: torch.Tensor,
        documents: torch.Tensor | None = None,
        boundary_loss: bool = True,
        sequence_length: int | None = None,
    ) -> MicroBatch:
        """samples: integers [micro_batch_size, seq_length + 1]. documents: int32, the same shape, to mask them;
        boundary_loss: whether targets of another document than their token's count. sequence_length: of the rows; None:
        samples are rows as they are."""
        if sequence_length is not None and sequence_length < samples.shape[1] - 1:
            samples = _cut(samples, sequence_length)
            if documents is not None:
                documents = _cut(documents, sequence_length)
                documents = documents - documents[:, :1]
        tokens, targets = samples[:, :-1].long().contiguous(), samples[:, 1:].long().contiguous()
        if documents is None:
            return cls(index, tokens, targets)
        if not boundary_loss:
            targets = without_boundaries(targets, documents)
        steps = documents.diff(dim=1)
        assert bool((documents[:, 0] == 0).all() and ((steps == 0) | (steps == 1)).all()), "0, 1, 2, ... in each row"
        return cls(
            index,
            tokens,
            targets,
            documents[:, :-1].contiguous(),
            num_documents=int((documents[:, -2] + 1).sum()),
            num_targets=None if boundary_loss else int((targets >= 0).sum()),
        )

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), documents=documents)


def _cut(samples: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of length + 1, each but the first beginning with the last of the one before."""
    return samples.unfold(1, length + 1, length).reshape(-1, length + 1)


def without_boundaries(targets: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Targets (int64 [rows, length]) with `UNCOUNTED` wherever the target is of another document than its token.

    documents: int32 [rows, length + 1], of the tokens and of the last target.
    """
    return targets.masked_fill(documents[:, 1:] != documents[:, :-1], UNCOUNTED)


class MicroBatchLoader:
    """Loads one rank's micro-batches, step by step.

    `sources` holds at least the sources that the schedule names, all of one seq_length and seed. num_workers processes
    prepare the micro-batches of the next two steps ahead of time; with 0 the rank reads each when it needs it. device:
    where the rank will send them; for a GPU they lie in page-locked memory. Workers that deliver nothing for
    timeout_seconds (0: for ever) are an error that names them. masked, boundary_loss: as `data.documents=masked` and
    `data.boundary_loss`. A phase's batch divides into whole rounds of micro-batches.

    Raises ValueError when a source is missing.
    """

    def __init__(
        self,
        schedule: PhaseSchedule,
        sources: Mapping[str, Samples],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 1,
        device: torch.device | None = None,
        allow_other_data: bool = False,
        timeout_seconds: float = 0.0,
        masked: bool = False,
        boundary_loss: bool = True,
    ) -> None:
        for span in schedule.spans:
            assert span.batch_size % (micro_batch_size * dp_size) == 0, (span, micro_batch_size, dp_size)
        schedule.check_sources(sources)
        self.schedule = schedule
        self.sources = {name: sources[name] for name in schedule.source_names}
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.num_workers = num_workers
        self.device = device or torch.device("cpu")
        self.allow_other_data = allow_other_data
        self.timeout_seconds = timeout_seconds
        self.masked = masked
        self.boundary_loss = boundary_loss
        self.consumed_samples = 0
        """Global samples handed out so far, by all ranks together, the step in progress included."""
        self.changes: list[str] = []
        """What of the data is other than the checkpoint that was loaded had it, in words."""
        self.data_wait = 0.0
        """Seconds for which the rank waited for the newest step's micro-batches."""
        self.worker_pids: list[int] = []
        """Process ids of the workers, while there are some."""

    def num_micro_batches(self, step: int) -> int:
        """Micro-batches that this rank gets in `step`, from 0."""
        return self.schedule.span(step).batch_size // (self.micro_batch_size * self.dp_size)

    def steps(self, start_step: int, end_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps [start_step, end_step), a list for each step.

        Workers live until the iterator ends or is closed. Raises LoaderError where they die or deliver nothing, and
        what reading raises.
        """
        own = self.micro_batch_size, self.dp_rank, self.dp_size
        micro_batches = RankMicroBatches(self.schedule, self.sources, *own, start_step, end_step, self.masked)
        with contextlib.closing(self._batches(micro_batches)) as batches:
            for step in range(start_step, end_step):
                began = time.perf_counter()
                try:
                    batch = list(itertools.islice(batches, self.num_micro_batches(step)))
                except LoaderError as error:
                    raise LoaderError(
                        f"no data for step {step + 1} (data-parallel rank {self.dp_rank}, host {socket.gethostname()}, "
                        f"data.num_workers={self.num_workers}): {error}"
                    ) from error
                self.consumed_samples = self.schedule.samples_before(step + 1)
                self.data_wait = time.perf_counter() - began
                yield batch

    def _batches(self, micro_batches: RankMicroBatches) -> Generator[MicroBatch, None, None]:
        """All micro-batches in order: read when they are asked for, or ahead by workers."""
        make = partial(_tensors, micro_batches, self.device, self.boundary_loss)
        if self.num_workers == 0:
            slot = np.empty(micro_batches.slot_size, np.int32)
            for number in range(len(micro_batches)):
                micro_batches.read_into(number, slot)
                yield make(number, micro_batches.content(slot))
            return
        most = max(self.num_micro_batches(span.first_step) for span in self.schedule.spans)
        slots = -(-_STEPS_AHEAD * most // self.num_workers)
        with contextlib.closing(Prefetcher(micro_batches, make, self.num_workers, slots, most)) as prefetcher:
            self.worker_pids = prefetcher.pids
            for _ in range(len(micro_batches)):
                yield prefetcher.next(self.timeout_seconds)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of this run (see resume.py). Reads the sources' indexes once."""
        return data_fingerprint(self.schedule, self.sources)

    def state_dict(self) -> dict[str, Any]:
        """consumed_samples, what each source gave of them, and the fingerprint: JSON types, equal on all ranks."""
        return {
            "consumed_samples": self.consumed_samples,
            "position": {"counts": self.schedule.counts(self.consumed_samples)},
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where a checkpoint stood; the run resumes with the step that begins after consumed_samples.

        Where this run lays out its phases otherwise, or a source has got more files, what was consumed stays as it was,
        and the rest holds from there on; `changes` then says so.

        Raises ValueError, with what differs, when this run's data would not have given the samples that the
        checkpoint has seen, unless allow_other_data; and when the position is not a whole step of this run.
        """
        resumed = resume_data(state, self.schedule, self.sources, self.allow_other_data)
        self.schedule, self.sources = resumed.schedule, resumed.sources
        self.consumed_samples, self.changes = resumed.consumed, resumed.changes
        self.__dict__.pop("fingerprint", None)  # it is of schedule and sources


def _tensors(
    micro_batches: RankMicroBatches, device: torch.device, boundary_loss: bool, number: int, content: SlotContent
) -> MicroBatch:
    """Micro-batch `number` from its slot: copied, into page-locked memory if it goes to a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    # Widening the tokens copies them; of the documents the slot must not keep the only copy.
    documents = None if content.documents is None else torch.from_numpy(content.documents).clone()
    batch = MicroBatch.of(
        micro_batches.index(number),
        torch.from_numpy(content.tokens),
        documents,
        boundary_loss,
        micro_batches.sequence_length(number),
    )
    return batch.pin_memory() if device.type == "cuda" else batch
