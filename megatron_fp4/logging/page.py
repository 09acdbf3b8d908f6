"""`report.html`: one page about one run, or about several side by side, that needs nothing besides itself.

Figures stand in it as SVG (heatmaps as PNG), there is no script, and its own policy forbids the reader's browser to
fetch anything. It is as wide as a phone or a sheet of paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_fp4 import __version__
from megatron_fp4.logging import charts, page_facts
from megatron_fp4.logging.comparison import check_names
from megatron_fp4.logging.completion import REPORT_FILE
from megatron_fp4.logging.goodput import Goodput, goodput_of
from megatron_fp4.logging.run_files import replace_text
from megatron_fp4.logging.run_folder import RunFolder, open_run

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; max-width: 1120px;
  padding: 12px 16px 40px; }
h1 { font-size: 1.5em; margin: .4em 0 .1em; overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 1.8em 0 .4em;
  border-bottom: 1px solid #ccc; } h3 { font-size: 1em; margin: .9em 0 .2em; }
figure h3 { margin-top: 0; }
nav { font-size: .9em; } nav a { margin-right: .9em; white-space: nowrap; } a { color: #0072B2; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 18px; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
svg, img { width: 100%; height: auto; display: block; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .93em; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid #eee; }
td { font-variant-numeric: tabular-nums; } th { font-weight: 600; } tbody th { font-weight: 400; color: #555; }
.note { color: #666; font-size: .9em; margin: .3em 0; } pre { white-space: pre-wrap; background: #f5f5f5;
  padding: 8px; margin: .3em 0; font-size: .88em; overflow-wrap: anywhere; }
td { overflow-wrap: break-word; max-width: 34em; } @media (max-width: 600px) { td, th { padding-right: 9px; } }
@media print { body { max-width: none; font-size: 10pt; padding: 0; } nav { display: none; }
  .figures { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; } tr { break-inside: avoid; }
  .table { overflow: visible; } }
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
    opened = [open_run(run) for run in runs]
    base, note = None, ""
    if baseline is not None:
        base = open_run(baseline)
    elif len(opened) == 1 and (configured := opened[0].setting("logging", "baseline")):
        try:
            base = open_run(configured)
        except (OSError, ValueError) as error:
            note = f"No baseline: {error}"
    check_names([run.name for run in (*opened, *([base] if base is not None else []))])
    if target is None:
        if len(opened) > 1:
            raise ValueError(
                "a page about several runs belongs to none of their folders; say where to write it (--output)"
            )
        target = opened[0].path / REPORT_FILE
    replace_text(Path(target), page(opened, defaults, base, note))
    return Path(target)


def page(runs: Sequence[RunFolder], defaults: Mapping[str, Any], baseline: RunFolder | None, note: str = "") -> str:
    """The HTML about `runs`."""
    found = [goodput_of(run.path) for run in runs]
    names = ", ".join(run.name for run in runs)
    sections = {
        "Summary": _summary(runs, found),
        "Losses": _losses(runs, baseline),
        "Gap": _gap(runs, baseline, note),
        "Learning rate and gradients": _figures(
            charts.series(runs, "lr", "learning rate", smoothed=False),
            charts.series(runs, "grad_norm", "gradient norm before clipping"),
            charts.gradient_noise(runs),
        ),
        "Throughput, memory, data": _speed(runs),
        "Phases": _each(runs, _phases),
        "Precision plan": _each(runs, _plan),
        "Diagnostics": _each(runs, lambda run: _figures(*charts.diagnostics(run))),
        "Goodput": _goodput(runs, found),
        "Events": _each(runs, _events),
        "What the model says": _each(runs, _texts),
        "Configuration": _configuration(runs, defaults),
    }
    shown = {title: html for title, html in sections.items() if html}
    ids = {title: f"s{index}" for index, title in enumerate(shown)}
    contents = " ".join(f'<a href="#{ids[title]}">{escape(title)}</a>' for title in shown)
    body = "".join(f'<section id="{ids[t]}"><h2>{escape(t)}</h2>{html}</section>' for t, html in shown.items())
    moment = time.strftime("%Y-%m-%d %H:%M %Z").strip()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(names)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_CSS}</style></head>'
        f'<body><h1>{escape(names)}</h1><p class="note">{escape(", ".join(str(run.path) for run in runs))}; written '
        f"{escape(moment)} by megatron_fp4 {escape(__version__)}</p><nav>{contents}</nav>{body}</body></html>\n"
    )


def _summary(runs: Sequence[RunFolder], found: Sequence[Goodput | None]) -> str:
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    note = _note("In brackets: above the first run.") if len(runs) > 1 else ""
    return _table(head, [[what, *texts] for what, texts in page_facts.summary(runs, found)], heads=True) + note


def _losses(runs: Sequence[RunFolder], baseline: RunFolder | None) -> str:
    names = page_facts.sources_of(runs)
    sources = [(f"Held-out: {name}", charts.source_losses(runs, name, baseline)) for name in names]
    return _figures(("Training", charts.losses(runs, baseline)), *sources)


def _gap(runs: Sequence[RunFolder], baseline: RunFolder | None, note: str) -> str:
    """Of the runs that had as many tokens after the same steps as the baseline, which is the first run if there is no
    other; others are named."""
    shift = 0
    if baseline is None and len(runs) > 1:
        baseline, runs, shift = runs[0], runs[1:], 1
    if baseline is None:
        return _note(note) if note else ""
    other = [run.name for run in runs if not run.same_batches(baseline)]
    text = "Of losses after the same steps; it says something if these had the same data."
    if other:
        text = f"No gap of {', '.join(other)}: steps of {baseline.name} have another number of tokens."
    return _figures(charts.gaps(runs, baseline, shift)) + _note(text)


def _speed(runs: Sequence[RunFolder]) -> str:
    drawn = [
        charts.series(runs, "tokens_per_second", "tokens per second, all devices"),
        charts.series(runs, "model_tflops", "model TFLOP/s per device"),
        charts.series(runs, "mfu", "model FLOPs utilization (%)", scale=100.0),
        charts.series(runs, "step_time", "seconds for a step, data included"),
        charts.series(runs, "data_wait", "seconds waiting for data in a step"),
        charts.series(runs, "peak_memory_gib", "peak memory of the first device (GiB)"),
    ]
    return _figures(*drawn) + ("" if drawn[-1] else _note("Memory: unknown, it was not recorded."))


def _phases(run: RunFolder) -> str:
    rows = page_facts.phases(run)
    return _table(["phase", "length", "blend", "steps so far"], rows) if rows else ""


def _plan(run: RunFolder) -> str:
    rows = page_facts.plan(run)
    switched = " Before the switch of precision." if any(one["event"] == "switch" for one in run.events) else ""
    note = _note(f"x: activation, W: weight, dy: gradient; SR: stochastic rounding.{switched}")
    return _table(["recipe", "linears", "why these", "operands of the GEMMs"], rows) + note if rows else ""


def _goodput(runs: Sequence[RunFolder], found: Sequence[Goodput | None]) -> str:
    known = [(run.name, one) for run, one in zip(runs, found, strict=True) if one is not None]
    if not known:
        return _note("Unknown: no ledger of wall time (goodput.jsonl), as versions before this one wrote none.")
    html = _figures(charts.goodput(known)) + _note(
        "Steps: time in steps that count; first step: of each start, with compiling. Lost work: steps, data and "
        "validation that a later start did again. Saves: what training waited for; the rest happens beside it."
    )
    for name, one in known:
        html += f"<h3>{escape(name)}: {escape(str(one))}</h3>"
        html += _table(["began", "where", "steps", "ended", "wall time", "in steps"], page_facts.starts(one))
    return html


def _events(run: RunFolder) -> str:
    rows = page_facts.events(run)
    return _table(["step", "what", ""], rows) if rows else _note("None.")


def _texts(run: RunFolder) -> str:
    found = page_facts.last_texts(run)
    if found is None:
        return ""
    step, samples = found
    texts = "".join(f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>" for prompt, text in samples)
    return _note(f"After step {step:,}; prompts in bold.") + texts


def _configuration(runs: Sequence[RunFolder], defaults: Mapping[str, Any]) -> str:
    if not any(run.config for run in runs):
        return _note("Unknown: no config.yaml.")
    rows = [[key, *values] for key, values in page_facts.differences(runs, defaults)]
    if not rows:
        return _note("As by default.")
    return _note("What is set otherwise than by default.") + _table(
        ["key", "default", *(run.name for run in runs)], rows, heads=True
    )


def _each(runs: Sequence[RunFolder], make: Callable[[RunFolder], str]) -> str:
    """Of every run what `make` makes, under its name if there are several; what is the same of several stands once."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(make(run), []).append(run.name)
    names.pop("", None)
    return "".join(f"<h3>{escape(', '.join(of))}</h3>{html}" if len(runs) > 1 else html for html, of in names.items())


def _figures(*drawn: str | tuple[str, str] | None) -> str:
    """Side by side as far as there is room; each an image, or a title and an image."""
    html = ""
    for one in drawn:
        if one is not None:
            title, image = one if isinstance(one, tuple) else ("", one)
            head = f"<h3>{escape(title)}</h3>" if title else ""
            html += f"<figure>{head}{image}</figure>"
    return f'<div class="figures">{html}</div>' if html else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, heads: bool = False) -> str:
    """heads: the first cell of each row is its name."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = ""
    for row in rows:
        first = f"<th>{escape(row[0])}</th>" if heads else f"<td>{escape(row[0])}</td>"
        body += f"<tr>{first}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
    return f'<div class="table"><table>{top}<tbody>{body}</tbody></table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
