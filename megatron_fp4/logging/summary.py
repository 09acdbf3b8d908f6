"""The end of a run: its summary, its picture and what to do next; and what a run that was killed at its end lacks."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import RunConsole, facts_table
from megatron_fp4.logging.files import METRICS_FILE, PICTURE_FILE, SUMMARY_FILE, attempt, iterate_records, replace_text
from megatron_fp4.logging.goodput import goodput_of
from megatron_fp4.logging.metrics import finite


def summarize(
    console: RunConsole,
    config: Config,
    num_tokens: int,
    switched_at: int | None,
    losses: Mapping[str, float],
    entropy: Mapping[str, float],
    bits_per_byte: Mapping[str, float],
    export: Path | None = None,
) -> None:
    """Print the final table of a finished run and write its summary.json and loss.png, if the disk takes them.

    num_tokens: of the run. switched_at: the first step under the plan after the precision switch. losses, entropy:
    held-out loss and unigram entropy by source, in nats. bits_per_byte: the loss per byte of text, where known.
    export: the folder of the last checkpoint's export, if there is one.
    """
    run_dir = Path(config.run.dir)
    facts: dict[str, Any] = {
        "steps": config.train.steps,
        "tokens": num_tokens,
        "precision switched before step": None if switched_at is None else switched_at + 1,
    }
    for name, loss in losses.items():
        facts[f"validation loss, {name} (nats)"] = round(loss, 4)
        if name in bits_per_byte:
            facts[f"validation loss, {name} (bits per byte)"] = round(bits_per_byte[name], 4)
        facts[f"unigram entropy, {name} (nats)"] = round(entropy[name], 4)
        facts[f"below unigram entropy, {name}"] = round(entropy[name] - loss, 4)
    if export is not None:
        facts["exported as"] = f"{export.parent.name}/{export.name}"
    goodput = attempt("the goodput", lambda: goodput_of(iterate_records(run_dir / METRICS_FILE)))
    if goodput is not None:
        facts["goodput"] = str(goodput)
    text = json.dumps(finite({"finished": True, **facts}), indent=1, allow_nan=False) + "\n"
    attempt(str(run_dir / PICTURE_FILE), lambda: _draw(run_dir, config.logging.baseline))
    # Last: a summary that is there says that the run is finished.
    attempt(str(run_dir / SUMMARY_FILE), lambda: replace_text(run_dir / SUMMARY_FILE, text))
    names = (METRICS_FILE, PICTURE_FILE, "config.yaml", "plan.yaml", SUMMARY_FILE, "checkpoints", "exports")
    files = f"{run_dir}: {', '.join(name for name in names if (run_dir / name).exists())}"
    console.table(facts_table("Finished", {**facts, "files": files}))
    console.text("\n    ".join(["What to do next:", *next_steps(config)]))


def next_steps(config: Config) -> list[str]:
    """Commands for a run that has finished, as one types them in the current folder."""
    run_dir, known = Path(config.run.dir), config.data.kind == "builtin" or config.data.tokenizer is not None
    run, scripts = shlex.quote(str(run_dir)), Path(__file__).resolve().parents[2] / "scripts"
    prompt = shlex.quote((config.validation.prompts or ["Once"])[0]) if known else "1 --raw"
    exported = shlex.quote(os.path.join("exported", run_dir.resolve().name))
    commands = [f"generate {run} --prompt {prompt}", f"convert export-hf {run} {exported}"]
    others = [
        path.parent
        for path in sorted(run_dir.resolve().parent.glob(f"*/{SUMMARY_FILE}"), key=lambda path: -path.stat().st_mtime)
        if path.parent != run_dir.resolve() and _steps(path) == config.train.steps
    ]
    if others:
        commands.append(f"compare runs {shlex.quote(os.path.relpath(others[0]))} {run}")
    if not scripts.is_dir():
        return [f"megatron-fp4 {command}" for command in commands]
    words = (command.split(" ", 1) for command in commands)
    return [f"python {shlex.quote(os.path.relpath(scripts / f'{name}.py'))} {rest}" for name, rest in words]


def _draw(run_dir: Path, baseline: str | None) -> None:
    from megatron_fp4.logging.pictures import plot_loss  # imports matplotlib, for which no start should wait

    try:
        plot_loss(run_dir, baseline)
    except (OSError, ValueError):
        if baseline is not None:
            plot_loss(run_dir)
        raise


@dataclass(frozen=True)
class Missing:
    """Which of its last records and files a run lacks that has done all its steps.

    losses: the validation losses after its last step by source, if metrics.jsonl has them. others: what else it lacks,
    such as exports.
    """

    checkpoint: bool
    validation: bool
    files: tuple[str, ...]
    losses: dict[str, float]
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """For a line that says what is missing."""
        records = {"its last validation": self.validation, "its last checkpoint's event": self.checkpoint}
        return [*(name for name, missing in records.items() if missing), *self.others, *self.files]


def missing_of(
    run_dir: Path, steps: int, *, validates: bool, others: Callable[[int], Sequence[str]] = lambda _: ()
) -> Missing:
    """What the folder of a run that has done all its `steps` lacks, as the first rank sees it. A collective.

    validates: the run has held-out data. others: asked on the first rank for what else is missing. Raises OSError on
    all ranks.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = replace(_missing(run_dir, steps, validates), others=tuple(others(steps)))
        except OSError as error:
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Missing):
        return outcome[0]
    raise OSError(outcome[0])


def _missing(run_dir: Path, steps: int, validates: bool) -> Missing:
    path, trained, saved = run_dir / METRICS_FILE, False, False
    losses: dict[str, float] = {}
    for record in iterate_records(path) if path.is_file() else ():
        trained |= record["kind"] == "step"
        if record["step"] == steps:
            saved |= record.get("event") == "checkpoint"
            if record["kind"] == "validation" and record.get("losses"):
                losses = {name: math.nan if loss is None else loss for name, loss in record["losses"].items()}
    files = [PICTURE_FILE] if trained and not (run_dir / PICTURE_FILE).is_file() else []
    files += [] if _steps(run_dir / SUMMARY_FILE) == steps else [SUMMARY_FILE]
    return Missing(not saved, validates and not losses, tuple(files), losses)


def _steps(summary: Path) -> int | None:
    """How many steps a summary is of; None if it cannot be read."""
    try:
        return int(json.loads(summary.read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
