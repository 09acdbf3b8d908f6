"""`report.html`: one page about one run, or about several side by side, that needs nothing besides itself.

Figures stand in it as SVG, there is no script, and its policy forbids the browser to fetch anything. The template
escapes all text.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_fp4 import __version__
from megatron_fp4.config.removed_keys import leaves
from megatron_fp4.logging.console import short_number, short_time
from megatron_fp4.logging.files import REPORT_FILE, replace_text
from megatron_fp4.logging.pictures import (
    QUANTITIES,
    draw_gaps,
    draw_heatmap,
    draw_losses,
    draw_training,
    drawing,
    heatmap_height,
    legend_below,
    look,
    mark_run,
    smooth,
    step_axis,
    thinned,
)
from megatron_fp4.logging.run_folder import RunFolder, open_run, open_runs
from megatron_fp4.logging.run_log import ORDER, Goodput, goodput_of
from megatron_fp4.runtime.revision import revision

UNKNOWN = "unknown"
_SIZE, _MOST_EVENTS = (5.4, 3.3), 200
# Events of which the page has the number and the last one, if all is well.
_ROUTINE = ("checkpoint", "export", "replay", "recheck")
# Numbers that are drawn: their titles, their fields, the kind of records that have them.
_CURVES = (
    ("learning rate", "lr", "step"),
    ("gradient norm before clipping", "grad_norm", "step"),
    ("tokens per second, all devices", "tokens_per_second", "step"),
    ("model FLOPs utilization", "mfu", "step"),
    ("seconds for a step, data included", "step_time", "step"),
    ("seconds waiting for data in a step", "data_wait", "step"),
    ("peak memory of the first device (GiB)", "peak_memory_gib", "step"),
    ("gradient over its quantization noise", "ratio", "gradient_noise"),
)
Row = Sequence[str]
# Its title, the names of its columns, its rows.
Table = tuple[str, Sequence[str], Sequence[Row]]

_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ names }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1120px; padding: 12px 16px; }
h1 { overflow-wrap: anywhere; } h2 { font-size: 1.15em; border-bottom: 1px solid #ccc; } h3 { font-size: 1em; }
nav a { margin-right: .9em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 18px; }
figure { margin: 0; break-inside: avoid; min-width: 0; } svg { width: 100%; height: auto; display: block; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .93em; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid #eee; }
td { font-variant-numeric: tabular-nums; overflow-wrap: break-word; white-space: pre-wrap; max-width: 34em; }
.note { color: #666; font-size: .9em; }
@media print { nav { display: none; } .figures { grid-template-columns: 1fr 1fr; } }
</style></head><body>
<h1>{{ names }}</h1>
<p class="note">{{ folders }}; written {{ moment }} by megatron_fp4 {{ version }} ({{ commit }})</p>
<nav>{% for section in sections %}<a href="#s{{ loop.index }}">{{ section.title }}</a>{% endfor %}</nav>
{% for section in sections %}
<section id="s{{ loop.index }}"><h2>{{ section.title }}</h2>
{% if section.figures %}
<div class="figures">{% for figure in section.figures %}<figure>{{ figure }}</figure>{% endfor %}</div>
{% endif %}
{% for title, head, rows in section.tables %}
{% if title %}<h3>{{ title }}</h3>{% endif %}
<div class="table"><table>
{% if head %}<tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>{% endif %}
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
{% endfor %}
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
</section>
{% endfor %}
</body></html>
"""


def write_report(
    runs: Sequence[str | Path],
    *,
    defaults: Mapping[str, Any],
    baseline: str | Path | None = None,
    target: str | Path | None = None,
) -> Path:
    """Write the page about `runs` (folders, or `name=folder`) and return its path.

    defaults: the settings of a run without overrides, as its config.yaml has them. baseline: the run that gaps are
    measured against; by default the `logging.baseline` of a single run's configuration (if that run is still there),
    and of several runs the first. target: by default `report.html` in the folder of a single run.

    Raises FileNotFoundError or ValueError for what is no run with steps, and OSError if the page cannot be written.
    """
    opened, note = open_runs(runs), ""
    if target is None and len(opened) > 1:
        raise ValueError("a page about several runs belongs to none of their folders; say where to write it (--output)")
    base = None if baseline is None else open_run(baseline)
    if base is None and len(opened) == 1 and (configured := opened[0].setting("logging", "baseline")):
        try:
            base = open_run(configured)
        except (OSError, ValueError) as error:
            note = f"No baseline: {error}"
    target = Path(target) if target is not None else opened[0].path / REPORT_FILE
    replace_text(target, page(opened, defaults, base, note))
    return target


