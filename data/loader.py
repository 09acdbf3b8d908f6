"""The loader: every rank's micro-batches as a pure function of (seed, phases, global sample index).

Global batch b covers the global samples [b * G, (b + 1) * G). Its micro-batch m covers `micro_batch_size` consecutive
ones of them, and data-parallel rank r of R takes m = r, r + R, r + 2R, ... (`consecutive`: the r-th of R equal runs of
neighbours): the same micro-batches exist at any R, so another number of ranks or workers, or a restart anywhere,
changes neither their content nor their order. The whole position is the number of samples consumed.

A checkpoint keeps with it a fingerprint of the data, plain JSON: seed, sequence length, order of samples, the files of
each source, the phases. On resume what shaped the samples already consumed must agree: a phase that has served samples
keeps its blend, and a source that has given some keeps its files. What is to come may change, and a source may have
more files after those that it had.
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
from data.workers import LoaderError, Prefetcher, row_reads, stacked

_STEPS_AHEAD = 2
UNCOUNTED = -1
"""A target that does not count: its token has no loss, and the mean is over the others."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Micro-batch `index` of its global batch (the same at any data-parallel size): tokens and targets, int64
    [rows, sequence length]. A phase of shorter sequences has more rows than micro_batch_size.

    targets[:, t] is the token that follows tokens[:, t], or negative if it does not count.
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
        """Of samples: integers [micro_batch_size, seq_length + 1]. documents: int32, the same shape, to mask
        them; boundary_loss: whether targets of another document than their token's count. sequence_length: of the rows
        that samples are cut into; None: of samples."""

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            """[rows, length + 1], each but a sample's first beginning with the last of the one before."""
            length = sequence_length or tensor.shape[1] - 1
            return tensor.unfold(1, length + 1, length).reshape(-1, length + 1)

        samples = rows(samples).long()
        tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        if documents is None:
            return cls(index, tokens, targets)
        documents = rows(documents)
        documents = documents - documents[:, :1]
        boundaries = documents.diff(dim=1)
        assert bool(((boundaries == 0) | (boundaries == 1)).all()), "0, 1, 2, ... in each row"
        num_targets = None
        if not boundary_loss:
            targets = targets.masked_fill(boundaries != 0, UNCOUNTED)
            num_targets = int((targets >= 0).sum())
        num_documents = int((documents[:, -2] + 1).sum())
        return cls(index, tokens, targets, documents[:, :-1].contiguous(), num_documents, num_targets)

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), documents=documents)


