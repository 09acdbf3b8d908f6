"""Models beside each other, the first being what the others are held against: a Markdown table, and a record.

The shape is that of the paper's table 2 (arXiv:2509.25149): a row for each task, a column for each model; and what it
does not have, standard errors and whether differences exceed them.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from inference.evaluation.examine import Examined, Metric
from inference.evaluation.statistics import Difference, Score, difference

_PACKAGES = ("torch", "transformers", "lm_eval", "datasets", "tokenizers", "safetensors", "compressed-tensors")


def rows_of(models: Sequence[Examined]) -> list[Metric]:
    """The metrics of all models, as the first has them, then others."""
    return list(dict.fromkeys(row for model in models for row in model.scores))


def evaluation_table(models: Sequence[Examined]) -> str:
    """The table, and below it what its marks and tasks are."""
    first, *others = models
    header = ["task", "metric", "n", first.name]
    for other in others:
        header += [other.name, f"less {first.name}"]
    rows = []
    for row in rows_of(models):
        task, metric = row
        arrow = {True: " (higher is better)", False: " (lower is better)"}.get(first.higher_is_better.get(row), "")  # type: ignore[arg-type]
        cells = [task, metric + arrow, f"{len(first.documents.get(row, ())):,}", score_text(first.scores.get(row))]
        for other in others:
            cells += [score_text(other.scores.get(row)), difference_text(difference_of(first, other, row))]
        rows.append(cells)
    lines = [markdown(header, rows), ""]
    lines.append("± is one standard error, over the documents of the task.")
    if others:
        lines.append(
            "In brackets a difference as a multiple of its standard error; * marks those above 1. Of two equally good "
            "models one difference in three is above 1, and one in twenty above 2. Differences are taken document by "
            "document; ~ marks those that could not be."
        )
    lines += [
        f"{task} version {facts.version}: {facts.documents:,} documents, {facts.num_fewshot} examples before each, "
        f"sha256 {facts.sha256[:12]}"
        for task, facts in first.tasks.items()
    ]
    return "\n".join(lines)


def difference_of(first: Examined, other: Examined, row: Metric) -> Difference | None:
    """None if one of the two has no such score."""
    if row not in first.scores or row not in other.scores:
        return None
    return difference(first.scores[row], other.scores[row])


def score_text(score: Score | None) -> str:
    """`0.4125 ± 0.0123`."""
    if score is None:
        return "-"
    digits = _digits(score.stderr)
    return f"{score.value:,.{digits}f}" + ("" if score.stderr is None else f" ± {score.stderr:,.{digits}f}")


def difference_text(found: Difference | None) -> str:
    """`-0.0150 ± 0.0112 (1.3) *`."""
    if found is None:
        return "-"
    digits = _digits(found.stderr)
    text = f"{found.value:+,.{digits}f}"
    if found.stderr is not None:
        text += f" ± {found.stderr:,.{digits}f}"
        if found.stderr > 0:
            text += f" ({abs(found.value) / found.stderr:.1f})"
        text += " *" if found.exceeds else ""
    return text if found.paired else text + " ~"


def _digits(stderr: float | None) -> int:
    """Decimals that a number with this error is written with."""
    if stderr is None or stderr < 1:
        return 4
    return 2 if stderr < 100 else 0


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """A table whose columns also stand below each other on a terminal; all but the first `left` to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def record(models: Sequence[Examined], command: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, as JSON has it. Documents are lists of [number, hash, what lm-eval made of it]."""
    first = models[0]
    return {
        "command": list(command),
        "settings": dict(settings),
        "versions": versions(),
        "models": {model.name: dict(model.facts) for model in models},
        "tasks": {task: vars(facts) for model in reversed(models) for task, facts in model.tasks.items()},
        "results": [
            {
                "task": row[0],
                "metric": row[1],
                "higher_is_better": first.higher_is_better.get(row),
                "scores": {
                    model.name: {"value": model.scores[row].value, "stderr": model.scores[row].stderr}
                    for model in models
                    if row in model.scores
                },
                "differences_to_first": {
                    other.name: {
                        "value": found.value,
                        "stderr": found.stderr,
                        "paired": found.paired,
                        "exceeds_stderr": found.exceeds,
                    }
                    for other in models[1:]
                    if (found := difference_of(first, other, row)) is not None
                },
            }
            for row in rows_of(models)
        ],
        "documents": {
            model.name: [
                {"task": task, "metric": metric, "documents": [[*document, value] for document, value in of.items()]}
                for (task, metric), of in model.documents.items()
            ]
            for model in models
        },
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter to a score."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
