"""The loader: every rank's micro-batches are a pure function of (seed, phases, global sample index).

Global batch b consists of the global samples [b * G, (b + 1) * G). Its micro-batch m has `micro_batch_size` consecutive
ones of them. Data-parallel rank r of R takes m = r, r + R, r + 2R, ... (with `consecutive`, the r-th of R equal ranges
of m). The micro-batches are the same for every R, so another number of ranks or workers, or a restart at any step,
changes neither their content nor their order. The number of consumed samples is the whole position.

A checkpoint saves the position and a fingerprint of the data as JSON: seed, sequence length, order of samples, files of
each source, phases. On resume everything that determined the consumed samples must be equal: a phase that has served
samples keeps its blend, and a source that has served samples keeps its files. Future phases may change, and a source
may have new files after the old ones.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from data.megatron_order import MegatronSchedule
from data.order import Growth, Samples, Window
from data.schedule import PhaseSchedule
from data.workers import LoaderError, Prefetcher, row_readers, stack_rows

_STEPS_AHEAD = 2
UNCOUNTED = -1
"""A target without a loss; the mean loss is over the other targets."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Micro-batch `index` of its global batch (the same at any data-parallel size): tokens and targets, int64
    [rows, sequence length]. A phase with shorter sequences has more rows than micro_batch_size.

    targets[:, t]: the token after tokens[:, t], or negative if this target has no loss.
    documents: int32 [rows, sequence length], if documents are masked: the number of each token's document in its row,
    ascending from 0. num_documents: in all rows together. num_targets: how many targets have a loss; None: all.
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
        """The micro-batch of `samples`: integers [micro_batch_size, seq_length + 1]. documents: int32, the same shape;
        None if documents are not masked. boundary_loss: whether a target in another document than its token has a loss.
        sequence_length: of the rows that samples are cut into; None: a row is a sample."""

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            """[rows, length + 1]: each row begins with the last element of the row before it in the same sample."""
            length = sequence_length or tensor.shape[1] - 1
            return tensor.unfold(1, length + 1, length).reshape(-1, length + 1)

        samples = rows(samples).long()
        tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        if documents is None:
            return cls(index, tokens, targets)
        documents = rows(documents)
        documents = documents - documents[:, :1]
        boundaries = documents.diff(dim=1)
        assert bool(((boundaries == 0) | (boundaries == 1)).all()), "documents are not numbered 0, 1, 2, ..."
        num_targets = None
        if not boundary_loss:
            targets = targets.masked_fill(boundaries != 0, UNCOUNTED)
            num_targets = int((targets >= 0).sum())
        num_documents = int((documents[:, -2] + 1).sum())
        return cls(index, tokens, targets, documents[:, :-1].contiguous(), num_documents, num_targets)

    def pin_memory(self) -> MicroBatch:
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), documents=documents)


