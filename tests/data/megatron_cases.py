"""Megatron runs whose order of samples was recorded (megatron_golden.json): what they trained on, and how it is hashed.

Shared by the test and by make_megatron_golden.py, so that both write the same files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.indexed import HEADER, MAGIC, VERSION, index_path, tokens_path

VOCAB_SIZE = 60000


@dataclass(frozen=True)
class Case:
    """A Megatron run. sequences: of each dataset. weights: as on the command line, None for prefixes without weights.
    split: `--split` with `--data-path`; None: `--train-data-path`."""

    name: str
    sequences: tuple[int, ...]
    seq_length: int
    num_samples: int
    seed: int
    weights: tuple[float, ...] | None = None
    split: str | None = None


CASES = [
    Case("small", (5,), 8, 12, 1234),
    Case("small_blend", (6, 4, 3), 8, 30, 1234, (0.5, 0.3, 0.2)),
    # One epoch and less; many; the last one kept apart, and not, on both sides of 80%.
    Case("part_of_an_epoch", (400,), 32, 100, 1),
    *(Case(f"epochs_{n}", (60,), 16, n, 7) for n in (150, 300, 336, 340, 345, 350, 360, 400, 1000, 5000)),
    Case("single_weighted", (300,), 32, 2000, 5, (1.0,), "97,3,0"),
    Case("single_per_split_weighted", (300,), 32, 2000, 5, (1.0,)),
    Case("single_split", (1003,), 32, 1500, 5, None, "949,51,0"),
    Case("split_halves", (7, 33), 8, 100, 9, (2.0, 1.0), "50,50,0"),
    Case("split_two_shares", (101,), 8, 100, 9, None, "99,1"),
    Case("lengths_as_weights", (200, 50, 120), 16, 100000, 3, None, "97,3,0"),
    Case("lengths_as_weights_capped", (200, 50, 120), 16, 250, 3, None, "97,3,0"),
    Case("per_split_lengths", (200, 50), 16, 100000, 3),
    Case("percent", (200, 300, 50), 64, 1000, 42, (30, 50, 20), "100,0,0"),
    Case("ninths", (100,) * 9, 16, 4000, 0, (1,) * 9),
    Case("uneven", (150, 20, 300, 40, 80, 10, 500), 24, 6000, 99, (0.31, 0.0015, 0.2, 0.11, 0.07, 0.002, 0.3065)),
    Case("wide", tuple(20 + 7 * i for i in range(24)), 16, 9000, 2024, tuple(1.37**i for i in range(24)), "90,10,0"),
]


def lengths_of(case: Case, dataset: int) -> np.ndarray:
    """int32 [sequences]: some empty, some far longer than a sample."""
    rng = np.random.RandomState([case.seed, dataset, case.sequences[dataset]])
    lengths = rng.geometric(1 / 40, case.sequences[dataset]).astype(np.int32)
    lengths[rng.rand(len(lengths)) < 0.05] = 0
    lengths[0] += 3 * case.seq_length
    return lengths


def write_pair(prefix: Path, lengths: np.ndarray, first_token: int) -> None:
    """A `.bin`/`.idx` pair whose documents are up to three sequences; its tokens count up from first_token."""
    total = int(lengths.sum())
    tokens_path(prefix).write_bytes(((np.arange(total) * 7 + first_token) % VOCAB_SIZE).astype("<u2").tobytes())
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))[:-1]]) * 2
    documents = np.append(np.arange(0, len(lengths), 3), len(lengths)).astype("<i8")
    header = HEADER.pack(MAGIC, VERSION, 8, len(lengths), len(documents))
    parts = [lengths.astype("<i4"), pointers.astype("<i8"), documents]
    index_path(prefix).write_bytes(header + b"".join(part.tobytes() for part in parts))


def write_datasets(case: Case, folder: Path) -> list[Path]:
    """The prefixes of the case's datasets, written into `folder`."""
    prefixes = [folder / f"{case.name}_{dataset}" for dataset in range(len(case.sequences))]
    for dataset, prefix in enumerate(prefixes):
        write_pair(prefix, lengths_of(case, dataset), 11 + 1000 * dataset)
    return prefixes


def digest(array: np.ndarray) -> str:
    """Type, shape and content of an array."""
    array = np.ascontiguousarray(array)
    return f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:24]}"
