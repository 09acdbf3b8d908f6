"""One model examined by lm-eval: a score for each metric of each task, with what each document contributed."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inference.evaluation.folder import OpenedFolder, first_line
from inference.evaluation.scoring import Progress
from inference.evaluation.statistics import Document, Score, score

# For the few metrics whose standard error lm-eval draws.
_BOOTSTRAPS = 1000
Metric = tuple[str, str]
"""A task or group, and a metric of it."""


@dataclass(frozen=True)
class TaskFacts:
    """What a task was. sha256: of the documents and prompts that were used, in order."""

    version: str
    num_fewshot: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Examined:
    """The scores of one model. documents: what lm-eval made of each, by metric."""

    name: str
    facts: Mapping[str, Any]
    scores: Mapping[Metric, Score]
    higher_is_better: Mapping[Metric, bool | None]
    tasks: Mapping[str, TaskFacts]
    documents: Mapping[Metric, Mapping[Document, Any]]


def examine(
    name: str,
    opened: OpenedFolder,
    tasks: Any,
    *,
    facts: Mapping[str, Any],
    limit: int | None = None,
    batch_rows: int | None = None,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Examined:
    """Run loaded tasks (`tasks.load_tasks`) on an opened folder.

    name: the model's in tables. facts: about it, for records. limit: documents of each task, from the first.
    Raises ValueError for what lm-eval refuses.
    """
    from lm_eval.evaluator import evaluate

    from inference.evaluation.harness import FolderModel

    # As lm-eval's own command: of what examples and answers are drawn.
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    model = FolderModel(opened, batch_rows=batch_rows, max_length=max_length, progress=progress)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the table
            results: Any = evaluate(model, tasks, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=True)
    except AssertionError as error:  # such as more to generate than a window has room for
        raise ValueError(f"lm-eval refuses {name}: {first_line(error)}") from error
    scores: dict[Metric, Score] = {}
    higher: dict[Metric, bool | None] = {}
    documents: dict[Metric, Mapping[Document, Any]] = {}
    for task, metrics in results["results"].items():
        members = _members(task, results["group_subtasks"])
        listed = [str(metric.get("metric")) for metric in results["configs"].get(task, {}).get("metric_list") or ()]
        for key, value in sorted(metrics.items(), key=lambda metric: _place(metric[0], listed)):
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            row = (task, metric if filtered == "none" else f"{metric} ({filtered})")
            documents[row] = {
                _key(sample, member if member != task else ""): plain(sample[metric])
                for member in members
                for sample in results["samples"].get(member, ())
                if sample["filter"] == filtered and metric in sample
            }
            stderr = metrics.get(f"{metric}_stderr,{filtered}")
            stderr = float(stderr) if isinstance(stderr, (int, float)) else None
            scores[row] = score(float(value), stderr, documents[row])
            higher[row] = results["higher_is_better"].get(task, {}).get(metric)
    facts = {
        **facts,
        "dtype": opened.dtype,
        "stored_dtype": opened.stored,
        "parameters": sum(parameter.numel() for parameter in opened.model.parameters()),
        "max_length": model.max_length,
    }
    return Examined(name, facts, scores, higher, _tasks(results), documents)


def _place(key: str, listed: Sequence[str]) -> int:
    """Where a metric stands: as in the task's list, others behind."""
    metric = key.partition(",")[0]
    return listed.index(metric) if metric in listed else len(listed)


def _tasks(results: Mapping[str, Any]) -> dict[str, TaskFacts]:
    found = {}
    for task, samples in results["samples"].items():
        hashes = dict.fromkeys(_key(sample) for sample in samples)
        digest = hashlib.sha256("\n".join(of for _, of in hashes).encode()).hexdigest()
        shots = int(results["n-shot"].get(task, 0))
        found[task] = TaskFacts(str(results["versions"].get(task)), shots, len(hashes), digest)
    return found


def _members(task: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, those of its groups too; of a task itself."""
    if task not in groups:
        return [task]
    return [member for child in groups[task] for member in _members(child, groups)]


def _key(sample: Mapping[str, Any], task: str = "") -> Document:
    """What makes an item the same for two models: the document, and the prompt with its examples. task: of a group."""
    return sample["doc_id"], f"{task}{sample['doc_hash'][:16]}{sample['prompt_hash'][:16]}"


def plain(value: Any) -> Any:
    """A metric of a document as JSON has it: NumPy's numbers are Python's."""
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value
