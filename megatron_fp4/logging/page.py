"""`report.html`: a page about one run, or about several side by side, which needs no other files.

Figures are inline SVG. One script shows the values under the mouse; the page's policy allows no other script and
forbids the browser to fetch anything. The template escapes all text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
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
from megatron_fp4.checkpoint.files import list_checkpoints, step_of, well_formed
from megatron_fp4.config.removed_keys import leaves
from megatron_fp4.logging import pictures
from megatron_fp4.logging.console import short_number
from megatron_fp4.logging.files import REPORT_FILE, replace_text
from megatron_fp4.logging.run_folder import RunFolder, open_run, open_runs, read_mapping
from megatron_fp4.logging.run_log import goodput_of
from megatron_fp4.runtime.revision import revision

# Events of which the page only has the number and the last one, unless they report a fault; the most other events.
_ROUTINE, _MOST_EVENTS = ("checkpoint", "export", "replay", "recheck"), 200
# Curves: title, field, and the kind of records that have the field. All but the first are smoothed.
_CURVES = (
    ("learning rate", "lr", "step"),
    ("gradient norm before clipping", "grad_norm", "step"),
    ("tokens per second, all devices", "tokens_per_second", "step"),
    ("model FLOPs utilization", "mfu", "step"),
    ("seconds for a step, data included", "step_time", "step"),
    ("seconds waiting for data in a step", "data_wait", "step"),
    ("peak memory of the first device (GiB)", "peak_memory_gib", "step"),
    ("joules per token, all GPUs", "joules_per_token", "step"),
    ("gradient over its quantization noise", "ratio", "gradient_noise"),
)
Row = Sequence[str]

_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ names }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
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
#values { position: fixed; white-space: pre; pointer-events: none; background: #fff; border: 1px solid #999; }
@media print { nav { display: none; } .figures { grid-template-columns: 1fr 1fr; } }
</style></head><body>
<h1>{{ names }}</h1>
<p class="note">{{ folders }}; written {{ moment }} by megatron_fp4 {{ version }} ({{ commit }})</p>
<nav>{% for title, _, _, _ in sections %}<a href="#s{{ loop.index }}">{{ title }}</a>{% endfor %}</nav>
{% for title, figures, tables, note in sections %}
<section id="s{{ loop.index }}"><h2>{{ title }}</h2>
{% if figures %}
<div class="figures">{% for figure in figures %}{{ figure }}{% endfor %}</div>
{% endif %}
{% for title, head, rows in tables %}
{% if title %}<h3>{{ title }}</h3>{% endif %}
<div class="table"><table>
{% if head %}<tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>{% endif %}
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
{% endfor %}
{% if note %}<p class="note">{{ note }}</p>{% endif %}
</section>
{% endfor %}
<div id="values" hidden></div><script>{{ script }}</script>
</body></html>
"""
# Shows the value of each curve at the step under the mouse. box: where the axes begin and end, as shares of the width.
_SCRIPT = """
const values = document.getElementById("values");
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const {box, limits, curves} = JSON.parse(figure.dataset.hover), svg = figure.querySelector("svg");
  svg.onmousemove = event => {
    const frame = svg.getBoundingClientRect();
    const share = ((event.clientX - frame.left) / frame.width - box[0]) / (box[1] - box[0]);
    const step = limits[0] + share * (limits[1] - limits[0]);
    values.hidden = share < 0 || share > 1;
    values.textContent = curves.map(([name, steps, of]) => {
      const nearest = steps.reduce((best, at, i) => Math.abs(at - step) < Math.abs(steps[best] - step) ? i : best, 0);
      return `${name}: ${of[nearest]} (step ${steps[nearest]})`;
    }).join("\\n");
    values.style.left = Math.min(event.clientX + 14, innerWidth - values.offsetWidth - 8) + "px";
    values.style.top = event.clientY + 14 + "px";
  };
  svg.onmouseleave = () => { values.hidden = true; };
}
"""
# The most points of a curve that the script knows.
_MOST_POINTS = 400
# The losses of a run's last half have a figure of their own if that begins at this step or later.
_MANY_STEPS = 10


