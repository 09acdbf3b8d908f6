"""Evaluates models with lm-eval: a score for each metric of each task, the differences between models with confidence
intervals, and both as a table and as JSON.

Requests, log-likelihoods, texts and scores are lm-eval's own.

A score is a mean over n documents, x = sum x_i / n, or f(r), a function of a quotient of sums, r = sum a_i / sum b_i
(such as nats over bytes). To first order, the error of both is a mean of one number per document, its influence:

    mean       u_i = x_i - x
    quotient   u_i = f'(r) (a_i - r b_i) / (sum b / n)          f: to bits, or to a perplexity (the delta method)

    standard error = sqrt( sum u_i^2 / (n (n - 1)) )

For a mean this is the usual standard error, which lm-eval also gives; for bits per byte and perplexities lm-eval gives
none. Two models with the same documents are compared document by document: the error of the difference is that of
u_i^B - u_i^A. What makes a document hard for both models cancels, so this is often much smaller than
sqrt(se_A^2 + se_B^2), which is used if the documents cannot be paired. All of this assumes independent documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lm_eval.api.model
import lm_eval.api.task
import lm_eval.models.huggingface
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from scipy.stats import t as student
from tqdm import tqdm

from inference.models import Model, OpenedFolder, in_one_line
from megatron_fp4.logging.console import markdown


def _bar(*arguments: Any, **options: Any) -> Any:
    return tqdm(*arguments, **(options | {"disable": not sys.stderr.isatty(), "leave": False}))


# lm-eval has no option for its progress bars, which it also writes to files and leaves on the screen.
for _module in (lm_eval.api.task, lm_eval.api.model, lm_eval.models.huggingface):
    _module.tqdm = _bar
BATCH_ROWS = 8
# For the few metrics whose standard error lm-eval bootstraps.
_BOOTSTRAPS = 1000
_CONFIDENCE = 0.95
_PACKAGES = ("torch", "transformers", "lm_eval", "datasets", "tokenizers", "safetensors", "compressed-tensors")
Metric = tuple[str, str]
"""(task or group, metric)."""
Document = tuple[int, str]
"""(number in its task, hash of the document and its prompt)."""


@dataclass(frozen=True)
class Score:
    """stderr: the standard error; None if there is none. influences: of each document; None if the score is neither a
    mean nor a quotient. documents: lm-eval's result for each."""

    value: float
    stderr: float | None
    influences: Mapping[Document, float] | None = None
    documents: Mapping[Document, Any] = field(default_factory=dict)
    higher_is_better: bool | None = None

    def __str__(self) -> str:
        """`0.4125 ± 0.0123`."""
        digits = _digits(self.stderr)
        return f"{self.value:,.{digits}f}" + ("" if self.stderr is None else f" ± {self.stderr:,.{digits}f}")


class Difference(NamedTuple):
    """The difference of a score to the first model's. margin: half the width of its 95% interval; None if there is
    none. paired: whether it was computed document by document."""

    value: float
    margin: float | None
    paired: bool

    @property
    def is_clear(self) -> bool:
        return self.margin is not None and abs(self.value) > self.margin

    def __str__(self) -> str:
        """`-0.0250 [-0.0470, -0.0030] *`."""
        digits, interval = _digits(self.margin), ""
        if self.margin is not None:
            interval = f" [{self.value - self.margin:+,.{digits}f}, {self.value + self.margin:+,.{digits}f}]"
        return f"{self.value:+,.{digits}f}{interval}{' *' * self.is_clear}{'' if self.paired else ' ~'}"


def _digits(error: float | None) -> int:
    if error is None or error < 1:
        return 4
    return 2 if error < 100 else 0


