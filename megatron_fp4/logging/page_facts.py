"""What a report says in words and numbers: of each run the facts, and what happened in it. Nothing here draws.

What a run does not say, because it is of an older version or has not come so far, is `UNKNOWN`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_fp4.logging.comparison import curve_of
from megatron_fp4.logging.goodput import Goodput
from megatron_fp4.logging.run_folder import RunFolder
from megatron_fp4.logging.words import counted, short_number, short_time

UNKNOWN = "unknown"
_MOST_EVENTS = 200
# Events that come again and again while all is well: told as one line each.
_ROUTINE = {
    "checkpoint": "checkpoints saved",
    "export": "checkpoints exported",
    "replay": "micro-batches computed twice",
    "recheck": "linears computed again by the reference",
}
# Told elsewhere, or of no use on a page.
_SILENT = {"text"}


def summary(runs: Sequence[RunFolder], goodputs: Sequence[Goodput | None]) -> list[tuple[str, list[str]]]:
    """Rows of (what, text for each run)."""
    columns = [dict(_facts(run, found)) for run, found in zip(runs, goodputs, strict=True)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name, UNKNOWN) for column in columns]) for name in names]
    if len(runs) > 1:
        rows += _loss_rows(runs)
    else:
        rows += [(name, [text]) for name, text in _own_losses(runs[0])]
    return rows


def phases(run: RunFolder) -> list[list[str]]:
    """Rows of the data phases as planned: name, length, blend; and as far as the run has come, its steps."""
    been = {name: f"{first + 1:,} to {last:,}" for name, first, last in run.spans}
    rows = []
    for phase in run.setting("data", "phases") or []:
        if not isinstance(phase, dict):
            continue
        name = str(phase.get("name", "main"))
        lengths = {"fraction": "{:.4g} of the run", "steps": "{:,} steps", "tokens": "{:,.0f} tokens"}
        length = [form.format(phase[key]) for key, form in lengths.items() if phase.get(key) is not None]
        blend = phase.get("blend") or {}
        text = ", ".join(f"{source} {share:g}" for source, share in blend.items()) if isinstance(blend, dict) else blend
        rows.append([name, " ".join(length) or "the rest", str(text) or "all", been.pop(name, "-")])
    return rows + [[name, UNKNOWN, UNKNOWN, steps] for name, steps in been.items() if name]


def plan(run: RunFolder) -> list[list[str]]:
    """Rows of the recipes: name, how many linears, why these, what each GEMM multiplies."""
    written = run.plan or run.facts.get("plan") or {}
    linears = [of for of in (written.get("linears") or {}).values() if isinstance(of, dict)]
    rows = []
    for name, gemms in (written.get("recipes") or {}).items():
        why = [str(of.get("why", "")) for of in linears if of.get("recipe") == name]
        reasons = ", ".join(f"{reason} ({why.count(reason)})" for reason in dict.fromkeys(why))
        lines = "; ".join(map(str, gemms)) if isinstance(gemms, list) else str(gemms)
        rows.append([str(name), f"{len(why)} of {len(linears)}", reasons, lines])
    return rows


def events(run: RunFolder) -> list[tuple[str, str, str]]:
    """What happened, in order, as (step, what, details): starts, switches, skips, spikes, faults and stops each, what
    is routine summed up, and of very many the last ones."""
    found: list[tuple[int, str, str]] = []
    for record in run.of("run"):
        if record["step"] > 0:
            found.append((record["step"], "start", f"goes on from step {record['step']:,}"))
    routine: dict[str, list[dict[str, Any]]] = {}
    for record in run.events:
        name = str(record["event"])
        bad = (name == "recheck" and record.get("faults")) or (name == "replay" and record.get("differs"))
        if name in _ROUTINE and not bad:
            routine.setdefault(name, []).append(record)
        elif name not in _SILENT:
            found.append((record["step"], name, _details(record)))
    found.sort(key=lambda row: row[0])
    rows = [(f"{step:,}", name, text) for step, name, text in found]
    if len(rows) > _MOST_EVENTS:
        left_out = len(rows) - _MOST_EVENTS
        rows = [("...", f"{left_out:,} earlier events", "in metrics.jsonl"), *rows[-_MOST_EVENTS:]]
    for name, records in routine.items():
        stalls = [record["stall"] for record in records if isinstance(record.get("stall"), int | float)]
        wait = f"; training stood still {max(stalls):.2g} s at most" if stalls else ""
        text = f"{len(records):,} {_ROUTINE[name]}, the last of step {records[-1]['step']:,}{wait}"
        rows.append((f"{records[-1]['step']:,}", name, text))
    return rows


def last_texts(run: RunFolder) -> tuple[int, list[tuple[str, str]]] | None:
    """What the model said last: the step, and (prompt, text) each."""
    texts = [record for record in run.events if record["event"] == "text" and record.get("samples")]
    if not texts:
        return None
    samples = [
        (str(one.get("prompt", "")), "not finite" if one.get("text") is None else str(one["text"]))
        for one in texts[-1]["samples"]
    ]
    return texts[-1]["step"], samples


def differences(runs: Sequence[RunFolder], defaults: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Rows of (key, value by default and in each run) of the settings that a run has otherwise than the default."""
    flat = [dict(_flat(settings)) for settings in (defaults, *(run.config for run in runs))]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = []
    for key in keys:
        values = [settings.get(key, "-") for settings in flat]
        # A run of before the key existed says nothing of it.
        if any(value not in ("-", values[0]) for value in values[1:]):
            rows.append((key, values))
    return rows