def page(runs: Sequence[RunFolder], defaults: Mapping[str, Any], baseline: RunFolder | None, note: str = "") -> str:
    """The HTML about `runs`. note: why there is no baseline."""
    base, others = (runs[0], runs[1:]) if baseline is None and len(runs) > 1 else (baseline, runs)
    unlike = [] if base is None else [run.name for run in others if not run.same_batches(base)]
    gap_note = "Of losses after the same steps; it says something if these had the same data."
    if base is not None and unlike:
        gap_note = f"No gap of {', '.join(unlike)}: steps of {base.name} have another number of tokens."
    head = ["", *(run.name for run in runs)]

    def each(rows: Callable[[RunFolder], list[Row]], *columns: str) -> list[Table]:
        return [(run.name if len(runs) > 1 else "", columns, rows(run)) for run in runs]

    sections = [
        _section("Summary", tables=[("", head if len(runs) > 1 else [], summary(runs))]),
        _section("Losses", _losses(runs, baseline)),
        _section("Gap", _gaps(base, others), note=note if base is None else gap_note),
        _section("Optimizer and speed", [_curve(runs, *curve) for curve in _CURVES]),
        _section("Phases", tables=each(phases, "phase", "length", "blend", "steps so far")),
        _section("Precision plan", tables=each(plan, "recipe", "linears", "why these", "operands")),
        _section("Diagnostics", [figure for run in runs for figure in _heatmaps(run)]),
        _section("Goodput", tables=[("", head, goodput(runs))]),
        _section("Events", tables=each(events, "step", "what", "")),
        _section("What the model writes", tables=each(texts, "after step", "prompt", "continuation")),
        _section("Configuration", tables=[("", ["key", "default", *head[1:]], differences(runs, defaults))]),
    ]
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE)
    return template.render(
        names=", ".join(run.name for run in runs),
        folders=", ".join(str(run.path) for run in runs),
        moment=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        commit=revision(),
        sections=[section for section in sections if section["figures"] or section["tables"] or section["note"]],
    )


def _section(
    title: str, figures: Sequence[Markup | None] = (), tables: Sequence[Table] = (), note: str = ""
) -> dict[str, Any]:
    shown = [table for table in tables if table[2]]
    return {"title": title, "figures": [figure for figure in figures if figure], "tables": shown, "note": note}


# Tables.


def summary(runs: Sequence[RunFolder]) -> list[Row]:
    """Rows of (what, text for each run)."""
    columns = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, UNKNOWN) for column in columns)] for name in names]


def _facts(run: RunFolder) -> Iterator[tuple[str, str]]:
    last, facts, found = run.steps[-1], run.facts, goodput_of(run.records)
    state = str(run.state.get("state", "finished" if run.summary.get("finished") else UNKNOWN))
    reason = run.state.get("reason")
    yield "state", f"{state}: {reason}" if reason else "running, or killed" if state == "running" else state
    yield "steps", f"{last['step']:,} of {facts.get('steps') or run.setting('train', 'steps') or UNKNOWN}"
    yield "tokens", short_number(last.get("tokens", math.nan))
    name, pattern, width = (run.setting("model", key) for key in ("name", "pattern", "hidden_dim"))
    count = facts.get("parameters")
    size = f", {short_number(count)} parameters" if isinstance(count, int) else ""
    yield "model", UNKNOWN if name is None else f"{name}{size}, {len(pattern or '')} blocks, width {width}"
    plans = list(dict.fromkeys(str(record.get("plan", UNKNOWN)) for record in run.steps))
    switches = [event["step"] for event in run.events if event["event"] == "switch"]
    yield "precision", ", then ".join(plans) + (f" from step {switches[-1]:,}" if switches else "")
    quantized, share = (run.plan or facts.get("plan") or {}).get("quantized_linears"), facts.get("quantized_flops")
    flops = f", {share:.1%} of the model's FLOPs" if isinstance(share, int | float) else ""
    yield "quantized", UNKNOWN if quantized is None else f"{quantized} linears{flops}"
    yield "optimizer", str(facts.get("optimizer", UNKNOWN))
    yield "seed", str(run.setting("run", "seed"))
    yield "commit", str(facts.get("commit", UNKNOWN))
    yield "ranks", str(facts.get("world_size", UNKNOWN))
    yield "goodput", UNKNOWN if found is None else str(found)
    for field, form in {
        "tokens_per_second": short_number,
        "model_tflops": short_number,
        "mfu": "{:.1%}".format,
        "step_time": "{:.3g} s".format,
    }.items():
        values = run.series(field)[1]
        if np.isfinite(values).any():
            yield f"{field.replace('_', ' ')}, median", form(float(np.nanmedian(values)))
    waits, times = np.nansum(run.series("data_wait")[1]), np.nansum(run.series("step_time")[1])
    yield "of the steps waiting for data", f"{waits / times:.2%}" if times > 0 else UNKNOWN
    spikes = sum(event["event"] == "spike" for event in run.events)
    yield "steps skipped", f"{sum(bool(record.get('skipped')) for record in run.steps):,} ({spikes:,} spikes)"
    losses = run.last_losses
    yield "training loss, last 2% of the steps", f"{losses.mean():.4f} nats per token" if losses.size else UNKNOWN
    bits = (run.of("validation") or [{}])[-1].get("bits_per_byte") or {}
    for source, points in run.validation.items():
        extra = f", {bits[source]:.4f} bits per byte" if bits.get(source) is not None else ""
        step = max(points)
        yield f"validation loss, {source}", f"{points[step]:.4f} nats per token{extra} (step {step:,})"


