"""`data.order=megatron`: the samples of a Megatron run at the positions where Megatron has them.

Megatron lays out a whole run before its first step (megatron_indices.py). What it lays out depends on how many samples
the run was to have, so a run that goes on with another length goes on with another order; here that is refused.

A phase of the run is laid out in one of two ways, as `data.megatron.phases` says:

    transitions   like a Megatron run with `--phase-transition-iterations`: every phase has indices of its own, for as
                  many samples as it has, and begins at their beginning
    relaunched    like a Megatron run that was stopped and started with another `--data-path`: every phase has indices
                  for all samples of the run, and goes on at the position where the one before it stopped

The indices are built once for each disk, into files that all ranks and loader workers map into memory.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.bundle import TokenSource
from data.cache import build_once, default_cache_dir
from data.megatron_indices import blend_sizes, blending_indices, dataset_indices, split_range
from data.megatron_source import MegatronSource, StoredBlend, StoredDataset

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
        # The first phase began before this run, and the last one may go on behind it.
        before = run.consumed_samples if index == 0 else 0
        behind = samples - total if index == len(spans) - 1 else 0
        layouts.append(Layout(start, end, before, before + end - start + behind, weights))
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
        if not layout.start <= global_sample < layout.end:
            raise IndexError(f"sample {global_sample} is outside a run of {self.layouts[-1].end}")
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
        return StoredBlend(self._stored_at(["blend", weights, size], partial(_build_blend, weights=weights, size=size)))

    def _stored_at(self, key: Sequence[Any], build: Any) -> Path:
        name = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:24]
        return build_once(self._folder / f"{key[0]}-{name}", build)


def _build_blend(folder: Path, weights: Sequence[float], size: int) -> None:
    datasets, samples = blending_indices(weights, size)
    np.save(folder / "dataset_index.npy", datasets)
    np.save(folder / "dataset_sample_index.npy", samples)
    np.save(folder / "counts.npy", np.bincount(datasets, minlength=len(weights)))


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
