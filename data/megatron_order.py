"""`data.order=megatron`: the samples of a Megatron run at the positions where Megatron has them.

Megatron lays out a whole run before its first step (megatron_indices.py). What it lays out depends on how many samples
the run was to have, so a run that resumes with another length would have another order; that is refused.

A phase of the run is laid out in one of two ways, as `data.megatron.phases` says:

    transitions   like a Megatron run with `--phase-transition-iterations`: every phase has indices of its own, for as
                  many samples as it has, and begins at their beginning
    relaunched    like a Megatron run that was stopped and started with another `--data-path`: every phase has indices
                  for all samples of the run, and begins at the position where the one before it stopped

The indices are built once for each disk, into files that all ranks and loader workers map into memory. `MegatronSource`
reads the samples of a source through them, `MegatronOrder` knows which source serves a position of the run, and
`MegatronSchedule` gives the loader that order phase by phase.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.indexed import DataBundle, TokenRange, TokenSource
from data.megatron_indices import DatasetIndices, blend_sizes, blending_indices, dataset_indices, split_range
from data.order import Growth, Samples, Window, num_windows
from data.schedule import Location, Phase, PhaseSchedule, SourceRange
from data.storage import build_once, default_cache_dir

_LOOK_BACK = 1 << 14


class Piece(NamedTuple):
    """`length` tokens of a sequence from `offset` on."""

    sequence: int
    offset: int
    length: int


class _Stored:
    """A folder of arrays, mapped into memory when first needed; loader workers get its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[type[_Stored], tuple[Path]]:
        return type(self), (self.folder,)

    def load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")


class StoredDataset(_Stored):
    """The indices of a dataset."""

    @cached_property
    def indices(self) -> DatasetIndices:
        return DatasetIndices(*(self.load(name) for name in DatasetIndices._fields))

    @property
    def num_samples(self) -> int:
        return len(self.indices.shuffle_index)


class StoredBlend(_Stored):
    """The indices of a blend."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(datasets, their samples) at each sample of the blend."""
        return self.load("dataset_index"), self.load("dataset_sample_index")

    @cached_property
    def counts(self) -> list[int]:
        """Of all samples, by dataset."""
        return self.load("counts").tolist()

    def at(self, position: int) -> tuple[int, int]:
        return int(self.arrays[0][position]), int(self.arrays[1][position])

    def before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position: looks back until all have been met."""
        datasets, samples = self.arrays
        counts: dict[int, int] = {}
        end = position
        while end > 0 and len(counts) < len(self.counts):
            start = max(0, end - _LOOK_BACK)
            for dataset, back in zip(*np.unique(datasets[start:end][::-1], return_index=True), strict=True):
                counts.setdefault(int(dataset), int(samples[end - 1 - back]) + 1)
            end = start
        return [counts.get(dataset, 0) for dataset in range(len(self.counts))]


class MegatronSource(Samples):
    """The samples of one source by ordinal, which counts through the indices of all phases in turn. Built by
    MegatronOrder."""

    order = "megatron"

    def __init__(
        self,
        name: str,
        stream: TokenSource,
        seq_length: int,
        seed: int,
        vocab_size: int,
        split: Sequence[float] | None = None,
    ) -> None:
        super().__init__(name, stream, seq_length, seed, vocab_size)
        self._stored: list[StoredDataset] = []
        self._bases: list[int] = []
        self.num_ordinals = 0
        first, end = split_range(split, 0, stream.num_sequences)
        borders = stream.sequence_offsets(first, end)
        self.num_samples = num_windows(int(borders[-1] - borders[0]), seq_length)

    def add(self, stored: StoredDataset) -> int:
        """Append the indices of a phase; returns the ordinal of their first sample."""
        base = self.num_ordinals
        self._stored.append(stored)
        self._bases.append(base)
        self.num_ordinals += stored.num_samples
        return base

    def pieces(self, ordinal: int) -> list[Piece]:
        """What sample `ordinal` is made of, in order."""
        assert 0 <= ordinal < self.num_ordinals, (self.name, ordinal)
        place = bisect_right(self._bases, ordinal) - 1
        document_index, sample_index, shuffle_index = self._stored[place].indices
        sample = int(shuffle_index[ordinal - self._bases[place]])
        (begin, offset), (end, end_offset) = sample_index[sample : sample + 2].tolist()
        pieces = []
        for position in range(begin, end + 1):
            sequence = int(document_index[position])
            if position == end:
                length = end_offset + 1 - offset
            else:
                borders = self.stream.sequence_offsets(sequence, sequence + 1)
                length = int(borders[1] - borders[0]) - offset
            if length:
                pieces.append(Piece(sequence, offset, length))
            offset = 0
        return pieces

    def read(self, sample: int, documents: bool) -> Window:
        pieces = self.pieces(sample)
        starts = [int(self.stream.sequence_offsets(p.sequence, p.sequence + 1)[0]) + p.offset for p in pieces]
        tokens = np.concatenate([self.stream.tokens(at, p.length) for at, p in zip(starts, pieces, strict=True)])
        assert len(tokens) == self.seq_length + 1, (self.name, len(tokens))
        numbers = np.repeat(np.arange(len(pieces), dtype=np.int32), [piece.length for piece in pieces])
        return Window(tokens, numbers if documents else None)

    def replaces(self, saved: Mapping[str, Any]) -> str | None:
        if (now := len(self.stream.parts)) > len(saved["files"]):  # another order
            return f"had {len(saved['files'])} files and now has {now}; with data.order=megatron none can be added"
        return super().replaces(saved)

    def grown(self, growth: Sequence[Growth]) -> MegatronSource:
        assert len(growth) == 1
        return self


# Part of the name of every folder of indices: raise it with any change to what is in one.
_FORMAT = 1


@dataclass(frozen=True)
class MegatronRun:
    """How Megatron was or would be started; `MegatronConfig` in the configuration's schema says what each key means."""

    split: Sequence[float] | None = None
    train_samples: int | None = None
    consumed_samples: int = 0
    phases: str = "transitions"
    weighted: bool | None = None
    surplus: float = 0.005


