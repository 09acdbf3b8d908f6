"""The loader: every rank's micro-batches as a pure function of (seed, phases, global sample index).

Global batch b covers the global samples [b * G, (b + 1) * G). Its micro-batch m covers `micro_batch_size`
consecutive ones of them, and data-parallel rank r of R takes m = r, r + R, r + 2R, ...: the same
micro-batches exist at any R, so another number of ranks or workers, or a restart anywhere, changes neither
their content nor their order. The whole state is the number of samples consumed.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.documents import without_boundaries
from data.fingerprint import data_fingerprint, differences, served
from data.phases import PhaseSchedule
from data.samples import SampleSource
from data.workers import DeliveryWatch, WorkerSetup, signals_held_back


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Micro-batch `index` of its global batch: tokens and targets, int64 [micro_batch_size, seq_length].

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
        cls, index: int, samples: torch.Tensor, documents: torch.Tensor | None = None, boundary_loss: bool = True
    ) -> MicroBatch:
        """samples: int64 [micro_batch_size, seq_length + 1]. documents: int32, the same shape, to mask them;
        boundary_loss: whether targets of another document than their token's count."""
        tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
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
        """The same in page-locked memory; DataLoader calls it by this name."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), documents=documents)


class LoaderError(RuntimeError):
    """A loader worker died, or none delivers any more."""


class GlobalSamples(Dataset[tuple[int, np.ndarray, np.ndarray | None]]):
    """The samples of a run by global sample index: item i is (i, int64 [seq_length + 1], its documents if masked)."""

    def __init__(self, schedule: PhaseSchedule, sources: Mapping[str, SampleSource], masked: bool = False) -> None:
        self.schedule = schedule
        self.sources = dict(sources)
        self.masked = masked

    def __len__(self) -> int:
        return self.schedule.num_samples

    def __getitem__(self, index: int) -> tuple[int, np.ndarray, np.ndarray | None]:
        location = self.schedule.locate(index)
        source = self.sources[location.source]
        if self.masked:
            return index, *source.sample_and_documents(location.ordinal)
        return index, source.sample(location.ordinal), None


class MicroBatchLoader:
    """Loads one rank's micro-batches, step by step.

    `sources` holds at least the sources that the schedule names, all of one seq_length and seed. num_workers
    processes prepare `prefetch` micro-batches each ahead of time; with 0 the rank prepares each when it needs
    it, and prefetch has no meaning. pin_memory is for a rank with a GPU. The global random state is left
    alone. Workers that deliver nothing for timeout_seconds (0: for ever) are an error that names them.
    masked, boundary_loss: as `data.documents=masked` and `data.boundary_loss` of a configuration.

    Raises ValueError when a source is missing or the global batch does not divide into whole rounds of
    micro-batches.
    """

    def __init__(
        self,
        schedule: PhaseSchedule,
        sources: Mapping[str, SampleSource],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 1,
        pin_memory: bool = False,
        prefetch: int = 2,
        allow_other_data: bool = False,
        timeout_seconds: float = 0.0,
        masked: bool = False,
        boundary_loss: bool = True,
    ) -> None:
        global_batch_size = schedule.global_batch_size
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank is {dp_rank}, which is not a rank of dp_size {dp_size}")
        if micro_batch_size < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise ValueError(
                f"the global batch of {global_batch_size} samples is not a multiple of micro_batch_size * "
                f"dp_size = {micro_batch_size} * {dp_size}: every rank must get equally many whole "
                "micro-batches"
            )
        if num_workers < 0 or prefetch < 1:
            raise ValueError(f"num_workers is {num_workers} and prefetch {prefetch}; they start at 0 and at 1")
        missing = [name for name in schedule.source_names if name not in sources]
        if missing:
            raise ValueError(
                f"the phases draw from {', '.join(missing)}, but the data has the sources "
                f"{', '.join(sources)}; correct the blends of the phases or add the source"
            )
        settings = {(sources[name].seq_length, sources[name].seed) for name in schedule.source_names}
        if len(settings) > 1:
            raise ValueError(f"the sources differ in (seq_length, seed): {sorted(settings)}; make them agree")
        self.schedule = schedule
        self.sources = {name: sources[name] for name in schedule.source_names}
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch = prefetch
        self.allow_other_data = allow_other_data
        self.timeout_seconds = timeout_seconds
        self.masked = masked
        self.boundary_loss = boundary_loss
        self.consumed_samples = 0
        """Global samples handed out so far, by all ranks together, the step in progress included."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that this rank gets in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def steps(self, start_step: int, end_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps [start_step, end_step), a list for each step.

        Workers live until the iterator ends or is closed. Raises ValueError for a span outside the run.
        """
        if not 0 <= start_step <= end_step <= self.schedule.num_steps:
            raise ValueError(
                f"steps [{start_step}, {end_step}) are outside the run of {self.schedule.num_steps} steps "
                "that the phases were laid out for"
            )
        return self._steps(start_step, end_step)

    def _steps(self, start_step: int, end_step: int) -> Iterator[list[MicroBatch]]:
        setup = WorkerSetup(self.num_workers)
        loader: DataLoader[Any] = DataLoader(
            GlobalSamples(self.schedule, self.sources, self.masked),
            batch_sampler=_MicroBatchIndices(self, start_step, end_step),
            collate_fn=self._collate,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch if self.num_workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=setup,
            # Without its own generator DataLoader draws from the global one, and a resumed run would draw
            # once more.
            generator=torch.Generator(),
        )
        with signals_held_back():
            micro_batches = iter(loader)
        watch = DeliveryWatch(setup, self.timeout_seconds if self.num_workers else 0.0)
        # Should the run end by an exception, multiprocessing stops the workers at exit; see workers.py.
        atexit.register(setup.release)
        try:
            for step in range(start_step, end_step):
                with self._named_workers(setup, watch, step):
                    batch = [next(micro_batches) for _ in range(self.num_micro_batches)]
                self.consumed_samples = (step + 1) * self.global_batch_size
                yield batch
        finally:
            watch.close()
            setup.release()
            atexit.unregister(setup.release)

    @contextmanager
    def _named_workers(self, setup: WorkerSetup, watch: DeliveryWatch, step: int) -> Iterator[None]:
        """DataLoader says that a worker died or waits for ever, not how they stand."""
        try:
            with watch:
                yield
        except (RuntimeError, OSError, EOFError) as error:
            where = (
                f"no data for step {step + 1} (data-parallel rank {self.dp_rank}, data.num_workers={self.num_workers})"
            )
            if watch.found is not None:
                waited = f"for {self.timeout_seconds:.0f} s"
                raise LoaderError(f"{where} {waited}: {watch.found}") from error
            if self.num_workers and str(error).startswith("DataLoader"):
                raise LoaderError(f"{where}: {error}; {setup.in_words()}") from error
            raise

    def _collate(self, samples: Sequence[tuple[int, np.ndarray, np.ndarray | None]]) -> MicroBatch:
        index = samples[0][0] % self.global_batch_size // self.micro_batch_size
        tokens = torch.from_numpy(np.stack([tokens for _, tokens, _ in samples]))
        documents = [documents for _, _, documents in samples if documents is not None]
        numbers = torch.from_numpy(np.stack(documents)) if documents else None
        return MicroBatch.of(index, tokens, numbers, self.boundary_loss)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of this run (see fingerprint.py). Reads the sources' indexes once."""
        return data_fingerprint(self.schedule, self.sources)

    def state_dict(self) -> dict[str, Any]:
        """consumed_samples and the fingerprint: JSON types, equal on all ranks."""
        return {"consumed_samples": self.consumed_samples, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a checkpoint stood; go on with step consumed_samples / global_batch_size.

        Where this run lays out its phases otherwise, being of another length for instance, what was consumed stays as
        it was, and the schedule begins behind it.

        Raises ValueError, with what differs, when this run's data would not have given the samples that the
        checkpoint has seen, unless allow_other_data; and when the position is not a whole step of this run.
        """
        consumed = int(state["consumed_samples"])
        if consumed % self.global_batch_size or not 0 <= consumed <= self.schedule.num_samples:
            steps = -(-consumed // self.global_batch_size)
            raise ValueError(
                f"the checkpoint stands after {consumed} samples, which is not a whole number of global "
                f"batches of {self.global_batch_size} within a run of {self.schedule.num_samples} samples; resume with "
                f"the checkpoint's train.global_batch_size and train.steps={steps} or more"
            )
        found = differences(state["fingerprint"], self.fingerprint, consumed)
        if found and not self.allow_other_data:
            raise ValueError(
                "this run's data is not the data of the checkpoint: " + "; ".join(found) + ". Restore those settings "
                "and files, or go on with other data by checkpoint.allow_mismatch=true, which gives up exact resumption"
            )
        saved = state["fingerprint"]
        if not found and served(saved, consumed) != served(self.fingerprint, consumed):
            self.schedule = self.schedule.behind(saved["phases"], consumed)
            del self.fingerprint  # it is of the schedule
        self.consumed_samples = consumed


class _MicroBatchIndices:
    """The global sample indices of a rank's micro-batches, in order, in steps [start_step, end_step)."""

    def __init__(self, loader: MicroBatchLoader, start_step: int, end_step: int) -> None:
        stride = loader.micro_batch_size * loader.dp_size
        self._firsts = range(
            start_step * loader.global_batch_size + loader.dp_rank * loader.micro_batch_size,
            end_step * loader.global_batch_size,
            stride,
        )
        self._size = loader.micro_batch_size

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._firsts:
            yield list(range(first, first + self._size))