@dataclass(eq=False)
class MicroBatchLoader:
    """Loads one rank's micro-batches, step by step.

    sources: at least those that the schedule names, all with the same seq_length and seed. rank, num_ranks: of the
    ranks that compute other micro-batches. num_workers: processes that prepare the micro-batches of the next two steps;
    with 0 the rank reads each micro-batch when it needs it. device: the rank's; for a GPU, micro-batches are in
    page-locked memory. timeout_seconds: how long to wait for the workers before an error that names them; 0: without
    limit. masked, boundary_loss: `data.documents=masked`, `data.boundary_loss`.

    Raises ValueError if a source is missing.
    """

    schedule: PhaseSchedule
    sources: Mapping[str, Samples]
    micro_batch_size: int
    rank: int
    num_ranks: int
    num_workers: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    allow_other_data: bool = False
    timeout_seconds: float = 0.0
    masked: bool = False
    boundary_loss: bool = True
    consecutive: bool = False
    consumed_samples: int = field(default=0, init=False)
    """Global samples that all ranks together have got so far, including those of the current step."""
    changes: list[str] = field(default_factory=list, init=False)
    """The differences between this run's data and that of the loaded checkpoint, as text."""
    data_wait: float = field(default=0.0, init=False)
    """Seconds that the rank waited for the micro-batches of the current step."""
    worker_pids: list[int] = field(default_factory=list, init=False)
    """Process ids of the workers."""

    def __post_init__(self) -> None:
        for span in self.schedule.spans:
            assert span.batch_size % (self.micro_batch_size * self.num_ranks) == 0, span
        self.schedule.check_sources(self.sources)
        self.sources = {name: self.sources[name] for name in self.schedule.source_names}

    def num_micro_batches(self, step: int) -> int:
        """How many micro-batches this rank gets in `step`, counted from 0."""
        return self.schedule.span(step).batch_size // (self.micro_batch_size * self.num_ranks)

    def steps(self, start_step: int, end_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps [start_step, end_step), a list for each step. The workers run until
        the iterator ends or is closed. Raises LoaderError if a worker dies, TimeoutError if none delivers in time, and
        what reading raises."""
        with contextlib.closing(self._batches(start_step, end_step)) as batches:
            for step in range(start_step, end_step):
                began = time.perf_counter()
                try:
                    batch = list(itertools.islice(batches, self.num_micro_batches(step)))
                except (LoaderError, TimeoutError) as error:
                    raise type(error)(
                        f"no data for step {step + 1} (data-parallel rank {self.rank}, host {socket.gethostname()}, "
                        f"data.num_workers={self.num_workers}): {error}"
                    ) from error
                self.consumed_samples = self.schedule.samples_before(step + 1)
                self.data_wait = time.perf_counter() - began
                yield batch

    def _first_samples(self, start_step: int, end_step: int) -> Iterator[int]:
        for step in range(start_step, end_step):
            count = self.num_micro_batches(step)
            for turn in range(count):
                index = self.rank * count + turn if self.consecutive else turn * self.num_ranks + self.rank
                yield self.schedule.samples_before(step) + index * self.micro_batch_size

    def _batches(self, start_step: int, end_step: int) -> Generator[MicroBatch, None, None]:
        reads = partial(row_readers, self.schedule, self.sources, self.micro_batch_size, self.masked)
        firsts = self._first_samples(start_step, end_step)
        if self.num_workers == 0:
            for first in firsts:
                yield self._make(first, stack_rows([read() for read in reads(first)]))
            return
        ahead = _STEPS_AHEAD * max(self.num_micro_batches(span.first_step) for span in self.schedule.spans)
        with contextlib.closing(Prefetcher(reads, firsts, self._make, self.num_workers, ahead)) as prefetcher:
            self.worker_pids = prefetcher.pids
            while True:
                yield prefetcher.next(self.timeout_seconds)

    def _make(self, first: int, window: Window) -> MicroBatch:
        """The micro-batch that begins with global sample `first`, in page-locked memory if the device is a GPU."""
        span = self.schedule.span_at(first)
        index = (first - span.start) % span.batch_size // self.micro_batch_size
        documents = None if window.documents is None else torch.from_numpy(window.documents)
        tokens = torch.from_numpy(window.tokens)
        batch = MicroBatch.of(index, tokens, documents, self.boundary_loss, span.sequence_length)
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # for this thread
        return batch.pin_memory()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of this run, as JSON values, without the paths of files."""
        # With checkpoint.allow_mismatch a source of past phases may be missing.
        used = [self.sources[name] for name in self.schedule.source_names if name in self.sources]
        found = {
            "seed": used[0].seed,
            "seq_length": used[0].seq_length,
            "order": used[0].order,
            "sources": {source.name: source.description() for source in used},
            "phases": self.schedule.description(),
        }
        if isinstance(self.schedule, MegatronSchedule):
            found["megatron"] = self.schedule.layout_description()
        return found

    def state_dict(self) -> dict[str, Any]:
        """consumed_samples, how many of them came from each source, and the fingerprint: JSON values."""
        return {
            "consumed_samples": self.consumed_samples,
            "position": {"counts": self.schedule.counts(self.consumed_samples)},
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a checkpoint. If this run has other phases, or a source has new files, these take
        effect after the consumed samples, and `changes` lists them.

        Raises ValueError, with the differences, if this run's data would not have given the consumed samples, unless
        allow_other_data; and if the run ends before the checkpoint's position.
        """
        consumed, counts = int(state["consumed_samples"]), state["position"]["counts"]
        saved, schedule = state["fingerprint"], self.schedule
        changes = []
        if found := self._past_differences(saved, consumed, counts):
            if not self.allow_other_data:
                raise ValueError(
                    f"this run's data is not the data of the checkpoint: {'; '.join(found)}. Restore those settings "
                    "and files, or set checkpoint.allow_mismatch=true to resume with other data; the run is then not "
                    "exactly reproducible"
                )
            changes.append(f"the data differs from the checkpoint's: {'; '.join(found)}")
        phases = schedule.description()
        if _past_phases(saved["phases"], consumed) != _past_phases(phases, consumed):
            past, new = (_phases_text(of, end=consumed) for of in (saved["phases"], phases))
            # With weights by tokens a difference only shows that files were added.
            if past != new and not any(phase["by_tokens"] for phase in saved["phases"]):
                changes.append(f"phases before sample {consumed} stay {past}; the new data.phases would give {new}")
            schedule = schedule.after(saved["phases"], consumed)
            phases = schedule.description()
        before, now = _future_phases(saved["phases"], consumed), _future_phases(phases, consumed)
        if before != now:
            changes.append(f"phases after sample {consumed}: were {_phases_text(before)}; are {_phases_text(now)}")
        if (steps := schedule.steps_before(consumed)) > schedule.num_steps:
            raise ValueError(
                f"the checkpoint has {consumed} samples in {steps} steps, but the run ends after "
                f"{schedule.num_steps} steps; resume with train.steps={steps} or more"
            )
        sources = {}
        for name, source in self.sources.items():
            count, description = counts.get(name, 0), saved["sources"].get(name)
            problem = None if description is None else source.mismatch(description)
            if problem is not None and not count:
                changes.append(f"source {name!r}, of which nothing was consumed yet, {problem}")
            if problem is None and count and description is not None:
                source = _with_new_files(source, [Growth(*entry) for entry in description["growth"]], count, changes)
            sources[name] = source
        self.schedule, self.sources, self.consumed_samples, self.changes = schedule, sources, consumed, changes

    def _past_differences(self, saved: Mapping[str, Any], consumed: int, counts: Mapping[str, int]) -> list[str]:
        """Why this run would not have given the consumed samples, one sentence for each reason. saved: the fingerprint
        of the run that consumed them, `counts` of them from each source."""
        one = next(iter(self.sources.values()))
        now = {"seed": one.seed, "seq_length": one.seq_length, "order": one.order}
        keys = {"seed": "data.seed (by default run.seed)", "seq_length": "train.sequence_length", "order": "data.order"}
        found = [f"{keys[key]} was {saved[key]} and is now {new}" for key, new in now.items() if new != saved[key]]
        if isinstance(self.schedule, MegatronSchedule) and "megatron" in saved:
            found += self.schedule.layout_differences(saved["megatron"], consumed)
        current = self.schedule.description()
        if changed := _changed_phase(saved["phases"], current, consumed):
            found.append(
                f"the phases up to sample {consumed} were {_phases_text(saved['phases'], end=consumed)} and are now "
                f"{_phases_text(current, end=consumed)}; phase {changed!r} has served samples, so it must stay in "
                "data.phases with its blend and its order of sources (give a phase that begins now another name)"
            )
        for name in (name for name, count in counts.items() if count):
            if name not in self.sources or name not in saved["sources"]:
                found.append(f"source {name!r} is missing")
            elif problem := self.sources[name].mismatch(saved["sources"][name]):
                found.append(f"source {name!r} {problem}")
        return found


def _with_new_files(source: Samples, growth: list[Growth], count: int, changes: list[str]) -> Samples:
    """`source` with the history `growth` of its files; files that are new after its first `count` samples are added to
    the history and reported in `changes`."""
    new = source.stream.parts[growth[-1].files :]
    if new:
        tokens = sum(part.num_tokens for part in new)
        changes.append(
            f"source {source.name!r} has {len(new)} new files of {tokens:,} tokens, mixed with the rest of its epoch "
            f"after its sample {count}"
        )
        growth.append(Growth(count, len(source.stream.parts)))
    return source.with_growth(growth)


# --- phases as in PhaseSchedule.description, of a run that has consumed the samples [0, consumed)

Phases = Sequence[Mapping[str, Any]]


def _past_phases(phases: Phases, consumed: int) -> list[tuple[Any, ...]]:
    """What determined the consumed samples: all but the names of the phases."""
    keys = ("batch_size", "sequence_length", "blend_start", "blend")
    return [
        (phase["start"], min(phase["end"], consumed), *(phase[key] for key in keys))
        for phase in phases
        if phase["start"] < min(phase["end"], consumed)
    ]


def _future_phases(phases: Phases, consumed: int) -> list[dict[str, Any]]:
    return [
        {**phase, "start": max(phase["start"], consumed), "blend_start": 0, "first_step": 0}
        for phase in phases
        if phase["end"] > max(phase["start"], consumed)
    ]


def _phases_text(phases: Phases, end: int | None = None) -> str:
    found = []
    for phase in phases:
        last = phase["end"] if end is None else min(phase["end"], end)
        if phase["start"] < last:
            total = sum(weight for _, weight in phase["blend"])
            blend = ", ".join(f"{name} {weight / total:.4g}" for name, weight in phase["blend"][:8])
            more = f" and {len(phase['blend']) - 8} more" if len(phase["blend"]) > 8 else ""
            found.append(f"{phase['name']} [{phase['start']}, {last}) {blend}{more}")
    return "; ".join(found) or "none"


def _changed_phase(saved: Phases, current: Phases, consumed: int) -> str | None:
    """The first phase that has served samples and that this run does not have, or has with another blend."""
    if _past_phases(saved, consumed) == _past_phases(current, consumed):
        return None
    names = {phase["name"] for phase in saved}
    for phase in saved:
        # A phase with its name, or else any with a new name, since it may have been renamed.
        now = [p for p in current if p["name"] == phase["name"]] or [p for p in current if p["name"] not in names]
        same = any(p["blend"] == phase["blend"] or (p["by_tokens"] and phase["by_tokens"]) for p in now)
        if phase["start"] < min(phase["end"], consumed) and not same:
            return str(phase["name"])
    return None