class Layout(NamedTuple):
    """The samples [start, end) of the run are the samples [first, first + end - start) of a Megatron dataset that was
    built for num_samples, of sources by these weights (as given, not normalized)."""

    start: int
    end: int
    first: int
    num_samples: int
    blend: dict[str, float]


def lay_out(spans: Sequence[tuple[int, int, Mapping[str, float]]], run: MegatronRun) -> list[Layout]:
    """The phases (start, end, blend), which follow each other from 0, as a Megatron run has them.

    Raises ValueError for a run that is shorter than what it is to serve.
    """
    total = run.consumed_samples + spans[-1][1]
    samples = total if run.train_samples is None else run.train_samples
    if samples < total:
        raise ValueError(
            f"data.megatron.train_samples={samples} is less than the {total} samples up to this run's end "
            f"(consumed_samples={run.consumed_samples} and {spans[-1][1]} of this run); give those of the Megatron "
            "run, its --train-iters times --global-batch-size, or shorten train.steps"
        )
    layouts = []
    for index, (start, end, blend) in enumerate(spans):
        weights = {name: weight for name, weight in blend.items() if weight > 0}
        if run.phases == "relaunched":
            layouts.append(Layout(start, end, run.consumed_samples + start, samples, weights))
            continue
        # The first phase began before this run, and the last one may continue after it.
        before = run.consumed_samples if index == 0 else 0
        later = samples - total if index == len(spans) - 1 else 0
        layouts.append(Layout(start, end, before, before + end - start + later, weights))
    return layouts