def phases(run: RunFolder) -> list[Row]:
    """Rows of the data phases as planned: name, length, blend; and their steps as far as the run has come."""
    been = {name: f"{first + 1:,} to {last:,}" for name, first, last in run.phases}
    rows: list[Row] = []
    for phase in run.setting("data", "phases") or []:
        name = str(phase.get("name", "main"))
        forms = {"fraction": "{:.4g} of the run", "steps": "{:,} steps", "tokens": "{:,.0f} tokens"}
        length = " ".join(form.format(phase[key]) for key, form in forms.items() if phase.get(key) is not None)
        blend = phase.get("blend") or "all"
        text = ", ".join(f"{source} {share}" for source, share in blend.items()) if isinstance(blend, dict) else blend
        rows.append([name, length or "the rest", str(text), been.get(name, "-")])
    return rows


def plan(run: RunFolder) -> list[Row]:
    """Rows of the recipes: name, how many linears, why these, what each GEMM multiplies."""
    written = run.plan or run.facts.get("plan") or {}
    linears = list((written.get("linears") or {}).values())
    rows: list[Row] = []
    for name, gemms in (written.get("recipes") or {}).items():
        why = [str(of.get("why", "")) for of in linears if of.get("recipe") == name]
        reasons = ", ".join(f"{reason} ({why.count(reason)})" for reason in dict.fromkeys(why))
        lines = "; ".join(map(str, gemms)) if isinstance(gemms, list) else str(gemms)
        rows.append([str(name), f"{len(why)} of {len(linears)}", reasons, lines])
    return rows


def goodput(runs: Sequence[RunFolder]) -> list[Row]:
    """Rows of (kind of time, its share and length in each run)."""
    found = [goodput_of(run.records) for run in runs]
    kinds = [kind for kind in ORDER if any(of is not None and kind in of.seconds for of in found)]
    return [[kind, *(_share(of, kind) for of in found)] for kind in kinds]


def _share(of: Goodput | None, kind: str) -> str:
    seconds = 0.0 if of is None else of.seconds.get(kind, 0.0)
    return f"{seconds / of.wall:.1%} ({short_time(seconds)})" if of is not None and seconds else "-"


def events(run: RunFolder) -> list[Row]:
    """What happened, as (step, what, details): starts, switches, skips, spikes and faults each, what is routine summed
    up, and of very many the last ones."""
    rows: list[Row] = [[f"{record['step']:,}", "start", ""] for record in run.of("run") if record["step"]]
    last: dict[str, tuple[int, Row]] = {}
    for record in run.events:
        name = str(record["event"])
        details = {key: value for key, value in record.items() if key not in ("kind", "step", "event")}
        row = [f"{record['step']:,}", name, "; ".join(f"{key}: {_short(value)}" for key, value in details.items())]
        if name in _ROUTINE and not (record.get("faults") or record.get("differs")):
            last[name] = last.get(name, (0, ()))[0] + 1, row
        elif name != "text":
            rows.append(row)
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    if len(rows) > _MOST_EVENTS:
        rows = [["...", f"{len(rows) - _MOST_EVENTS:,} earlier events", "in metrics.jsonl"], *rows[-_MOST_EVENTS:]]
    return [*rows, *([row[0], f"{count} x {row[1]}", f"the last: {row[2]}"] for count, row in last.values())]


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def texts(run: RunFolder) -> list[Row]:
    """Rows of what the model wrote last: step, prompt, continuation."""
    last = [record for record in run.events if record["event"] == "text"][-1:]
    return [
        [f"{record['step']:,}", str(one["prompt"]), str(one["text"] or "(not finite)")]
        for record in last
        for one in record.get("samples", [])
    ]