def write_report(
    runs: Sequence[str | Path],
    *,
    defaults: Mapping[str, Any],
    baseline: str | Path | None = None,
    target: str | Path | None = None,
) -> Path:
    """Write the page about `runs` (folders, or `name=folder`) and return its path.

    defaults: the settings of a run without overrides, as in its config.yaml. baseline: the run that gaps are relative
    to; by default, for several runs the first. target: by default `report.html` in the folder of a single run.

    Raises FileNotFoundError or ValueError for a folder without a run with steps, and OSError if it cannot write.
    """
    opened = open_runs(runs)
    if target is None and len(opened) > 1:
        raise ValueError("a page about several runs has no default folder; give its path (--output)")
    base = None if baseline is None else open_run(baseline)
    path = opened[0].path / REPORT_FILE if target is None else Path(target)
    with well_formed(" and ".join(str(run.path) for run in opened)):
        page = _page(opened, defaults, base)
    replace_text(path, page)
    return path


def _page(runs: Sequence[RunFolder], defaults: Mapping[str, Any], baseline: RunFolder | None) -> str:
    several, note = len(runs) > 1, ""
    base, others = (runs[0], runs[1:]) if baseline is None and several else (baseline, runs)
    if base is not None:
        note = "The gap of losses after the same steps. It is meaningful if the runs had the same data."
        if unlike := [run.name for run in others if not run.same_batches(base)]:
            note = f"No gap of {', '.join(unlike)}: steps of {base.name} have another number of tokens."
    head = ["", *(run.name for run in runs)]

    def each(rows: Callable[[RunFolder], list[Row]], *columns: str) -> list[tuple[str, Row, list[Row]]]:
        return [(run.name if several else "", columns, table) for run in runs if (table := rows(run))]

    # A run has one look on the whole page.
    shown = [*runs, *([] if baseline is None else [baseline])]
    looks = {run.path: pictures.look(index) for index, run in enumerate(shown)}
    curves = [figure for curve in _CURVES for figure in _curve(runs, looks, *curve)]
    changed = _changed_settings(runs, defaults)
    sections: list[tuple[str, list[Markup], list[tuple[str, Row, list[Row]]], str]] = [
        ("Summary", [], [("", head if several else [], _summary(runs))], ""),
        ("Losses", _losses(runs, baseline, looks), [], ""),
        ("Gap", _gaps(base, others, looks), [], note),
        ("Optimizer and speed", curves, [], ""),
        ("Phases", [], each(_phases, "phase", "length", "blend", "steps so far"), ""),
        ("Sources", [], each(_sources, "source", "tokens so far", "epochs so far", "held-out loss (nats)"), ""),
        ("Precision plan", [], each(_plan, "recipe", "linears", "why these", "operands"), ""),
        ("Diagnostics", [figure for run in runs for figure in _heatmaps(run)], [], ""),
        ("Events", [], each(_events, "step", "what", ""), ""),
        ("Checkpoints", [], each(_checkpoints, "step", "size", "written"), ""),
        ("Scores", [], each(_scores, "file", "task", "metric", "scores"), ""),
        ("What the model writes", [], each(_texts, "after step", "prompt", "continuation"), ""),
        ("Configuration", [], [("", ["key", "default", *head[1:]], changed)] if changed else [], ""),
    ]
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE)
    return template.render(
        names=", ".join(run.name for run in runs),
        folders=", ".join(str(run.path) for run in runs),
        moment=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        commit=revision(),
        script=Markup(_SCRIPT),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        sections=[section for section in sections if any(section[1:])],
    )


# Tables: rows of texts.


def _summary(runs: Sequence[RunFolder]) -> list[Row]:
    columns = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "unknown") for column in columns)] for name in names]