class MegatronOrder:
    """Which sample of which source is at a position of the run, and the sources that have them.

    streams: at least the sources that the phases name. cache_dir: where the indices are kept; None: the user's cache
    folder. Raises ValueError for what Megatron would refuse, run forever on, or leave unfinished.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        streams: Mapping[str, TokenSource],
        run: MegatronRun,
        seq_length: int,
        seed: int,
        vocab_size: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.layouts = list(layouts)
        self.run = run
        self._folder = (default_cache_dir() if cache_dir is None else Path(cache_dir)) / "megatron"
        names = dict.fromkeys(name for layout in layouts for name in layout.blend)
        self.sources = {
            name: MegatronSource(name, streams[name], seq_length, seed, vocab_size, run.split) for name in names
        }
        self._starts = [layout.start for layout in layouts]
        self._blends: list[StoredBlend | None] = []
        self._bases: list[dict[str, int]] = []
        for layout in layouts:
            self._add(layout)

    def locate(self, global_sample: int) -> tuple[str, int]:
        """(source, ordinal) of a sample of the run. O(log phases)."""
        # Of phases that start together all but the last are empty, and bisect_right finds the last.
        phase = bisect_right(self._starts, global_sample) - 1
        layout, blend = self.layouts[phase], self._blends[phase]
        assert layout.start <= global_sample < layout.end, global_sample
        position = layout.first + global_sample - layout.start
        dataset, sample = (0, position) if blend is None else blend.at(position)
        name = list(layout.blend)[dataset]
        return name, self._bases[phase][name] + sample

    def ranges(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """(source, first, last): the ordinals [first, last) that the samples [start, end) of the run take, layout by
        layout."""
        found = []
        for layout, blend, bases in zip(self.layouts, self._blends, self._bases, strict=True):
            first, last = max(start, layout.start), min(end, layout.end)
            if first < last:
                before, after = (
                    [layout.first + at - layout.start]
                    if blend is None
                    else blend.before(layout.first + at - layout.start)
                    for at in (first, last)
                )
                for name, some, more in zip(layout.blend, before, after, strict=True):
                    if some < more:
                        found.append((name, bases[name] + some, bases[name] + more))
        return found

    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps of the order: JSON."""
        phases = [[*layout[:4], list(map(list, layout.blend.items()))] for layout in self.layouts]
        return {
            "split": None if self.run.split is None else list(map(float, self.run.split)),
            "weighted": self.run.weighted,
            "surplus": self.run.surplus,
            "phases": phases,
        }

    def _add(self, layout: Layout) -> None:
        """Build or find the indices of a phase."""
        names, weights = list(layout.blend), list(layout.blend.values())
        weighted = len(names) > 1 if self.run.weighted is None else self.run.weighted
        if weighted:
            size, built = blend_sizes(weights, layout.num_samples, self.run.surplus)
            wanted: list[int | None] = [*built]
        elif len(names) == 1:
            size, wanted = layout.num_samples, [layout.num_samples]
        else:
            if len(set(weights)) > 1:
                raise ValueError(
                    "with data.megatron.weighted=false the lengths of the sources are their weights, but the blend "
                    f"has {layout.blend}; give all of them the weight 1"
                )
            wanted = [None] * len(names)
        stored = [self._dataset(name, samples) for name, samples in zip(names, wanted, strict=True)]
        if not weighted and len(names) > 1:
            weights = [float(dataset.num_samples) for dataset in stored]
            size = min(layout.num_samples, sum(dataset.num_samples for dataset in stored))
            if size < (needed := layout.first + layout.end - layout.start):
                raise ValueError(
                    f"{', '.join(names)} have {size} samples in one epoch, and Megatron gives no more to --data-path "
                    f"without weights; this run needs {needed}: shorten train.steps"
                )
        blend = None
        if weighted or len(names) > 1:
            blend = self._blend(weights, size)
            for name, dataset, count in zip(names, stored, blend.counts, strict=True):
                if count > dataset.num_samples:
                    raise ValueError(
                        f"the blend takes {count} samples of {name!r}, of which it built {dataset.num_samples}, where "
                        "Megatron ends too; raise data.megatron.surplus (--mid-level-dataset-surplus), as for that run"
                    )
        self._blends.append(blend)
        self._bases.append({name: self.sources[name].add(dataset) for name, dataset in zip(names, stored, strict=True)})

    def _dataset(self, name: str, num_samples: int | None) -> StoredDataset:
        source = self.sources[name]
        stream = source.stream
        sequences = split_range(self.run.split, 0, stream.num_sequences)
        key = ["dataset", stream.identity(), *sequences, num_samples, source.seq_length, source.seed]

        def build(folder: Path) -> None:
            lengths = np.diff(stream.sequence_offsets(0, stream.num_sequences)).astype(np.int32)
            try:
                indices = dataset_indices(lengths, sequences, num_samples, source.seq_length, source.seed)
            except ValueError as error:
                share = (
                    ""
                    if self.run.split is None
                    else f", the training share of data.megatron.split={list(self.run.split)}"
                )
                raise ValueError(
                    f"source {name!r} ({stream}{share}): {error}; shorten the sequence or add text"
                ) from error
            for kind, index in indices._asdict().items():
                np.save(folder / f"{kind}.npy", index)

        return StoredDataset(self._stored_at(key, build))

    def _blend(self, weights: Sequence[float], size: int) -> StoredBlend:
        def build(folder: Path) -> None:
            datasets, samples = blending_indices(weights, size)
            np.save(folder / "dataset_index.npy", datasets)
            np.save(folder / "dataset_sample_index.npy", samples)
            np.save(folder / "counts.npy", np.bincount(datasets, minlength=len(weights)))

        return StoredBlend(self._stored_at(["blend", weights, size], build))

    def _stored_at(self, key: Sequence[Any], build: Callable[[Path], None]) -> Path:
        name = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:24]
        return build_once(self._folder / f"{key[0]}-{name}", build)


