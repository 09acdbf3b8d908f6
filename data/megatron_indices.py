"""Megatron-core's indices: which tokens a Megatron run trains on at its sample i, bit for bit (megatron-core 0.16).

Three indices for each dataset of a blend, one generator for all of them, `RandomState(seed)`:

    document index  int32 [epochs * D]  the sequences of the `.idx`, every one `epochs` times, shuffled. The last epoch
                                        is shuffled on its own if fewer than 80% of its samples are needed
    sample index    [samples + 1, 2]    where sample j begins: position in the document index, and offset within the
                                        sequence. A sample is seq_length + 1 tokens; its last is the next one's first
    shuffle index   uint32 [samples]    the order in which samples are served; int64 where uint32 is too small

and one for the blend: at sample i the dataset that is furthest behind its weight.

Everything here is a function of sizes, weights and the seed; nothing reads tokens. Megatron walks through documents and
samples one by one in C++; here a sum and a search, or many stretches side by side, give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FINAL_EPOCH_THRESHOLD = 0.80
# Counts of all stretches together; they and a few arrays of their size stay in the processor's cache.
_LANE_ELEMENTS = 1 << 17


class DatasetIndices(NamedTuple):
    """The three indices of one dataset. sample_index: int32 or int64 [num_samples + 1, 2]."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def split_range(split: Sequence[float] | None, share: int, num_sequences: int) -> tuple[int, int]:
    """The sequences [first, end) of a dataset that Megatron's `--split` gives to its share 0 (training), 1 or 2.

    split: such as (949, 50, 1); None: all to training. Raises ValueError for what is no split.
    """
    if split is None:
        return (0, num_sequences) if share == 0 else (num_sequences, num_sequences)
    if not 1 <= len(split) <= 3 or min(split) < 0 or sum(split) == 0:
        raise ValueError(
            f"data.megatron.split={list(split)} is not up to three shares such as [949,50,1] (training, validation, "
            "test)"
        )
    shares = [*map(float, split), *[0.0] * (3 - len(split))]
    # Megatron's order of additions, because a rounding error can move a document to the other side.
    ends = [0.0]
    for part in _normalized(shares):
        ends.append(ends[-1] + part)
    return round(ends[share] * float(num_sequences)), round(ends[share + 1] * float(num_sequences))


def num_epochs(num_samples: int | None, tokens_per_epoch: int, seq_length: int) -> int:
    """The fewest epochs that hold num_samples samples; 1 for None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def dataset_indices(
    lengths: np.ndarray, sequences: tuple[int, int], num_samples: int | None, seq_length: int, seed: int
) -> DatasetIndices:
    """What `GPTDataset` builds for training on the sequences [first, end) of an `.idx` with these `lengths`.

    lengths: int32 [all sequences]. num_samples: at least so many; None: one epoch. Takes 8 bytes and less for each
    sequence of each epoch, and 12 for each sample.

    Raises ValueError for sequences with fewer tokens than a sample.
    """
    first, end = sequences
    per_epoch = int(np.sum(lengths[first:end], dtype=np.int64))
    if per_epoch < seq_length + 1:
        raise ValueError(f"{per_epoch} tokens are fewer than one sample of seq_length + 1 = {seq_length + 1}")
    epochs = num_epochs(num_samples, per_epoch, seq_length)
    separate, before_final = False, 0
    if epochs > 1:
        assert num_samples is not None
        before_final = ((epochs - 1) * per_epoch - 1) // seq_length
        from_final = num_samples - before_final
        separate = from_final < int(FINAL_EPOCH_THRESHOLD * ((per_epoch - 1) // seq_length))
    generator = np.random.RandomState(seed)
    document_index = _document_index(first, end, epochs, separate, generator)
    sample_index = _sample_index(lengths, document_index, epochs * per_epoch, seq_length)
    total = len(sample_index) - 1
    shuffle_index = _shuffle_index(before_final if separate else total, total, generator)
    return DatasetIndices(document_index, sample_index, shuffle_index)


def _document_index(
    first: int, end: int, epochs: int, separate_final: bool, generator: np.random.RandomState
) -> np.ndarray:
    """int32 [epochs * (end - first)]."""
    sequences = np.arange(first, end, dtype=np.int32)
    parts = [epochs - 1, 1] if separate_final else [epochs]
    shuffled = []
    for repeats in parts:
        part = np.tile(sequences, repeats)
        generator.shuffle(part)
        shuffled.append(part)
    return np.concatenate(shuffled) if len(shuffled) > 1 else shuffled[0]


def _sample_index(lengths: np.ndarray, document_index: np.ndarray, num_tokens: int, seq_length: int) -> np.ndarray:
    """[samples + 1, 2]: sample j begins with token j * seq_length of the shuffled sequences laid end to end."""
    samples = (num_tokens - 1) // seq_length
    largest = max(len(document_index), int(lengths.max()))
    index = np.zeros((samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    # In blocks: positions, places and offsets are int64.
    for block in range(0, samples + 1, 1 << 22):
        positions = np.arange(block, min(block + (1 << 22), samples + 1), dtype=np.int64) * seq_length
        places = np.searchsorted(ends, positions, side="right")
        index[block : block + len(positions), 0] = places
        index[block : block + len(positions), 1] = positions - (ends[places] - lengths[document_index[places]])
    index[0] = 0  # Megatron begins with the first sequence even if it is empty
    return index


def _shuffle_index(first: int, total: int, generator: np.random.RandomState) -> np.ndarray:
    """[0, first) shuffled, followed by [first, total) shuffled."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(total, dtype=dtype)
    generator.shuffle(index[:first])
    if first != total:
        generator.shuffle(index[first:])
    return index