@dataclass(eq=False)
class MicroBatchLoader:
    """Loads one rank's micro-batches, step by step.

    `sources` holds at least the sources that the schedule names, all of one seq_length and seed. num_workers processes
    prepare the micro-batches of the next two steps; with 0 the rank reads each when it needs it. device: where the rank
    will send them; for a GPU they lie in page-locked memory. Workers that deliver nothing for timeout_seconds (0: for
    ever) are an error that names them. masked, boundary_loss: as `data.documents=masked` and `data.boundary_loss`.

    Raises ValueError when a source is missing.
    """

    schedule: PhaseSchedule
    sources: Mapping[str, Samples]
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    num_workers: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    allow_other_data: bool = False
    timeout_seconds: float = 0.0
    masked: bool = False
    boundary_loss: bool = True
    consecutive: bool = False
    consumed_samples: int = field(default=0, init=False)
    """Global samples handed out so far, by all ranks together, the step in progress included."""
    changes: list[str] = field(default_factory=list, init=False)
    """What of the data differs from the checkpoint that was loaded, in words."""
    data_wait: float = field(default=0.0, init=False)
    """Seconds for which the rank waited for the newest step's micro-batches."""
    worker_pids: list[int] = field(default_factory=list, init=False)
    """Process ids of the workers, while there are some."""

    def __post_init__(self) -> None:
        for span in self.schedule.spans:
            assert span.batch_size % (self.micro_batch_size * self.dp_size) == 0, span
        self.schedule.check_sources(self.sources)
        self.sources = {name: self.sources[name] for name in self.schedule.source_names}

    def num_micro_batches(self, step: int) -> int:
        """Micro-batches that this rank gets in `step`, from 0."""
        return self.schedule.span(step).batch_size // (self.micro_batch_size * self.dp_size)

    def steps(self, start_step: int, end_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps [start_step, end_step), a list for each step. Workers live until the
        iterator ends or is closed. Raises LoaderError where they die or deliver nothing, and what reading raises."""
        with contextlib.closing(self._batches(start_step, end_step)) as batches:
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

    def _first_samples(self, start_step: int, end_step: int) -> Iterator[int]:
        """Of this rank's micro-batches of the steps [start_step, end_step)."""
        for step in range(start_step, end_step):
            count = self.num_micro_batches(step)
            for turn in range(count):
                index = self.dp_rank * count + turn if self.consecutive else turn * self.dp_size + self.dp_rank
                yield self.schedule.samples_before(step) + index * self.micro_batch_size

    def _batches(self, start_step: int, end_step: int) -> Generator[MicroBatch, None, None]:
        """All micro-batches in order: read when they are asked for, or ahead by workers."""
        reads = partial(row_reads, self.schedule, self.sources, self.micro_batch_size, self.masked)
        firsts = self._first_samples(start_step, end_step)
        if self.num_workers == 0:
            for first in firsts:
                yield self._make(first, stacked([read() for read in reads(first)]))
            return
        ahead = _STEPS_AHEAD * max(self.num_micro_batches(span.first_step) for span in self.schedule.spans)
        with contextlib.closing(Prefetcher(reads, firsts, self._make, self.num_workers, ahead)) as prefetcher:
            self.worker_pids = prefetcher.pids
            while True:
                yield prefetcher.next(self.timeout_seconds)

    def _make(self, first: int, window: Window) -> MicroBatch:
        """The micro-batch from global sample `first` on, in page-locked memory if it goes to a GPU."""
        span = self.schedule.span_at(first)
        index = (first - span.start) % span.batch_size // self.micro_batch_size
        documents = None if window.documents is None else torch.from_numpy(window.documents)
        tokens = torch.from_numpy(window.tokens)
        batch = MicroBatch.of(index, tokens, documents, self.boundary_loss, span.sequence_length)
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # of this thread
        return batch.pin_memory()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of this run: JSON types, and nothing of where files lie."""
        # Where other data was allowed, one of the past may be gone.
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
        """consumed_samples, what each source gave of them, and the fingerprint: JSON types, equal on all ranks."""
        return {
            "consumed_samples": self.consumed_samples,
            "position": {"counts": self.schedule.counts(self.consumed_samples)},
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where a checkpoint stood. Where this run lays out its phases otherwise, or a source has got more files,
        what was consumed stays as it was, and the rest holds from there on; `changes` then says so.

        Raises ValueError, with what differs, when this run's data would not have given the samples that the
        checkpoint has seen, unless allow_other_data; and when the run ends before.
        """
        consumed, counts = int(state["consumed_samples"]), state["position"]["counts"]
        saved, schedule = state["fingerprint"], self.schedule
        changes = []
        if found := self._other_past(saved, consumed, counts):
            if not self.allow_other_data:
                raise ValueError(
                    f"this run's data is not the data of the checkpoint: {'; '.join(found)}. Restore those settings "
                    "and files, or resume with other data by checkpoint.allow_mismatch=true, which gives up exact "
                    "resumption"
                )
            changes.append(f"the data is other than the checkpoint's: {'; '.join(found)}")
        phases = schedule.description()
        if _served(saved["phases"], consumed) != _served(phases, consumed):
            past, said = (_spelled(of, end=consumed) for of in (saved["phases"], phases))
            # Weights by tokens are those of the files of then.
            if past != said and not any(phase["by_tokens"] for phase in saved["phases"]):
                changes.append(f"phases before sample {consumed} stay as they were: {past}; data.phases says {said}")
            schedule = schedule.after(saved["phases"], consumed)
            phases = schedule.description()
        before, now = _to_come(saved["phases"], consumed), _to_come(phases, consumed)
        if before != now:
            changes.append(f"phases after sample {consumed}: were {_spelled(before)}; are {_spelled(now)}")
        if (steps := schedule.steps_before(consumed)) > schedule.num_steps:
            raise ValueError(
                f"the checkpoint stands after {consumed} samples in {steps} steps, and the run ends after "
                f"{schedule.num_steps}; resume with train.steps={steps} or more"
            )
        sources = {}
        for name, source in self.sources.items():
            given, kept = counts.get(name, 0), saved["sources"].get(name)
            problem = None if kept is None else source.replaces(kept)
            if problem is not None and not given:
                changes.append(f"source {name!r}, of which nothing was consumed yet, {problem}")
            if problem is None and given and kept is not None:
                source = _grown(source, [Growth(*entry) for entry in kept["growth"]], given, changes)
            sources[name] = source
        self.schedule, self.sources, self.consumed_samples, self.changes = schedule, sources, consumed, changes

    def _other_past(self, saved: Mapping[str, Any], consumed: int, counts: Mapping[str, int]) -> list[str]:
        """What of the past this run would replace, one sentence each. saved: the fingerprint of the run that has
        consumed the samples, `counts` of them from each source."""
        one = next(iter(self.sources.values()))
        now = {"seed": one.seed, "seq_length": one.seq_length, "order": one.order}
        keys = {"seed": "data.seed (by default run.seed)", "seq_length": "train.sequence_length", "order": "data.order"}
        found = [
            f"{keys[key]} was {saved[key]} and is now {value}" for key, value in now.items() if saved[key] != value
        ]
        if isinstance(self.schedule, MegatronSchedule) and "megatron" in saved:
            found += self.schedule.layout_differences(saved["megatron"], consumed)
        current = self.schedule.description()
        if changed := _changed_phase(saved["phases"], current, consumed):
            found.append(
                f"the phases up to sample {consumed} were {_spelled(saved['phases'], end=consumed)} and are now "
                f"{_spelled(current, end=consumed)}; phase {changed!r} has served samples, so it must stay in "
                "data.phases with its blend, sources in the same order (give one that begins now another name)"
            )
        for name in (name for name, count in counts.items() if count):
            if name not in self.sources or name not in saved["sources"]:
                found.append(f"source {name!r} is gone")
            elif problem := self.sources[name].replaces(saved["sources"][name]):
                found.append(f"source {name!r} {problem}")
        return found


def _grown(source: Samples, growth: list[Growth], given: int, changes: list[str]) -> Samples:
    """`source`, whose files came as `growth` says, then new ones, named in `changes`, after `given` samples."""
    new = source.stream.parts[growth[-1].files :]
    if new:
        tokens = sum(part.num_tokens for part in new)
        changes.append(
            f"source {source.name!r} has {len(new)} new files of {tokens:,} tokens, mixed with what its epoch has left "
            f"after its sample {given}"
        )
        growth.append(Growth(given, len(source.stream.parts)))
    return source.grown(growth)


# --- phases as PhaseSchedule.description has them, which have served samples up to `consumed`

Phases = Sequence[Mapping[str, Any]]


def _served(phases: Phases, consumed: int) -> list[tuple[Any, ...]]:
    """What of the phases shaped the samples before; their names do not."""
    keys = ("batch_size", "sequence_length", "blend_start", "blend")
    return [
        (phase["start"], min(phase["end"], consumed), *(phase[key] for key in keys))
        for phase in phases
        if phase["start"] < min(phase["end"], consumed)
    ]


def _to_come(phases: Phases, consumed: int) -> list[dict[str, Any]]:
    """What is left of the phases."""
    return [
        {**phase, "start": max(phase["start"], consumed), "blend_start": 0, "first_step": 0}
        for phase in phases
        if phase["end"] > max(phase["start"], consumed)
    ]


def _spelled(phases: Phases, end: int | None = None) -> str:
    """The phases for a reader, as far as sample `end`."""
    words = []
    for phase in phases:
        last = phase["end"] if end is None else min(phase["end"], end)
        if phase["start"] < last:
            total = sum(weight for _, weight in phase["blend"])
            blend = ", ".join(f"{name} {weight / total:.4g}" for name, weight in phase["blend"][:8])
            more = f" and {len(phase['blend']) - 8} more" if len(phase["blend"]) > 8 else ""
            words.append(f"{phase['name']} [{phase['start']}, {last}) {blend}{more}")
    return "; ".join(words) or "none"


def _changed_phase(saved: Phases, current: Phases, consumed: int) -> str | None:
    """The first phase that has served samples and that the run does not have any more, or with another blend."""
    if _served(saved, consumed) == _served(current, consumed):
        return None
    names = {phase["name"] for phase in saved}
    for phase in saved:
        # A phase of its name, or one that may be the same under a new name. Weights by tokens follow the files.
        now = [p for p in current if p["name"] == phase["name"]] or [p for p in current if p["name"] not in names]
        same = any(p["blend"] == phase["blend"] or (p["by_tokens"] and phase["by_tokens"]) for p in now)
        if phase["start"] < min(phase["end"], consumed) and not same:
            return str(phase["name"])
    return None