def order_differences(saved: Mapping[str, Any], current: Mapping[str, Any], consumed: int) -> list[str]:
    """What of the first `consumed` samples two orders' descriptions disagree on, one sentence each."""
    found = [
        f"data.megatron.{key} was {saved[key]} and is now {current[key]}"
        for key in ("split", "weighted", "surplus")
        if saved[key] != current[key]
    ]
    starts = {phase[0]: phase for phase in current["phases"]}
    for start, end, first, samples, blend in saved["phases"]:
        if not start < min(end, consumed):
            continue
        now = starts.get(start)
        if now is None or now[2] != first or now[4] != blend:
            found.append(
                f"the phase from sample {start} began at sample {first} of Megatron's blend {blend} and does no longer"
            )
        elif now[3] != samples:
            found.append(
                f"Megatron's indices of the phase from sample {start} were built for {samples} samples and would be "
                f"for {now[3]}, which is another order; give the phase the length that it had, and "
                "the last one data.megatron.train_samples"
            )
    return found


class MegatronSchedule(PhaseSchedule):
    """A PhaseSchedule whose phases take Megatron's samples.

    Phases in a row with one blend are one for Megatron: a batch size that grows changes no order.
    """

    order: MegatronOrder
    """Of these `layouts`; to be set once the data is open, before a sample is asked for."""

    def __init__(
        self, phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int, run: MegatronRun
    ) -> None:
        super().__init__(phases, num_steps, global_batch_size, sequence_length)
        blends = {phase.name: phase.blend or {} for phase in phases}
        spans: list[tuple[int, int, Mapping[str, float]]] = []
        for span in self.spans:
            if not span.num_samples:
                continue
            if spans and span.blend_start == spans[-1][0]:
                spans[-1] = (spans[-1][0], span.end, spans[-1][2])
            else:
                # Megatron normalizes the floats as they are written; whole numbers in proportion can be a bit off.
                spans.append((span.start, span.end, blends[span.name]))
        self.layouts: list[Layout] = lay_out(spans, run)

    def locate(self, global_sample: int) -> Location:
        return Location(self.span_at(global_sample).name, *self.order.locate(global_sample))

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        return [
            SourceRange(span.name, *found)
            for span in self.spans
            for found in self.order.ranges(max(start, span.start), min(end, span.end))
        ]

    def counts(self, global_sample: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, first, last in self.order.ranges(0, global_sample):
            counts[name] = counts.get(name, 0) + last - first
        return counts

    def after(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """Raises ValueError: what Megatron laid out for a run is of that run."""
        raise ValueError(
            f"with data.order=megatron the {consumed} samples that were consumed keep their phases and batches; "
            "restore train.global_batch_size and the lengths of the phases up to there"
        )


def megatron_run(data: Any) -> MegatronRun:
    """What the group `data` of a configuration says of it."""
    given = data.megatron
    return MegatronRun(
        given.split, given.train_samples, given.consumed_samples, given.phases, given.weighted, given.surplus
    )


def check_megatron(data: Any) -> None:
    """Raise ValueError for settings of a configuration's `data.megatron` that are none, or would have no effect."""
    run = megatron_run(data)
    if data.order != "megatron" and run != MegatronRun():
        raise ValueError(
            f"data.megatron has no effect with data.order={data.order}; leave it out, or choose data.order=megatron"
        )
    split_range(run.split, 0, 1)
    if run.phases == "relaunched" and len(data.phases) == 1:
        raise ValueError("data.megatron.phases=relaunched has no effect with one phase; leave it out")


def held_out_by_split(bundle: DataBundle, split: Sequence[float] | None) -> Mapping[str, TokenSource]:
    """The validation sets of a run: those that it names, else the second share of Megatron's split of each source.

    A source of which the split leaves nothing to it has none.
    """
    if bundle.validation or split is None:
        return bundle.validation
    found = {}
    for name, stream in bundle.train.items():
        first, end = split_range(split, 1, stream.num_sequences)
        if first < end:
            found[name] = TokenRange(stream, first, end)
    return found
