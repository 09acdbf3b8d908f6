"""The report page and the pictures of runs: what they show, and that a page loads no other file."""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from megatron_fp4.config.errors import printable
from megatron_fp4.logging.page import write_report
from megatron_fp4.logging.pictures import QUANTITIES, measured, plot_loss, validation_gaps
from megatron_fp4.logging.run_folder import named_run, open_run
from scripts import report

DEFAULTS = {"train": {"steps": 300, "lr": 0.1}, "new": {"a": 1}}
MARKUP = '"><script>alert(1)</script>$\\frac$'


def write_run(folder: Path, gap: float = 0.0, source: str = "prose", records: Any = ()) -> Path:
    folder.mkdir(parents=True)
    facts = {"steps": 40, "unigram_entropy": {"code": 6.0}, "parameters": 4_766_000, "quantized_flops": 0.42}
    linears = {"a": {"recipe": "nvfp4", "why": "the run's recipe"}, "b": {"recipe": "bf16", "why": "last"}}
    recipes = {"nvfp4": ["fprop x|W: nvfp4 1x16 | nvfp4 16x16"], "bf16": ["fprop x|W: bf16 | bf16"]}
    plan = {"quantized_linears": "8 of 12", "linears": linears, "recipes": recipes}
    lines: list[dict[str, Any]] = [{"kind": "run", "step": 0, **facts, "decay_start": 30, "plan": plan}]
    for step in range(1, 41):
        lines.append(
            {"kind": "step", "step": step, "tokens": 100 * step, "loss": None if step == 7 else 5 - step / 20 + gap,
             "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e3, "model_tflops": 0.5, "step_time": 0.5,
             "data_wait": 0.05, "skipped": step == 7, "phase": "broad" if step < 20 else "<b>", "plan": "nvfp4",
             "peak_memory_gib": 12.5 if step % 10 == 0 else None, "joules_per_token": 0.25,
             "epochs": {"code": step / 20}}
        )  # fmt: skip
        if step % 10 == 0:
            lines.append({"kind": "validation", "step": step, "losses": {"code": 5 - step / 20 + gap, source: 6.0}})
            lines.append({"kind": "event", "step": step, "event": "checkpoint", "path": "x"})
    lines += [
        {"kind": "event", "step": 7, "event": "skip", "in_row": 1},
        {"kind": "event", "step": 31, "event": "switch", "target": "bf16", "scope": "both"},
        {"kind": "event", "step": 40, "event": "text", "samples": [{"prompt": "def", "text": " <f>()", "ended": True}]},
        {"kind": "time", "step": 40, "seconds": {"steps": 75.0, "start-up": 25.0}},
        *records,
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        "train: {steps: 40, lr: 0.1}\n"
        "data: {phases: [{name: broad, fraction: 0.5, blend: {code: 1}}, {name: <b>, fraction: 0.5}]}\n"
        "run: {seed: 7}\nmodel: {name: tiny, pattern: M*-, hidden_dim: 64}\n"
    )
    (folder / "state.json").write_text(json.dumps({"state": "finished", "step": 40}))
    return folder


def diagnostics(step: int) -> dict[str, Any]:
    linear = {"operands": {"wgrad_gradient": {"snr_db": 17.0}}, "gemms": {"wgrad": 0.1}}
    return {"kind": "diagnostics", "step": step, "linears": {"blocks.0.up": linear, "blocks.0.down": {"operands": {}}}}