def differences(runs: Sequence[RunFolder], defaults: Mapping[str, Any]) -> list[Row]:
    """Rows of (key, value by default and in each run) of the settings that a run has otherwise than the default."""
    flat = [dict(leaves(settings)) for settings in (defaults, *(run.config for run in runs))]
    rows: list[Row] = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [str(settings.get(key, "-")) for settings in flat]
        if any(value not in ("-", values[0]) for value in values[1:]):  # an older run may not have the key
            rows.append([key, *values])
    return rows


# Figures.


def _figure(title: str, draw: Callable[[Figure, Axes], object], height: float = _SIZE[1]) -> Markup:
    """What `draw` makes, as an `svg` element as wide as its place; its text stays text."""
    file = io.StringIO()
    with drawing(figsize=(_SIZE[0], height)) as (figure, axes):
        draw(figure, axes)
        axes.set_title(axes.get_title() or title, fontsize=10, pad=16)
        legend_below(figure, axes)
        # Names of clip paths must differ between the figures of a page, and be the same each time.
        with rc_context({"svg.hashsalt": title}):
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    svg = text[text.index("<svg") + len("<svg") :]
    return Markup(f'<svg role="img" aria-label="{escape(title)}"{svg}')  # escaped by matplotlib and here


def _step_axis(runs: Sequence[RunFolder], axes: Axes) -> None:
    step_axis(axes, max(run.steps[-1]["step"] for run in runs))
    if len(runs) == 1:
        mark_run(axes, runs[0])


def _losses(runs: Sequence[RunFolder], baseline: RunFolder | None) -> list[Markup]:
    if len(runs) == 1:
        return [_figure("losses", lambda _, axes: draw_losses(axes, runs[0], baseline), 4.4)]
    every = [*runs, *([] if baseline is None else [baseline])]
    sources = dict.fromkeys(source for run in every for source in run.validation)

    def training(_: Figure, axes: Axes) -> None:
        draw_training(axes, every)
        _step_axis(every, axes)

    def held_out(source: str, _: Figure, axes: Axes) -> None:
        for index, run in enumerate(every):
            if points := run.validation.get(source):
                axes.plot(list(points), list(points.values()), label=run.name, **look(index).points())
        axes.set_ylabel("nats per token")
        _step_axis(every, axes)

    figures = [_figure(f"held-out loss of {source}", partial(held_out, source)) for source in sources]
    return [_figure("training loss, smoothed", training), *figures]


def _gaps(base: RunFolder | None, runs: Sequence[RunFolder]) -> list[Markup]:
    compared = [run for run in runs if base is not None and run.same_batches(base)]
    if base is None or not compared:
        return []

    def draw(_: Figure, axes: Axes) -> None:
        draw_gaps(axes, base, compared)
        _step_axis(compared, axes)

    return [_figure(f"loss above {base.name} in percent", draw)]


def _curve(runs: Sequence[RunFolder], title: str, field: str, kind: str) -> Markup | None:
    """A number of records; None if no run has it."""
    every = []
    for index, run in enumerate(runs):
        steps, values = run.series(field, kind)
        if (there := np.isfinite(values)).any():  # some numbers come only now and then
            every.append((run.name if len(runs) > 1 else None, look(index), steps[there], values[there]))
    if not every:
        return None

    def draw(_: Figure, axes: Axes) -> None:
        for name, style, steps, values in every:
            axes.plot(*thinned(steps, values), color=style.color, alpha=0.25, linewidth=0.7)
            axes.plot(*thinned(steps, smooth(values)), label=name, **style.line(linewidth=1.5))
        top = max(np.percentile(values, 99.5) for *_, values in every)
        axes.set_ylim(0, max(top * 1.25, 1e-9))  # one slow first step must not flatten all others
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        _step_axis(runs, axes)

    return _figure(title, draw)


def _heatmaps(run: RunFolder) -> list[Markup]:
    if not run.of("diagnostics"):
        return []
    draw, height = partial(draw_heatmap, run=run), heatmap_height(run)
    return [_figure(f"{run.name}: {of.title}", partial(draw, quantity=of), height) for of in QUANTITIES]
