"""The Megatron runs whose order of samples is recorded in megatron_golden.json: their data, and how samples are hashed.

Recording needs megatron-core, which the project does not need: `pip install megatron-core==0.16.1` into another
environment, then `python -m tests.data.megatron_cases`. It uses `BlendedMegatronDatasetBuilder`, as Megatron's
pretrain_gpt.py does.
"""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import HEADER, MAGIC, VERSION

GOLDEN = Path(__file__).with_name("megatron_golden.json")
VOCAB_SIZE = 60000


@dataclass(frozen=True)
class Case:
    """A Megatron run. sequences: how many each dataset has. weights: as on the command line; None: prefixes without
    weights. split: `--split`, with `--data-path`; None: `--train-data-path`."""

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
    # Less than an epoch, one, many. The last epoch is shuffled apart if less than 80% of it is used.
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
    """int32 [sequences]. Some are empty, some far longer than a sample."""
    rng = np.random.RandomState([case.seed, dataset, case.sequences[dataset]])
    lengths = rng.geometric(1 / 40, case.sequences[dataset]).astype(np.int32)
    lengths[rng.rand(len(lengths)) < 0.05] = 0
    lengths[0] += 3 * case.seq_length
    return lengths


def write_pair(prefix: Path, lengths: np.ndarray, first_token: int) -> None:
    """Write a `.bin`/`.idx` pair with documents of up to three sequences. Tokens count up by 7 from first_token."""
    total = int(lengths.sum())
    Path(f"{prefix}.bin").write_bytes(((np.arange(total) * 7 + first_token) % VOCAB_SIZE).astype("<u2").tobytes())
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))[:-1]]) * 2
    documents = np.append(np.arange(0, len(lengths), 3), len(lengths)).astype("<i8")
    header = HEADER.pack(MAGIC, VERSION, 8, len(lengths), len(documents))
    parts = [lengths.astype("<i4"), pointers.astype("<i8"), documents]
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


def write_datasets(case: Case, folder: Path) -> list[Path]:
    """Write the case's datasets into `folder`; returns their prefixes."""
    prefixes = [folder / f"{case.name}_{dataset}" for dataset in range(len(case.sequences))]
    for dataset, prefix in enumerate(prefixes):
        write_pair(prefix, lengths_of(case, dataset), 11 + 1000 * dataset)
    return prefixes


def digest(array: np.ndarray) -> str:
    """A hash of an array's type, shape and content."""
    array = np.ascontiguousarray(array)
    return f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:24]}"


# --- recording


class _Tokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    vocab_size, pad, eod, eos = VOCAB_SIZE, -1, 0, 0

    def __init__(self) -> None:
        self.unique_identifiers = {"class": "none"}
        self.special_tokens_dict: dict[str, int] = {}


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Digests of the case's training dataset in Megatron."""
    from megatron.core.datasets import blended_megatron_dataset_builder as builders  # type: ignore[import-not-found]
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-not-found]

    weights = None if case.weights is None else [float(weight) for weight in case.weights]
    blend = [str(prefix) for prefix in write_datasets(case, folder)], weights
    paths: dict[str, Any] = {"blend_per_split": [blend, None, None]}
    if case.split is not None:
        paths = {"blend": blend, "split": case.split}
    config = GPTDatasetConfig(
        random_seed=case.seed,
        sequence_length=case.seq_length,
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **paths,
    )
    sizes = [case.num_samples, 0, 0]
    dataset = builders.BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]

    def arrays(of: Any, *names: str) -> dict[str, str]:
        return {name: digest(np.asarray(getattr(of, name))) for name in names}

    blended = hasattr(dataset, "datasets")
    parts = dataset.datasets if blended else [dataset]
    items = (dataset[i] for i in range(min(len(dataset), case.num_samples)))
    samples = np.stack([np.append(item["tokens"].numpy(), item["labels"].numpy()[-1]) for item in items])
    return {
        "size": len(dataset),
        "datasets": [arrays(part, "document_index", "sample_index", "shuffle_index") for part in parts],
        "samples": digest(samples),
        **(arrays(dataset, "dataset_index", "dataset_sample_index") if blended else {}),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {case.name: record(case, Path(folder)) for case in CASES}
    entries = {"megatron-core": version("megatron-core"), "numpy": np.__version__, **found}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