def score(value: float, stderr: float | None, documents: Mapping[Document, Any], higher: bool | None = None) -> Score:
    """A score with its standard error and the influences of its documents.

    value, stderr: lm-eval's; stderr is used if there are no influences. documents: for each a number, or
    (log-likelihood, length). The statistic is the one that gives `value` for these documents; if none does, there are
    no influences. higher: whether a higher value is better.
    """
    found = _influences(value, list(documents.values()))
    if found is None:
        return Score(value, stderr, None, documents, higher)
    return Score(value, standard_error(found), dict(zip(documents, found, strict=True)), documents, higher)


def difference(first: Score, other: Score) -> Difference:
    """`other` less `first`."""
    a, b = first.influences, other.influences
    stderr, count, paired = None, math.inf, False
    if a is not None and b is not None and a.keys() == b.keys():
        stderr, count, paired = standard_error([b[document] - a[document] for document in a]), len(a), True
    elif first.stderr is not None and other.stderr is not None:
        stderr = math.hypot(first.stderr, other.stderr)
    margin = None if stderr is None else stderr * float(student.ppf((1 + _CONFIDENCE) / 2, count - 1))
    return Difference(other.value - first.value, margin, paired)


def standard_error(influences: Sequence[float]) -> float | None:
    """The standard error of a score with these influences; None for a single document."""
    n = len(influences)
    return math.sqrt(sum(u * u for u in influences) / (n * (n - 1))) if n > 1 else None


def _influences(value: float, documents: Sequence[Any]) -> list[float] | None:
    numbers = all(isinstance(x, (int, float)) for x in documents)
    pairs = [(x, 1) for x in documents] if numbers else documents
    if not pairs or not all(isinstance(x, (tuple, list)) and len(x) == 2 for x in pairs):
        return None
    total, length = (math.fsum(x[part] for x in pairs) for part in (0, 1))
    if length <= 0:
        return None
    ratio = total / length
    perplexity = math.exp(min(-ratio, 700))
    # (f(r), f'(r)) of lm-eval's statistics: bits per byte and perplexity; for plain numbers also the mean.
    statistics = [(-ratio / math.log(2), -1 / math.log(2)), (perplexity, -perplexity)]
    for result, slope in [(ratio, 1.0), *statistics] if numbers else statistics:
        if math.isclose(result, value, rel_tol=1e-9, abs_tol=1e-12):
            return [slope * (a - b * ratio) / (length / len(pairs)) for a, b in pairs]
    return None


class Examined(NamedTuple):
    """The scores of one model. facts: about the model. tasks: of each the version, the number of examples and of
    documents, and a sha256 of the documents and prompts in order."""

    name: str
    facts: Mapping[str, Any]
    scores: Mapping[Metric, Score]
    tasks: Mapping[str, Mapping[str, Any]]