def _facts(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Names and texts of a run's summary, without those that an older run does not have."""
    last, facts = run.steps[-1], run.facts
    state, reason = run.state.get("state", "unknown"), run.state.get("reason")
    yield "state", f"{state}: {reason}" if reason else "running, or killed" if state == "running" else state
    yield "steps", f"{last['step']:,} of {facts.get('steps') or run.setting('train', 'steps') or 'unknown'}"
    yield "tokens", short_number(last.get("tokens", math.nan))
    name, pattern, width = (run.setting("model", key) for key in ("name", "pattern", "hidden_dim"))
    if name is not None:
        count = facts.get("parameters")
        size = f", {short_number(count)} parameters" if isinstance(count, int) else ""
        yield "model", f"{name}{size}, {len(pattern or '')} blocks, width {width}"
    switches = run.happened("switch")
    yield "precision", run.plans + (f" from step {switches[-1]['step']:,}" if switches else "")
    if (quantized := facts.get("plan", {}).get("quantized_linears")) is not None:
        share = facts.get("quantized_flops")
        flops = f", {share:.1%} of the model's FLOPs" if isinstance(share, int | float) else ""
        yield "quantized", f"{quantized} linears{flops}"
    yield "seed", str(run.setting("run", "seed"))
    for fact, key in {"optimizer": "optimizer", "commit": "commit", "ranks": "world_size"}.items():
        yield fact, str(facts.get(key, "unknown"))
    for name, value in {"host": facts.get("host"), **(facts.get("made_by") or {})}.items():
        if value not in (None, "(absent)") and name != "commit":
            yield name, str(value)
    yield "goodput", goodput_of(run.records) or "unknown"
    for field, form in {
        "tokens_per_second": short_number,
        "model_tflops": short_number,
        "mfu": "{:.1%}".format,
        "step_time": "{:.3g} s".format,
        "joules_per_token": "{:.3g} J".format,
    }.items():
        values = run.series(field)[1]
        if np.isfinite(values).any():
            yield f"{field.replace('_', ' ')}, median", form(float(np.nanmedian(values)))
    waits, times = np.nansum(run.series("data_wait")[1]), np.nansum(run.series("step_time")[1])
    if times > 0:
        yield "of the steps waiting for data", f"{waits / times:.2%}"
    skipped = sum(bool(record.get("skipped")) for record in run.steps)
    yield "steps skipped", f"{skipped:,} ({len(run.happened('spike')):,} spikes)"
    if (losses := run.last_losses).size:
        yield "training loss, last 2% of the steps", f"{losses.mean():.4f} nats per token"
    bits = (run.of("validation") or [{}])[-1].get("bits_per_byte") or {}
    for source, points in run.validation.items():
        extra = f", {bits[source]:.4f} bits per byte" if bits.get(source) is not None else ""
        step = max(points)
        yield f"validation loss, {source}", f"{points[step]:.4f} nats per token{extra} (step {step:,})"


def _phases(run: RunFolder) -> list[Row]:
    been = {name: f"{first + 1:,} to {last:,}" for name, first, last in run.phases}
    forms = {"fraction": "{:.4g} of the run", "steps": "{:,} steps", "tokens": "{:,.0f} tokens"}
    rows: list[Row] = []
    for phase in run.setting("data", "phases") or []:
        name, blend = str(phase.get("name", "main")), phase.get("blend") or "all"
        length = [form.format(phase[key]) for key, form in forms.items() if phase.get(key) is not None]
        text = ", ".join(f"{source} {share}" for source, share in blend.items()) if isinstance(blend, dict) else blend
        rows.append([name, *(length or ["the rest"]), str(text), been.get(name, "-")])
    return rows


def _sources(run: RunFolder) -> list[Row]:
    """Rows of the data's sources: name, tokens and epochs so far, and the last held-out loss of the same name."""
    sizes = run.facts.get("source_tokens") or {}
    epochs: Mapping[str, float] = next((step["epochs"] for step in reversed(run.steps) if step.get("epochs")), {})
    rows: list[Row] = []
    for name in dict.fromkeys([*epochs, *run.validation]):
        done, points = epochs.get(name), run.validation.get(name)
        tokens = "-" if done is None or name not in sizes else short_number(done * sizes[name])
        loss = f"{points[max(points)]:.4f} (step {max(points):,})" if points else "-"
        rows.append([name, tokens, "-" if done is None else f"{done:.3g}", loss])
    return rows


def _checkpoints(run: RunFolder) -> list[Row]:
    rows: list[Row] = []
    for folder in list_checkpoints(run.path / "checkpoints"):
        size = sum(path.stat(follow_symlinks=False).st_size for path in folder.iterdir())
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        rows.append([f"{step_of(folder):,}", f"{size / 2**30:.3g} GiB", written])
    return rows


def _scores(run: RunFolder) -> list[Row]:
    """Rows of the files of `evaluate.py --json` in the run's folder: file, task, metric, the score of each model."""
    rows: list[Row] = []
    for path in sorted(run.path.glob("scores*.json")):
        for result in read_mapping(path).get("results") or []:
            scores = ", ".join(
                f"{name} {score['value']:.4f}" + (f" ± {score['stderr']:.4f}" if score.get("stderr") else "")
                for name, score in result["scores"].items()
            )
            rows.append([path.name, result["task"], result["metric"], scores])
    return rows


def _plan(run: RunFolder) -> list[Row]:
    plan = run.facts.get("plan", {})
    linears = list(plan.get("linears", {}).values())
    rows: list[Row] = []
    for name, gemms in plan.get("recipes", {}).items():
        why = [str(of.get("why", "")) for of in linears if of.get("recipe") == name]
        reasons = ", ".join(f"{reason} ({why.count(reason)})" for reason in dict.fromkeys(why))
        rows.append([str(name), f"{len(why)} of {len(linears)}", reasons, "; ".join(map(str, gemms))])
    return rows


def _events(run: RunFolder) -> list[Row]:
    """Rows of the events: step, name, details. Routine events share a row; of very many others, only the last ones."""
    rows = [(record["step"], "start", "") for record in run.of("run") if record["step"]]
    routine: dict[str, list[tuple[int, str]]] = {}
    for record in run.events:
        name, step = str(record["event"]), record["step"]
        details = {key: value for key, value in record.items() if key not in ("kind", "step", "event")}
        text = "; ".join(
            f"{key}: {f'{value:.4g}' if isinstance(value, float) else str(value)[:160]}"
            for key, value in details.items()
        )
        if name in _ROUTINE and not (record.get("faults") or record.get("differs")):
            routine.setdefault(name, []).append((step, text))
        elif name != "text":
            rows.append((step, name, text))
    rows.sort(key=lambda row: row[0])
    shown = rows[-_MOST_EVENTS:] + [
        (events[-1][0], f"{len(events)} x {name}", f"the last: {events[-1][1]}") for name, events in routine.items()
    ]
    left_out = [["...", f"{len(rows) - _MOST_EVENTS:,} earlier events", "in metrics.jsonl"]]
    return [*(left_out if len(rows) > _MOST_EVENTS else []), *([f"{step:,}", name, text] for step, name, text in shown)]


def _texts(run: RunFolder) -> list[Row]:
    return [
        [f"{record['step']:,}", str(sample["prompt"]), str(sample["text"] or "(not finite)")]
        for record in run.happened("text")[-1:]
        for sample in record.get("samples", [])
    ]


def _changed_settings(runs: Sequence[RunFolder], defaults: Mapping[str, Any]) -> list[Row]:
    """Rows of changed settings: key, default, and the value of each run. An older run may not have the key."""
    usual, *settings = [{key: str(value) for key, value in leaves(of)} for of in (defaults, *(r.config for r in runs))]
    keys = dict.fromkeys(key for of in (usual, *settings) for key in of)
    rows = [[key, *(of.get(key, "-") for of in (usual, *settings))] for key in keys]
    return [row for row in rows if not {*row[2:]} <= {"-", row[1]}]


# Figures.


def _figure(title: str, draw: Callable[[Figure, Axes], object], height: float = 3.3) -> Markup:
    """The figure that `draw` draws, as an `svg` element as wide as its container; its text stays text."""
    file = io.StringIO()
    with pictures.drawing(figsize=(5.4, height)) as (figure, axes):
        draw(figure, axes)
        axes.set_title(title, fontsize=10, pad=16)
        pictures.legend_below(figure, axes)
        # Names of clip paths must differ between the figures of a page, but not between two writes of it.
        with rc_context({"svg.hashsalt": title}):
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        hover = _hover(figure, axes)
    svg = file.getvalue().partition("<svg")[2]
    name = escape(title)  # matplotlib has escaped the rest
    return Markup(f'<figure data-hover="{escape(hover)}"><svg role="img" aria-label="{name}"{svg}</figure>')


def _hover(figure: Figure, axes: Axes) -> str:
    """What `_SCRIPT` needs to show the values of the curves that the legend names, as JSON."""
    curves = []
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        steps, values = (np.asarray(data, float) for data in (handle.get_xdata(), handle.get_ydata()))
        there = np.flatnonzero(np.isfinite(steps) & np.isfinite(values))
        if len(there) and np.ptp(steps):  # marks at one step have their text
            there = there[np.unique(np.linspace(0, len(there) - 1, _MOST_POINTS).round().astype(int))]
            curves.append([label, [round(step) for step in steps[there]], [float(f"{v:.5g}") for v in values[there]]])
    box, width = axes.get_window_extent(), figure.bbox.width
    return json.dumps({"box": [box.x0 / width, box.x1 / width], "limits": axes.get_xlim(), "curves": curves})


def _step_axis(runs: Sequence[RunFolder], axes: Axes) -> None:
    pictures.step_axis(axes, max(run.steps[-1]["step"] for run in runs))
    if len(runs) == 1:
        pictures.mark_run(axes, runs[0])


Looks = Mapping[Path, pictures.Look]


def _losses(runs: Sequence[RunFolder], baseline: RunFolder | None, looks: Looks) -> list[Markup]:
    every = [*runs, *([] if baseline is None else [baseline])]
    half = every[0].steps[len(every[0].steps) // 2]["step"]  # where the first half ends
    alone = len(runs) == 1
    height, title = (4.4, "losses") if alone else (3.3, "training loss, smoothed")

    def whole(_: Figure, axes: Axes) -> None:
        if alone:
            pictures.draw_losses(axes, runs[0], baseline)
        else:
            pictures.draw_training(axes, every, [looks[run.path] for run in every])
            _step_axis(every, axes)

    def last_half(figure: Figure, axes: Axes) -> None:
        whole(figure, axes)
        pictures.show_from(axes, half)

    def held_out(source: str, _: Figure, axes: Axes) -> None:
        for run in every:
            if points := run.validation.get(source):
                axes.plot(list(points), list(points.values()), label=run.name, **looks[run.path].points())
        axes.set_ylabel("nats per token")
        _step_axis(every, axes)

    figures = [_figure(title, whole, height)]
    if half >= _MANY_STEPS:
        figures.append(_figure(f"{title}: the last half", last_half, height))
    sources = () if alone else dict.fromkeys(source for run in every for source in run.validation)
    return [*figures, *(_figure(f"held-out loss of {source}", partial(held_out, source)) for source in sources)]


def _gaps(base: RunFolder | None, runs: Sequence[RunFolder], looks: Looks) -> list[Markup]:
    compared = [run for run in runs if base is not None and run.same_batches(base)]
    if base is None or not compared:
        return []

    def draw(_: Figure, axes: Axes) -> None:
        pictures.draw_gaps(axes, base, compared, [looks[run.path] for run in compared])
        _step_axis(compared, axes)

    return [_figure(f"loss above {base.name} in percent", draw)]


def _curve(runs: Sequence[RunFolder], looks: Looks, title: str, field: str, kind: str) -> list[Markup]:
    every, smoothed = [], field != "lr"
    for run in runs:
        steps, values = run.series(field, kind)
        if (there := np.isfinite(values)).any():  # not every record has every field
            name = run.name if len(runs) > 1 else "smoothed" if smoothed else title
            every.append((name, looks[run.path], steps[there], values[there]))

    def draw(_: Figure, axes: Axes) -> None:
        for name, style, steps, values in every:
            if smoothed:
                axes.plot(steps, values, color=style.color, alpha=0.25, linewidth=0.7)
            axes.plot(steps, pictures.smooth(values) if smoothed else values, label=name, **style.line())
        top = max(np.percentile(values, 99.5) for *_, values in every)
        axes.set_ylim(0, max(top * 1.25, 1e-9))  # one slow first step must not flatten all others
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        _step_axis(runs, axes)

    return [_figure(title, draw)] if every else []


def _heatmaps(run: RunFolder) -> list[Markup]:
    quantities = pictures.QUANTITIES if run.of("diagnostics") else ()
    return [
        _figure(f"{run.name}: {of.title}", partial(pictures.draw_heatmap, run=run, quantity=of)) for of in quantities
    ]