def starts(found: Goodput) -> list[list[str]]:
    """Rows of the starts: when, where, from and to which step, how it ended, wall time, share in steps that count."""
    rows = []
    for start in found.starts:
        wall = sum(start.seconds.values())
        steps = UNKNOWN if start.first_step is None else f"{start.first_step:,} to {start.last_step:,}"
        if start.lost_steps:
            steps += f" ({round(start.lost_steps):,} done again later)"
        where = f"{start.host}, {start.ranks} x {start.device}"
        reason = f": {start.reason}" if start.reason else ""
        share = f"{start.seconds.get('steps', 0.0) / wall:.1%}" if wall else "-"
        rows.append([_moment(start.began), where, steps, start.state + reason, short_time(wall), share])
    return rows


def _facts(run: RunFolder, found: Goodput | None) -> Iterator[tuple[str, str]]:
    last, facts = run.steps[-1], run.facts
    planned = facts.get("steps") or run.setting("train", "steps")
    state = str(run.state.get("state", "finished" if run.summary.get("finished") else UNKNOWN))
    if state == "running":
        state = "running, or killed"
    reason = run.state.get("reason")
    yield "state", f"{state}: {reason}" if reason else state
    yield "steps", f"{last['step']:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")
    yield "tokens", short_number(last["tokens"]) if "tokens" in last else UNKNOWN
    yield "model", _model(run)
    yield "precision", _precision(run)
    yield "quantized", _share_quantized(run)
    yield "optimizer", str(facts.get("optimizer", UNKNOWN))
    seed, of_data = run.setting("run", "seed"), run.setting("data", "seed")
    yield "seed", (UNKNOWN if seed is None else str(seed)) + ("" if of_data is None else f", of the data {of_data}")
    if found is None:
        yield "began", UNKNOWN
        spent = np.nansum(run.series("step_time")[1])
        yield "wall time", f"unknown; its steps took {short_time(float(spent))}" if spent else UNKNOWN
        yield "where", f"on {counted(facts['world_size'], 'rank')}" if "world_size" in facts else UNKNOWN
        yield "goodput", UNKNOWN
    else:
        newest = found.starts[-1]
        stopped = f", and {short_time(found.stopped)} between starts" if found.stopped >= 1 else ""
        count = f" in {counted(len(found.starts), 'start')}" if len(found.starts) > 1 else ""
        yield "began", _moment(found.starts[0].began)
        yield "wall time", short_time(found.wall) + count + stopped
        hosts = ", ".join(dict.fromkeys(start.host for start in found.starts))
        yield "where", f"{newest.ranks} x {newest.device}; first rank on {hosts}"
        lost = f", {found.lost_steps:,} steps lost and done again" if found.lost_steps else ""
        yield "goodput", f"{found.share:.1%} of the wall time in steps that count{lost}"
        yield "version", newest.version or UNKNOWN
    yield "tokens per second", _median(run, "tokens_per_second", short_number)
    yield "model TFLOP/s per device", _median(run, "model_tflops", short_number)
    if np.isfinite(run.series("mfu")[1]).any():
        yield "model FLOPs utilization", _median(run, "mfu", lambda value: f"{value:.1%}")
    yield "time of a step", _median(run, "step_time", lambda value: f"{value:.3g} s")
    waits, times = run.series("data_wait")[1], run.series("step_time")[1]
    share = np.nansum(waits) / np.nansum(times) if np.isfinite(waits).any() and np.nansum(times) > 0 else math.nan
    yield "of it waiting for data", f"{share:.2%}" if math.isfinite(share) else UNKNOWN
    memory = run.series("peak_memory_gib")[1]
    yield "peak memory of the first device", f"{np.nanmax(memory):.3g} GiB" if np.isfinite(memory).any() else UNKNOWN
    skipped = sum(bool(record.get("skipped")) for record in run.steps)
    spikes = sum(event["event"] == "spike" for event in run.events)
    yield "steps skipped", f"{skipped:,}" + (f" ({spikes:,} spikes)" if spikes else "")


