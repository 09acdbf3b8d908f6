"""`data.order=megatron`: the samples of a Megatron run in the order of megatron-core 0.16, bit for bit.

Megatron computes the order of a whole run before its first step, as arrays that are functions of sizes, weights and the
seed. Each dataset of a blend has three arrays, all drawn from one generator, `RandomState(seed)`:

    document_index  int32 [epochs * D]  the sequences of the `.idx`, each `epochs` times, shuffled. The last epoch is
                                        shuffled separately if fewer than 80% of its samples are needed
    sample_index    [samples + 1, 2]    where sample j begins: position in the document index, offset in that sequence.
                                        A sample is seq_length + 1 tokens; its last token is the first of the next
    shuffle_index   uint32 [samples]    the order in which samples are served; int64 if uint32 is too small

A blend has two more: dataset_index, for each sample the dataset that is furthest behind its weight, and
dataset_sample_index, how many samples this dataset served before. Megatron's C++ code computes the arrays sample by
sample; the vectorized code here gives the same numbers.

The arrays depend on the number of samples of the run, so a resume with another length is refused. Each phase has its
own arrays; `data.megatron.phases` selects how:

    transitions   as with `--phase-transition-iterations`: built for the samples of the phase, used from the beginning
    relaunched    as when Megatron is stopped and restarted with another `--data-path`: built for all samples of the
                  run, used from the position where the phase before it ended

The arrays are built once per disk, as files that all ranks and loader workers map into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import DataBundle, TokenRange, TokenSource
from data.order import Samples, Window
from data.schedule import Location, Phase, PhaseSchedule, SourceRange
from data.storage import build_once, default_cache_dir

# Part of the folder name of arrays: increase it with any change to their content.
_FORMAT = 2
# Samples before a position in which the last one of each dataset is searched; else all are counted.
_LOOK_BACK = 1 << 18
# Datasets times lanes of `blending_indices`: a few arrays of this size fit into the processor's cache.
_LANE_ELEMENTS = 1 << 17


# --- the arrays


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_range(split: Sequence[float] | None, share: int, num_sequences: int) -> tuple[int, int]:
    """The sequences [first, end) of a dataset that Megatron's `--split` (such as 949, 50, 1) assigns to `share`: 0 for
    training, 1 for validation, 2 for test. split None: all are for training. Raises ValueError for an invalid split."""
    if split is None:
        return (0, num_sequences) if share == 0 else (num_sequences, num_sequences)
    if not 1 <= len(split) <= 3 or min(split) < 0 or sum(split) == 0:
        raise ValueError(
            f"data.megatron.split={list(split)} is not up to three shares such as [949,50,1] (training, validation, "
            "test)"
        )
    # Add in Megatron's order: a rounding error can move a document to another share.
    ends = [0.0]
    for part in _normalized([*split, *[0.0] * (3 - len(split))]):
        ends.append(ends[-1] + part)
    return round(ends[share] * float(num_sequences)), round(ends[share + 1] * float(num_sequences))


def dataset_indices(
    lengths: np.ndarray, sequences: tuple[int, int], num_samples: int | None, seq_length: int, seed: int
) -> dict[str, np.ndarray]:
    """The arrays that `GPTDataset` builds for training on the sequences [first, end) of an `.idx`, by name. lengths:
    int32 [all sequences]. num_samples: at least this number is built; None: one epoch."""
    per_epoch = int(np.sum(lengths[slice(*sequences)], dtype=np.int64))
    epochs, separate, before_last = 1, False, 0
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + 1) // per_epoch))
    if num_samples is not None and epochs > 1:
        before_last = ((epochs - 1) * per_epoch - 1) // seq_length
        separate = num_samples - before_last < int(0.80 * ((per_epoch - 1) // seq_length))
    generator = np.random.RandomState(seed)

    def shuffled(index: np.ndarray, last: int) -> np.ndarray:
        """Shuffle `index` in place; shuffle index[last:] separately if the last epoch is separate."""
        for part in (index[:last], index[last:]) if separate else (index,):
            generator.shuffle(part)
        return index

    repeated = np.tile(np.arange(*sequences, dtype=np.int32), epochs)
    document_index = shuffled(repeated, len(repeated) - len(repeated) // epochs)
    samples = (epochs * per_epoch - 1) // seq_length
    # Sample j begins with token j * seq_length of the shuffled sequences laid end to end.
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    begins = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, begins, side="right")
    largest = max(len(document_index), int(lengths.max()))
    sample_index = np.empty((samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    sample_index[:, 0] = places
    sample_index[:, 1] = begins - (ends[places] - lengths[document_index[places]])
    sample_index[0] = 0  # Megatron begins with the first sequence even if it is empty
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffle_index = shuffled(np.arange(samples, dtype=dtype), before_last)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of a blend with these weights, its dataset, int16, and how many that one had before, int64.

    Sample i comes from the dataset d with the largest `w_d * max(i, 1) - count_d` in FP64, where count_d is how many
    samples d served before; of equal ones, from the first. A dataset's samples are served in order.

    The rule needs the counts before each sample. The samples are cut into lanes, which are computed in parallel from
    approximate counts. A lane whose first counts are not the last counts of the lane before it is computed again from
    those, until all agree. The first lane begins exactly, so by induction all lanes are then exact.

    Products and differences are rounded separately, as in Megatron's C++ code on x86. A compiler for ARM may fuse
    them, which can change the order where two datasets are equally far behind.
    """
    # Megatron normalizes the weights twice, and 1.0 / 0.9999999999999999 is not 1.
    w = np.array(_normalized(_normalized(weights)), dtype=np.float64)
    if len(w) > 32766:
        raise ValueError(f"a Megatron blend has at most 32,766 datasets, not {len(w)}")
    lanes = max(1, min(_LANE_ELEMENTS // len(w), -(-size // 512)))
    length = -(-size // lanes)
    datasets = np.empty((lanes, length), dtype=np.int16)
    samples = np.empty((lanes, length), dtype=np.int64)
    starts = np.arange(lanes, dtype=np.int64) * length
    warm_up = min(length, 4 * len(w) + 64)
    before = np.maximum(starts - warm_up, 0)
    begins = _approximate_counts(w, before)
    _blend(w, begins, before, warm_up)
    begins[:, 0] = 0  # exact: no sample comes before the first lane
    ends = begins.copy()
    wrong = np.arange(lanes)
    while len(wrong):
        counts = np.ascontiguousarray(begins[:, wrong])
        datasets[wrong], samples[wrong] = _blend(w, counts, starts[wrong], length)
        ends[:, wrong] = counts
        wrong = 1 + np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0))
        begins[:, wrong] = ends[:, wrong - 1]
    return datasets.reshape(-1)[:size], samples.reshape(-1)[:size]


def _approximate_counts(w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Integers, FP64 [D, lanes], that sum to `sizes` [lanes] and are close to w * sizes."""
    exact = np.outer(w, sizes)
    counts = np.floor(exact)
    ranks = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    return counts + (ranks < (sizes - counts.sum(axis=0)))


def _blend(w: np.ndarray, counts: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`length` samples of each lane: their datasets, int16 [lanes, length], and their counts before them, int64 [lanes,
    length]. counts [D, lanes]: before the samples `starts` [lanes]; updated in place to after the last samples."""
    lanes = np.arange(counts.shape[1])
    datasets = np.empty((len(lanes), length), dtype=np.int16)
    samples = np.empty((len(lanes), length), dtype=np.int64)
    for step in range(length):
        at = np.maximum(starts + step, 1).astype(np.float64)
        best = np.zeros(len(lanes), dtype=np.int16)
        largest = w[0] * at - counts[0]
        for d in range(1, len(w)):
            error = w[d] * at - counts[d]
            better = error > largest
            np.copyto(largest, error, where=better)
            best[better] = d
        datasets[:, step] = best
        samples[:, step] = counts[best, lanes]
        counts[best, lanes] += 1
    return datasets, samples


# --- the samples of a source and of a run


@cache
def _stored(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def _build(cache_dir: Path, key: Sequence[Any], arrays: Callable[[], Mapping[str, np.ndarray]]) -> Path:
    """The folder with these arrays, which `key` identifies. Builds it if no process has done so."""

    def build(folder: Path) -> None:
        for name, array in arrays().items():
            np.save(folder / f"{name}.npy", array)

    name = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:24]
    return build_once(cache_dir / f"{key[0]}-{name}", build)


class MegatronSource(Samples):
    """The samples of one source, numbered through the datasets of all phases one after the other. `datasets` are the
    folders with their arrays. split: `data.megatron.split`, the share of the sequences that is trained on."""

    order = "megatron"

    def __init__(
        self, name: str, stream: TokenSource, seq_length: int, seed: int, vocab_size: int, split: Sequence[float] | None
    ) -> None:
        self._sequences = split_range(split, 0, stream.num_sequences)
        borders = stream.sequence_offsets(*self._sequences)
        super().__init__(name, stream, seq_length, seed, vocab_size, int(borders[-1] - borders[0]))
        self.datasets: list[Path] = []
        self._bases = [0]

    def add(self, num_samples: int | None, cache_dir: Path) -> tuple[int, int]:
        """Append the dataset of a phase of at least num_samples (None: one epoch); returns first ordinal and size."""
        stream = self.stream
        key = ["dataset", stream.identity(), *self._sequences, num_samples, self.seq_length, self.seed]

        def arrays() -> dict[str, np.ndarray]:
            lengths = np.diff(stream.sequence_offsets(0, stream.num_sequences)).astype(np.int32)
            return dataset_indices(lengths, self._sequences, num_samples, self.seq_length, self.seed)

        folder, base = _build(cache_dir, key, arrays), self._bases[-1]
        count = len(_stored(folder, "shuffle_index"))
        self.datasets.append(folder)
        self._bases.append(base + count)
        return base, count

    def _read(self, sample: int, documents: bool) -> Window:
        dataset = bisect_right(self._bases, sample) - 1
        document_index, sample_index, shuffle_index = (
            _stored(self.datasets[dataset], name) for name in ("document_index", "sample_index", "shuffle_index")
        )
        index = int(shuffle_index[sample - self._bases[dataset]])
        (first, offset), (last, last_offset) = sample_index[index : index + 2].tolist()
        pieces = []
        for place in range(first, last + 1):
            sequence = int(document_index[place])
            begin, end = self.stream.sequence_offsets(sequence, sequence + 1).tolist()
            if place == last:
                end = begin + last_offset + 1
            if begin + offset < end:
                pieces.append(self.stream.tokens(begin + offset, end - begin - offset))
            offset = 0
        tokens = np.concatenate(pieces)
        assert len(tokens) == self.seq_length + 1, (self.name, len(tokens))
        numbers = np.repeat(np.arange(len(pieces), dtype=np.int32), list(map(len, pieces))) if documents else None
        return Window(tokens, numbers)

    def mismatch(self, saved: Mapping[str, Any]) -> str | None:
        if (now := len(self.stream.parts)) > len(saved["files"]):  # would change the order
            return f"had {len(saved['files'])} files and now has {now}; with data.order=megatron none can be added"
        return super().mismatch(saved)


@dataclass
class Layout:
    """The samples [start, end) of the run are the samples [first, first + end - start) of a Megatron dataset, which was
    built for num_samples samples of sources with the weights of `blend`.

    folder: with the blend's arrays; None if one serves all. bases: by source, the ordinal of its dataset's first.
    """

    start: int
    end: int
    first: int
    num_samples: int
    blend: Mapping[str, float]
    folder: Path | None = None
    bases: dict[str, int] = field(default_factory=dict)

    def locate(self, sample: int) -> tuple[str, int]:
        dataset, index = 0, self.first + sample - self.start
        if self.folder is not None:
            arrays = (_stored(self.folder, name) for name in ("dataset_index", "dataset_sample_index"))
            dataset, index = (int(array[index]) for array in arrays)
        name = list(self.blend)[dataset]
        return name, self.bases[name] + index

    def ordinals(self, sample: int) -> list[int]:
        """For each source, the ordinal of its next sample at a sample of the run."""
        position = self.first + sample - self.start
        counts = [position] if self.folder is None else _counts_before(self.folder, position, len(self.blend))
        return [self.bases[name] + count for name, count in zip(self.blend, counts, strict=True)]


def _counts_before(folder: Path, position: int, num_datasets: int) -> list[int]:
    datasets = _stored(folder, "dataset_index")
    found, back = np.unique(datasets[max(0, position - _LOOK_BACK) : position][::-1], return_index=True)
    if len(found) < num_datasets:
        return np.bincount(datasets[:position], minlength=num_datasets).tolist()
    return (_stored(folder, "dataset_sample_index")[position - 1 - back] + 1).tolist()


class MegatronSchedule(PhaseSchedule):
    """A PhaseSchedule whose phases take Megatron's samples. Call `open` before the first `locate`.

    Consecutive phases with the same blend are one phase for Megatron, so a growing batch size does not change the
    order. Raises ValueError as PhaseSchedule does, and if the Megatron run is shorter than this one.
    """

    def __init__(
        self, phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int, run: Any
    ) -> None:
        super().__init__(phases, num_steps, global_batch_size, sequence_length)
        split = None if run.split is None else list(map(float, run.split))
        self._settings = {"split": split, "weighted": run.weighted, "surplus": run.surplus}
        total = run.consumed_samples + self.num_samples
        samples = total if run.train_samples is None else run.train_samples
        if samples < total:
            raise ValueError(
                f"data.megatron.train_samples={samples} is less than the {total} samples up to the end of this run; "
                "give --train-iters times --global-batch-size of the Megatron run, or lower train.steps"
            )
        # Megatron normalizes the floats of the configuration; Blend.shares could round differently.
        blends = {phase.name: {n: w for n, w in (phase.blend or {}).items() if w > 0} for phase in phases}
        self.layouts: list[Layout] = []
        for span in self.spans:
            if self.layouts and span.blend_start == self.layouts[-1].start:
                self.layouts[-1].end = span.end
            elif span.num_samples:
                self.layouts.append(Layout(span.start, span.end, 0, samples, blends[span.name]))
        for layout in self.layouts:
            if run.phases == "relaunched":
                layout.first = run.consumed_samples + layout.start
            else:
                layout.num_samples = layout.end - layout.start
        if run.phases == "transitions":
            # The first phase may have begun before this run, and the last one may continue after it.
            self.layouts[0].first = run.consumed_samples
            self.layouts[0].num_samples += run.consumed_samples
            self.layouts[-1].num_samples += samples - total

    def open(
        self,
        streams: Mapping[str, TokenSource],
        seq_length: int,
        seed: int,
        vocab_size: int,
        cache_dir: str | Path | None = None,
    ) -> dict[str, MegatronSource]:
        """The sources of the run. Builds their arrays in cache_dir (None: the user's cache folder) unless they exist.

        Raises ValueError for settings that Megatron refuses, or with which it never ends or runs out of samples.
        """
        self.check_sources(streams)
        folder = (default_cache_dir() if cache_dir is None else Path(cache_dir)) / "megatron"
        sources = {
            name: MegatronSource(name, streams[name], seq_length, seed, vocab_size, self._settings["split"])
            for name in dict.fromkeys(name for layout in self.layouts for name in layout.blend)
        }
        for layout in self.layouts:
            self._open_layout(layout, sources, folder)
        return sources

    def _open_layout(self, layout: Layout, sources: Mapping[str, MegatronSource], folder: Path) -> None:
        names, weights, size = list(layout.blend), list(layout.blend.values()), layout.num_samples
        weighted = len(names) > 1 if self._settings["weighted"] is None else self._settings["weighted"]
        wanted: list[int | None] = [size]
        if weighted:
            shares = [math.ceil(size * weight) for weight in _normalized(weights)]
            size, wanted = sum(shares), [math.ceil(share * (1 + self._settings["surplus"])) for share in shares]
        elif len(names) > 1:
            if len(set(weights)) > 1:
                raise ValueError(
                    "with data.megatron.weighted=false the lengths of the sources are the weights, but the blend is "
                    f"{layout.blend}; give every source the weight 1"
                )
            wanted = [None] * len(names)
        built = [sources[name].add(samples, folder) for name, samples in zip(names, wanted, strict=True)]
        layout.bases = {name: base for name, (base, _) in zip(names, built, strict=True)}
        if not weighted and len(names) == 1:
            return
        if not weighted:
            weights = [float(count) for _, count in built]
            size = min(size, sum(count for _, count in built))
            if size < (needed := layout.first + layout.end - layout.start):
                raise ValueError(
                    f"{', '.join(names)} have {size} samples in one epoch, and Megatron serves only one epoch of a "
                    f"--data-path without weights; this run needs {needed}: lower train.steps"
                )

        def arrays() -> dict[str, np.ndarray]:
            datasets, samples = blending_indices(weights, size)
            return {"dataset_index": datasets, "dataset_sample_index": samples}

        layout.folder = _build(folder, ["blend", weights, size], arrays)
        for name, (_, has), count in zip(names, built, _counts_before(layout.folder, size, len(names)), strict=True):
            if count > has:
                raise ValueError(
                    f"the blend takes {count} samples of {name!r}, but only {has} were built, so Megatron would fail "
                    "too; raise data.megatron.surplus (--mid-level-dataset-surplus) as in that run"
                )

    def locate(self, global_sample: int) -> Location:
        layout = self.layouts[bisect_right(self.layouts, global_sample, key=lambda layout: layout.start) - 1]
        return Location(self.span_at(global_sample).name, *layout.locate(global_sample))

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        found = []
        for span in self.spans:
            for layout in self.layouts:
                first, last = (min(max(at, span.start, layout.start), span.end, layout.end) for at in (start, end))
                if first < last:
                    ordinals = zip(layout.blend, layout.ordinals(first), layout.ordinals(last), strict=True)
                    found += [SourceRange(span.name, *taken) for taken in ordinals if taken[1] < taken[2]]
        return found

    def counts(self, global_sample: int) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for taken in self.source_ranges(0, global_sample):
            counts[taken.source] += taken.end - taken.start
        return dict(counts)

    def after(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """Raises ValueError: Megatron's order cannot change during a run."""
        raise ValueError(
            f"with data.order=megatron the {consumed} samples that were consumed keep their phases and batches; "
            "restore train.global_batch_size and the lengths of the phases up to there"
        )

    def layout_description(self) -> dict[str, Any]:
        """What a checkpoint saves of the layouts: JSON values."""
        phases = [
            [layout.start, layout.end, layout.first, layout.num_samples, [list(pair) for pair in layout.blend.items()]]
            for layout in self.layouts
        ]
        return {**self._settings, "phases": phases}

    def layout_differences(self, saved: Mapping[str, Any], consumed: int) -> list[str]:
        """How the layout of the first `consumed` samples differs from `saved`, the `layout_description` in a
        checkpoint, one sentence for each difference."""
        found = [
            f"data.megatron.{key} was {saved[key]} and is now {value}"
            for key, value in self._settings.items()
            if saved[key] != value
        ]
        layouts = {phase[0]: phase[2:] for phase in self.layout_description()["phases"]}
        for start, end, *was in saved["phases"]:
            if start < min(end, consumed) and layouts.get(start) != was:
                found.append(
                    f"the phase from sample {start} had Megatron's [first sample, samples, blend] {was} and now has "
                    f"{layouts.get(start)}, which changes the order; restore its blend and length (for the last phase "
                    "also data.megatron.train_samples)"
                )
        return found


# --- the configuration


def check_megatron(data: Any) -> None:
    """Raise ValueError for settings in a configuration's `data.megatron` that are invalid or have no effect."""
    run = data.megatron
    if data.order != "megatron" and run != type(run)():
        raise ValueError(
            f"data.megatron has no effect with data.order={data.order}; leave it out, or set data.order=megatron"
        )
    split_range(run.split, 0, 1)
    if run.phases == "relaunched" and len(data.phases) == 1:
        raise ValueError("data.megatron.phases=relaunched has no effect with one phase; leave it out")


def held_out_by_split(bundle: DataBundle, split: Sequence[float] | None) -> Mapping[str, TokenSource]:
    """The validation sets of a run: those of `data.validation`, or else the second share of Megatron's split."""
    if bundle.validation or split is None:
        return bundle.validation
    ranges = {name: (stream, *split_range(split, 1, stream.num_sequences)) for name, stream in bundle.train.items()}
    return {name: TokenRange(*of) for name, of in ranges.items() if of[1] < of[2]}