def examine(
    named: Model, opened: OpenedFolder, tasks: Any, *, limit: int | None, batch_rows: int | None, max_length: int | None
) -> Examined:
    """Run loaded tasks (`tasks.load_tasks`) on a model's opened folder.

    limit: use only the first documents of each task; None: all. batch_rows: None: BATCH_ROWS. max_length: of a window;
    None: the model's.
    """
    # The seeds of lm-eval's own command, for the examples and the answers.
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    model = HFLM(
        pretrained=opened.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        softmax_dtype="float32",
        batch_size=batch_rows or BATCH_ROWS,
        max_length=max_length,
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the table
            results: Any = evaluate(model, tasks, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=True)
    except AssertionError as error:  # for example more tokens to score or to generate than a window has
        raise ValueError(f"lm-eval refuses {named.name} ({in_one_line(error)}); raise --max-length") from error
    facts = {
        **named.facts,
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "stored_dtype": opened.stored,
        "parameters": sum(parameter.numel() for parameter in opened.model.parameters()),
        "max_length": model.max_length,
    }
    return Examined(named.name, facts, _scores_of(results), _tasks_of(results))


def _scores_of(results: Mapping[str, Any]) -> dict[Metric, Score]:
    scores = {}
    for task, metrics in results["results"].items():
        members = _members(task, results["group_subtasks"])
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            documents = {
                _key(sample, member if member != task else ""): plain(sample[metric])
                for member in members
                for sample in results["samples"].get(member, ())
                if sample["filter"] == filtered and metric in sample
            }
            stderr = metrics.get(f"{metric}_stderr,{filtered}")
            stderr = float(stderr) if isinstance(stderr, (int, float)) else None
            higher = results["higher_is_better"].get(task, {}).get(metric)
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            scores[task, label] = score(float(value), stderr, documents, higher)
    return scores


def _tasks_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tasks = {}
    for task, samples in results["samples"].items():
        keys = dict.fromkeys(_key(sample) for sample in samples)
        tasks[task] = {
            "version": str(results["versions"].get(task)),
            "num_fewshot": int(results["n-shot"].get(task, 0)),
            "documents": len(keys),
            "sha256": hashlib.sha256("\n".join(digest for _, digest in keys).encode()).hexdigest(),
        }
    return tasks


def _members(task: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, including those of its subgroups; [task] if it is not a group."""
    if task not in groups:
        return [task]
    return [member for child in groups[task] for member in _members(child, groups)]


def _key(sample: Mapping[str, Any], task: str = "") -> Document:
    """Equal for two models if they answered the same document with the same prompt. task: of a group."""
    return sample["doc_id"], f"{task}{sample['doc_hash'][:16]}{sample['prompt_hash'][:16]}"


def plain(value: Any) -> Any:
    """A metric of a document as JSON values: NumPy's numbers become Python's."""
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def evaluation_table(models: Sequence[Examined]) -> str:
    """A table like the paper's table 2 (arXiv:2509.25149): a row for each task, a column for each model and for its
    difference to the first model; below it the legend and the tasks."""
    first, *others = models
    header = ["task", "metric", "n", first.name]
    header += [text for other in others for text in (other.name, f"less {first.name}")]
    rows = []
    for (task, metric), own in first.scores.items():
        better = {None: "", True: " (higher is better)", False: " (lower is better)"}[own.higher_is_better]
        cells = [task, metric + better, f"{len(own.documents):,}", str(own)]
        for theirs in (other.scores[task, metric] for other in others):
            cells += [str(theirs), str(difference(own, theirs))]
        rows.append(cells)
    lines = ["± is one standard error, over the documents of the task."]
    if others:
        lines.append(
            "In brackets is the 95% interval of a difference. * marks an interval without 0; two equally good models "
            "get it for one difference in twenty. Differences are computed document by document, except those marked ~."
        )
    lines += [
        f"{task} version {of['version']}: {of['documents']:,} documents, {of['num_fewshot']} examples before each, "
        f"sha256 {of['sha256'][:12]}"
        for task, of in first.tasks.items()
    ]
    return markdown(header, rows, lines, left=2)


def record(models: Sequence[Examined], command: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All results as JSON values. Documents are lists of [number, hash, lm-eval's result]."""
    first, *others = models
    results = []
    for row, own in first.scores.items():
        apart = {other.name: difference(own, other.scores[row]) for other in others}
        results.append(
            {
                "task": row[0],
                "metric": row[1],
                "higher_is_better": own.higher_is_better,
                "scores": {m.name: {"value": m.scores[row].value, "stderr": m.scores[row].stderr} for m in models},
                "differences_to_first": {
                    name: {"value": found.value, "margin_95": found.margin, "paired": found.paired}
                    for name, found in apart.items()
                },
            }
        )
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": list(command),
        "settings": dict(settings),
        "versions": versions,
        "models": {model.name: dict(model.facts) for model in models},
        "tasks": dict(first.tasks),
        "results": results,
        "documents": {
            model.name: [
                {"task": task, "metric": metric, "documents": [[*d, value] for d, value in of.documents.items()]}
                for (task, metric), of in model.scores.items()
            ]
            for model in models
        },
    }
