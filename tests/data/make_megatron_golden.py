"""Record megatron_golden.json: the order of samples that Megatron-core itself gives, for megatron_cases.py.

Needs megatron-core, which the project does not: `pip install megatron-core==0.16.1` into another environment, then

    PYTHONPATH=. python tests/data/make_megatron_golden.py

It goes through `BlendedMegatronDatasetBuilder`, as Megatron's pretrain_gpt.py does.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset  # type: ignore[import-not-found]
from megatron.core.datasets.blended_megatron_dataset_builder import (  # type: ignore[import-not-found]
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-not-found]

from tests.data.megatron_cases import CASES, VOCAB_SIZE, Case, digest, write_datasets

GOLDEN = Path(__file__).with_name("megatron_golden.json")


class _Tokenizer:
    """As much of a tokenizer as datasets ask for."""

    vocab_size, pad, eod, eos = VOCAB_SIZE, -1, 0, 0

    def __init__(self) -> None:
        self.unique_identifiers = {"class": "none"}
        self.special_tokens_dict: dict[str, int] = {}


def build(case: Case, folder: Path) -> Any:
    """Megatron's training dataset of a case."""
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
    return BlendedMegatronDatasetBuilder(GPTDataset, [case.num_samples, 0, 0], lambda: True, config).build()[0]


def record(case: Case, dataset: Any) -> dict[str, Any]:
    """Digests of what a case's dataset was."""

    def arrays(of: Any, *names: str) -> dict[str, str]:
        return {name: digest(np.asarray(getattr(of, name))) for name in names}

    blended = isinstance(dataset, BlendedDataset)
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
        found = {case.name: record(case, build(case, Path(folder))) for case in CASES}
    entries = {"megatron-core": version("megatron-core"), "numpy": np.__version__, **found}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{GOLDEN}: {len(found)} cases")