class Page(HTMLParser):
    """The tags, attributes and text of a page. Fails if tags are not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.source = "", path.read_text()
        self.feed(self.source)
        assert not self.open
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while (last := self.open.pop()) != tag:
            assert last in ("meta", "img", "br")

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_a_page_describes_the_run(tmp_path: Path) -> None:
    restart = {"kind": "run", "step": 20, "source_tokens": {"code": 2000}, "made_by": {"torch": "2.13.0"}}
    run = write_run(tmp_path / "run", records=[restart])
    (checkpoint := run / "checkpoints" / "step_00000020").mkdir(parents=True)
    with (checkpoint / "manifest.json").open("wb") as file:
        file.truncate(2**30)
    score = {"task": "arc_easy", "metric": "acc", "scores": {"mine": {"value": 0.5, "stderr": 0.01}}}
    (run / "scores_hard.json").write_text(json.dumps({"results": [score]}))
    page = Page(write_report([run], defaults=DEFAULTS))
    for words in (
        "state finished", "steps 40 of 40", "tiny, 4.77M parameters, 3 blocks, width 64", "seed 7", "75.0% of 1m40s",
        "8 of 12 linears, 42.0% of the model's FLOPs", "waiting for data 10.00%", "steps skipped 1",
        "validation loss, code 3.0000 nats per token (step 40)", "broad 0.5 of the run code 1 1 to 19",
        "31 switch target: bf16; scope: both", "7 skip in_row: 1", "4 x checkpoint the last: path: x", "def <f>()",
        "losses: the last half", "restarts (1)", "code 4k 2 3.0000 (step 40)", "20 1 GiB", "torch 2.13.0",
        "scores_hard.json arc_easy acc mine 0.5000 ± 0.0100",
        "nvfp4 1 of 2 the run's recipe (1) fprop x|W: nvfp4 1x16 | nvfp4 16x16", "train.steps 300 40", "start-up 25.0%",
    ):  # fmt: skip
        assert words in page.text, words
    # The first is a default; the run's version did not have the second.
    assert "train.lr" not in page.text and "new.a" not in page.text
    (losses,) = [
        json.loads(of["data-hover"] or "")
        for (tag, of), (_, svg) in itertools.pairwise(page.tags)
        if tag == "figure" and svg["aria-label"] == "losses"
    ]
    curves = {name: dict(zip(steps, values, strict=True)) for name, steps, values in losses["curves"]}
    assert curves["validation, code (3.000)"] == {10: 4.5, 20: 4.0, 30: 3.5, 40: 3.0}
    assert len(curves["training, smoothed"]) == 40 and losses["limits"][0] == 0 < losses["box"][0] < losses["box"][1]
    assert "Gap" not in page.text and "Diagnostics" not in page.text


def test_a_page_loads_nothing_and_escapes_its_content(tmp_path: Path) -> None:
    """Names of a source and a run and generated text have markup, which is escaped everywhere, also in figures."""
    event = {"kind": "event", "step": 40, "event": MARKUP, MARKUP: MARKUP}
    text = {"kind": "event", "step": 40, "event": "text", "samples": [{"prompt": MARKUP, "text": MARKUP}]}
    records = [event, text, diagnostics(1), diagnostics(20)]
    runs = [write_run(tmp_path / name, source=MARKUP, records=records) for name in ("a", "b")]
    named = [f"{MARKUP.replace('/', '')}={runs[0]}", str(runs[1])]
    page = Page(write_report(named, defaults={}, target=tmp_path / "page.html"))
    assert [tag for tag, _ in page.tags if tag in ("script", "link")] == ["script"]
    script = page.source.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy in [attributes.get("content") for tag, attributes in page.tags if tag == "meta"]
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:image/png;base64,"))
    assert not re.findall(r"url\((?!#)", page.source) and "@import" not in page.source
    figures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert any(MARKUP in str(attributes["aria-label"]) for attributes in figures)
    known = {"role", "aria-label", "xmlns", "xmlns:xlink", "width", "height", "viewbox", "version"}
    assert all(set(attributes) <= known for attributes in figures)
    # Ids of clip paths must be unique; otherwise one figure is clipped by another's frame.
    names = re.findall(r'<clipPath id="([^"]+)"', page.source)
    assert names and len(set(names)) == len(names)


def test_a_page_of_several_runs_or_with_a_baseline(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", gap=0.05)]
    with pytest.raises(ValueError, match="--output"):
        write_report(runs, defaults={})
    with pytest.raises(ValueError, match="two runs are called a"):
        write_report([runs[0], f"a={runs[1]}"], defaults={}, target=tmp_path / "page.html")
    page = Page(write_report(runs, defaults={}, target=tmp_path / "page.html"))
    assert "loss above a in percent" in page.source and "held-out loss of code" in page.source
    one = Page(write_report([runs[1]], defaults={}, baseline=f"BF16={runs[0]}"))
    assert "loss above BF16 in percent" in one.source
    gaps = validation_gaps(open_run(runs[1]), open_run(runs[0]))
    assert gaps == pytest.approx({step: 100 * 0.05 / (11 - step / 20) for step in (10, 20, 30, 40)})


def test_a_run_of_an_older_version_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 3.0, "tokens": 10, "old": 1}\n')
    assert "state unknown" in Page(write_report([tmp_path], defaults=DEFAULTS)).text
    assert plot_loss(tmp_path).stat().st_size > 10_000
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run", "step": 0}\n')
    with pytest.raises(ValueError, match="has no training steps yet"):
        open_run(tmp_path)
    assert named_run("a=b") == ("a", Path("b")) and named_run(tmp_path)[0] == tmp_path.name


def test_the_picture_of_the_loss(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", source=MARKUP, records=[diagnostics(1)])
    other = write_run(tmp_path / "other", gap=0.05)
    image = matplotlib.image.imread(plot_loss(run, f"BF16={other}"))
    assert image.shape[1] > 900 and image.std() > 0.05
    names, values = measured(open_run(run), QUANTITIES[0])
    assert names == ["blocks.0.up", "blocks.0.down"]
    np.testing.assert_array_equal(values, [[17.0], [math.nan]])


def test_a_strangers_folder_takes_nothing_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No link is followed, no alias is expanded, no pipe waited for."""
    run = write_run(tmp_path / "run")
    (tmp_path / "private.yaml").write_text("token: canary-1234\n")
    config = run / "config.yaml"
    config.unlink()
    config.symlink_to(tmp_path / "private.yaml")
    assert report.main([str(run)]) == 2 and not (run / "report.html").exists()
    assert "config.yaml is a link, a pipe or a device, not a plain file" in capsys.readouterr().err
    config.unlink()
    lines = ["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    config.write_text("\n".join(lines) + "\n")
    began = time.monotonic()
    assert report.main([str(run)]) == 0 and time.monotonic() - began < 60
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert report.main([str(run)]) == 2 and "metrics.jsonl is a link, a pipe" in capsys.readouterr().err


def test_control_characters_of_strangers_are_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[2J\r\nb\u202e\tc") == "a\\x1b[2J\\r\nb\\u202e\tc"
    assert report.main([str(tmp_path / "\x1b]0;title\x07")]) == 2
    assert "\x1b" not in (line := capsys.readouterr().err) and "\\x1b]0;title\\x07" in line