def blend_sizes(weights: Sequence[float], num_samples: int, surplus: float) -> tuple[int, list[int]]:
    """(samples of the blend, samples to build of each dataset) for weights as given, which need not sum to one."""
    targets = [math.ceil(num_samples * weight) for weight in _normalized(weights)]
    return sum(targets), [math.ceil(target * (1 + surplus)) for target in targets]


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset int16 [size], its sample int64 [size]) at each sample of the blend.

    Sample i goes to the dataset d with the largest `w_d * max(i, 1) - count_d` in FP64, the first of equal ones, where
    count_d is how many it had before; a dataset's samples are served in order. weights: as blend_sizes gets them.

    The rule needs the count before each sample. Many stretches run side by side, each from counts that are about
    right; a stretch that did not begin where the one before it ended runs again from there, until all fit. Then, by
    induction from the first, every one began right.

    Products and differences are rounded one by one, as Megatron's C++ does it on x86; a compiler for ARM may fuse them,
    which can move samples where two datasets are equally far behind.
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
    begins = _about(w, np.maximum(starts - warm_up, 0))
    _run(w, begins, np.maximum(starts - warm_up, 0), warm_up)
    begins[:, 0] = 0  # the first has nothing before it, and is exact
    ends = begins.copy()
    wrong = np.arange(lanes)
    while len(wrong):
        counts = np.ascontiguousarray(begins[:, wrong])
        chosen, ordinals = datasets[wrong], samples[wrong]
        _run(w, counts, starts[wrong], length, chosen, ordinals)
        datasets[wrong], samples[wrong], ends[:, wrong] = chosen, ordinals, counts
        wrong = 1 + np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0))
        begins[:, wrong] = ends[:, wrong - 1]
    return datasets.reshape(-1)[:size], samples.reshape(-1)[:size]


def _about(w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Whole counts FP64 [D, lanes] that sum to `sizes` [lanes] and are close to w * sizes."""
    exact = np.outer(w, sizes)
    counts = np.floor(exact)
    ranks = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    counts += ranks < (sizes - counts.sum(axis=0))
    return counts


def _run(
    w: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    length: int,
    chosen: np.ndarray | None = None,
    ordinals: np.ndarray | None = None,
) -> None:
    """From counts [D, lanes] at the samples `starts` [lanes], `length` samples on; changes counts in place.

    chosen int16, ordinals int64 [lanes, length]: get the datasets, and their counts before.
    """
    lanes = np.arange(counts.shape[1])
    for step in range(length):
        at = np.maximum(starts + step, 1).astype(np.float64)
        best = np.zeros(len(lanes), dtype=np.int16)
        largest = w[0] * at - counts[0]
        for d in range(1, len(w)):
            error = w[d] * at - counts[d]
            better = error > largest
            np.copyto(largest, error, where=better)
            best[better] = d
        if chosen is not None and ordinals is not None:
            chosen[:, step] = best
            ordinals[:, step] = counts[best, lanes]
        counts[best, lanes] += 1