def _model(run: RunFolder) -> str:
    name, pattern, width = (run.setting("model", key) for key in ("name", "pattern", "hidden_dim"))
    if name is None:
        return UNKNOWN
    count = run.facts.get("parameters")
    size = f", {short_number(count)} parameters" if isinstance(count, int) else ""
    shown = f"{pattern[:40]}{'...' if len(pattern) > 40 else ''}" if isinstance(pattern, str) else UNKNOWN
    return f"{name}{size}, {len(pattern or '')} blocks ({shown}), width {width}"


def _precision(run: RunFolder) -> str:
    plans = list(dict.fromkeys(str(record.get("plan", UNKNOWN)) for record in run.steps))
    switches = [event for event in run.events if event["event"] == "switch"]
    if not switches:
        return ", then ".join(plans)
    last, total = switches[-1], run.steps[-1]["step"]
    before = (last["step"] - 1) / total
    return f"{plans[0]} for {before:.0%} of the steps, from step {last['step']:,} on {last.get('target', UNKNOWN)}"


def _share_quantized(run: RunFolder) -> str:
    plan = run.plan or run.facts.get("plan") or {}
    linears = plan.get("quantized_linears")
    if linears is None:
        return UNKNOWN
    share = run.facts.get("quantized_flops")
    flops = f", {share:.1%} of the model's FLOPs" if isinstance(share, int | float) else ""
    recipes = {str(of.get("recipe")) for of in (plan.get("linears") or {}).values() if isinstance(of, dict)}
    names = ", ".join(sorted(recipes - {"bf16"}))
    return f"{linears} linears{f' ({names})' if names else ''}{flops}"


def _own_losses(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "training loss, last 2% of the steps", f"{curve_of(run).last_loss:.4f} nats per token"
    measured = run.of("validation")
    bits = (measured[-1].get("bits_per_byte") or {}) if measured else {}
    entropy = run.facts.get("unigram_entropy")
    for source, points in run.validation.items():
        step = max(points)
        extra = f", {bits[source]:.4f} bits per byte" if bits.get(source) is not None else ""
        if isinstance(entropy, dict) and isinstance(entropy.get(source), int | float):
            below = entropy[source] - points[step]
            extra += f"; {abs(below):.3f} {'below' if below >= 0 else 'above'} the unigram entropy"
        yield f"validation loss, {source}", f"{points[step]:.4f} nats per token{extra} (step {step:,})"


def _loss_rows(runs: Sequence[RunFolder]) -> Iterator[tuple[str, list[str]]]:
    """Last losses, with the gap to the first run."""
    curves = [curve_of(run) for run in runs]
    sources = list(dict.fromkeys(source for run in runs for source in run.validation))
    rows: list[tuple[str, list[tuple[float, int] | None]]] = [
        ("training loss, last 2%", [(curve.last_loss, int(curve.steps[-1])) for curve in curves])
    ]
    for source in sources:
        of = [run.validation.get(source) for run in runs]
        rows.append(
            (f"validation loss, {source}", [(points[max(points)], max(points)) if points else None for points in of])
        )
    for name, values in rows:
        first, texts = values[0], []
        for value in values:
            if value is None:
                texts.append(UNKNOWN)
                continue
            text = f"{value[0]:.4f}"
            if first is not None and value is not first:
                same = value[1] == first[1]
                text += f" ({100 * (value[0] / first[0] - 1):+.2f}%)" if same else f" (step {value[1]:,})"
            texts.append(text)
        yield name, texts


def _median(run: RunFolder, field: str, form: Any) -> str:
    values = run.series(field)[1]
    return str(form(float(np.nanmedian(values)))) if np.isfinite(values).any() else UNKNOWN


def _details(record: Mapping[str, Any]) -> str:
    parts = []
    for key, value in record.items():
        if key in ("kind", "step", "event") or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{key}: {text if len(text) <= 160 else text[:157] + '...'}")
    return "; ".join(parts)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        for index, value in enumerate(node):
            yield from _flat(value, f"{path}[{index}]")
    else:
        yield path, "null" if node is None else str(node).lower() if isinstance(node, bool) else str(node)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds)).strip()


def sources_of(runs: Sequence[RunFolder]) -> list[str]:
    """Every source that a run was validated on, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(run.validation for run in runs)))
